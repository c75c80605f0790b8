"""The value of a secret is in the Secret and in the environment of the ranks, and nowhere else."""

import json
import secrets
import subprocess

import pytest

from tests.cluster.bench import Bench

pytestmark = pytest.mark.cluster

KINDS = "jobs,pods,configmaps,services,events,trainjobs,trainingruntimes,jobsets,pytorchjobs,replicasets,endpointslices"


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    return Bench(cluster, namespace, tmp_path)


def processes():
    """The command lines of every process of this machine, those in pods included."""
    return subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def test_the_token_is_nowhere_but_in_its_secret(bench, cluster):
    token = f"hf_{secrets.token_hex(16)}"
    bench.environment["HF_TOKEN"] = token
    shape = ("resources.nodes=2", "train.global_batch=2", "train.steps=8", "target.kubernetes.job=trainjob")
    asked = ("run", bench.file, "name=secretive", "target.kubernetes.secrets=[HF_TOKEN]", *shape)
    places = {"dry run": bench.must(*asked, "--dry-run"), "dry run as JSON": bench.must(*asked, "--dry-run", "--json")}
    hold = ("--inject", "sleep:rank=0,step=4,seconds=20")
    with bench.following(*asked, *hold) as follower:
        bench.wait_for_step("secretive", 3)
        seen = bench.must("exec", "secretive", "1", "--", "sh", "-c", 'test "$HF_TOKEN" && echo it is there')
        assert seen == "it is there\n"
        places["processes"] = processes()
        places["objects"] = cluster.kubectl("get", KINDS, "-n", bench.namespace, "-o", "json", "--show-managed-fields")
        places["show"] = bench.must("show", "secretive", "--json")
        assert follower.wait(timeout=900) == 0, bench.said()
    places["follower"] = bench.said()
    places["logs"] = bench.must("logs", "secretive")
    names = cluster.get("secrets", namespace=bench.namespace, selector="windlass.dev/run=secretive")["items"]
    assert len(names) == 1  # so that the search below has something it could have found
    assert names[0]["metadata"]["ownerReferences"]
    for pod in cluster.get("pods", namespace=bench.namespace)["items"]:
        places[pod["metadata"]["name"]] = cluster.kubectl("logs", pod["metadata"]["name"], "-n", bench.namespace)
    found = [what for what, text in places.items() if token in text]
    assert found == []
    holders = subprocess.run(
        ["grep", "-rlF", token, str(bench.folder)], capture_output=True, text=True, check=False
    ).stdout.split()
    assert holders == []
    if cluster.is_box:  # the run folder of the pods too
        command = ["grep", "-rlF", token, str(cluster.storage(bench.namespace))]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
    bench.must("stop", "secretive")
    left = cluster.get("secrets", namespace=bench.namespace, selector="windlass.dev/run=secretive")["items"]
    assert json.dumps(left) == "[]"
