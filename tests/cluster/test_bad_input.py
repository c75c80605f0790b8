"""Mistakes on a real cluster: each is one clear error with the command that fixes it, and leaves nothing behind."""

import json
import os
import socket

import pytest
import yaml

from tests.cluster.bench import Bench
from tests.cluster.box.layout import DEVELOPER_KUBECONFIG

pytestmark = pytest.mark.cluster

NO_OVERLAY = 'target.kubernetes.pod={"containers": [{"name": "trainer"}]}'


@pytest.fixture(scope="module")
def bench(cluster, tmp_path_factory):
    with cluster.namespace("bad") as namespace:
        yield Bench(cluster, namespace, tmp_path_factory.mktemp("bad"))


@pytest.fixture
def kubeconfig(bench, tmp_path):
    """A copy of the kubeconfig to spoil."""
    view = json.loads(bench.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))

    def spoiled(change):
        change(view)
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(view))
        return str(path)

    return spoiled


def refused(bench, *overrides, kubeconfig=None):
    """The one error of a run that cannot be."""
    before = everything(bench)
    environment = dict(bench.environment)
    if kubeconfig:
        bench.environment["KUBECONFIG"] = kubeconfig
    try:
        answer = bench.windlass("run", bench.file, "name=bad", *overrides)
    finally:
        bench.environment = environment
    assert answer.returncode == 2, answer
    assert answer.stderr.count("error: ") == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    assert "  fix " in answer.stderr, answer.stderr
    assert everything(bench) == before
    assert not bench.run_folder("bad").path.exists()
    return answer.stderr


def everything(bench):
    return bench.cluster.kubectl("get", "all,configmaps,secrets", "-n", bench.namespace, "-o", "name").split()


def test_wrong_context(bench):
    context = bench.cluster.kubectl("config", "current-context").strip()
    said = refused(bench, "--on", f"kubernetes:{context}x")
    assert f"there is no context '{context}x'" in said
    assert f"--on kubernetes:{context}" in said


def test_nobody_answers(bench, kubeconfig):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{free.getsockname()[1]}"
        path = kubeconfig(lambda view: view["clusters"][0]["cluster"].update(server=address))
        said = refused(bench, kubeconfig=path)
    assert "does not answer" in said
    assert address in said
    assert "cluster-info" in said


def test_expired_token(bench, kubeconfig):
    path = kubeconfig(lambda view: view["users"][0].update(user={"token": "eyJhbGciOiJSUzI1NiJ9.expired.x"}))
    said = refused(bench, kubeconfig=path)
    assert "does not accept your credentials" in said
    assert "kubectl config set-credentials" in said


def test_expired_token_of_a_plugin(bench, kubeconfig, tmp_path):
    """As EKS does it: a program prints the token, and is asked again when the server does not take it."""
    plugin, calls = tmp_path / "aws", tmp_path / "calls"
    answer = {"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "stale"}}
    plugin.write_text(f"#!/bin/sh\necho call >> {calls}\necho '{json.dumps(answer)}'\n")
    plugin.chmod(0o755)
    entry = {"apiVersion": answer["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    said = refused(bench, kubeconfig=kubeconfig(lambda view: view["users"][0].update(user={"exec": entry})))
    assert "does not accept your credentials" in said
    assert "aws sso login" in said
    assert calls.read_text().count("call") == 2


def test_missing_permission(bench):
    bench.cluster.need_box("has a user who may little")
    said = refused(bench, kubeconfig=str(DEVELOPER_KUBECONFIG))
    assert "you may not" in said
    assert f"in the namespace {bench.namespace}" in said
    assert "kubectl auth can-i" in said


def test_whoever_may_not_create_a_role_leaves_no_loop(bench):
    """`edit` is enough to train, and not to let something else do so."""
    bench.cluster.need_box("has a user who may little")
    who = ("--clusterrole=edit", "--user=developer", "-n", bench.namespace)
    bench.cluster.kubectl("create", "rolebinding", "developer", *who)
    said = refused(bench, "--detach", "target.kubernetes.job=job", kubeconfig=str(DEVELOPER_KUBECONFIG))
    assert "the retry loop cannot be left in the cluster: you may not create roles" in said
    assert "kubectl create role" in said
    assert "--no-retry" in said


def test_missing_operator(bench):
    """The box has all operators, so one of them is hidden: its API group is not served to this user's question."""
    bench.cluster.need_box("takes an operator's kind away for a moment")
    name = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
    kept = bench.cluster.kubectl("get", "crd", name, "-o", "json")
    bench.cluster.kubectl("delete", "crd", name)
    try:
        said = refused(bench, "target.kubernetes.job=hyperpod")
    finally:
        value = json.loads(kept)
        metadata = {
            key: value["metadata"][key] for key in ("name", "labels", "annotations") if key in value["metadata"]
        }
        definition = {"apiVersion": value["apiVersion"], "kind": value["kind"], "metadata": metadata}
        bench.cluster.apply({**definition, "spec": value["spec"]})
    assert "the cluster has no hyperpod" in said
    assert "leave target.kubernetes.job out" in said


def test_missing_namespace(bench):
    said = refused(bench, "target.kubernetes.namespace=nowhere")
    assert "there is no namespace 'nowhere'" in said
    assert "create namespace nowhere" in said


def test_invalid_namespace(bench):
    said = refused(bench, "target.kubernetes.namespace=No_Where")
    assert "No_Where" in said


def test_missing_claim(bench):
    said = refused(bench, "target.kubernetes.storage=pvc:windlass-rusn")
    assert "there is no claim 'windlass-rusn'" in said
    assert "pvc:windlass-runs" in said


def test_missing_image(bench):
    said = refused(bench, "target.kubernetes.image=null", NO_OVERLAY)
    assert "which image" in said


def test_missing_secret_and_account(bench):
    said = refused(bench, "target.kubernetes.secrets=[HF_TOKEN=secret:nothing/token]")
    assert "there is no secret nothing" in said
    assert "HF_TOKEN_OF_NOBODY" not in os.environ
    said = refused(bench, "target.kubernetes.secrets=[HF_TOKEN_OF_NOBODY]")
    assert "HF_TOKEN_OF_NOBODY" in said
    said = refused(bench, "target.kubernetes.service_account=nobody")
    assert "there is no service account nobody" in said


def test_a_field_that_pods_do_not_have(bench):
    said = refused(bench, 'target.kubernetes.pod={"hostNetwrok": true}')
    assert "hostNetwrok" in said


def test_a_name_that_is_taken(bench):
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "bad", "namespace": bench.namespace},
        "spec": {
            "suspend": True,
            "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "b"}]}},
        },
    }
    bench.cluster.apply(job)
    try:
        said = refused(bench, "target.kubernetes.job=job")
        assert "windlass did not make" in said
        assert "name=OTHER" in said
    finally:
        bench.cluster.kubectl("delete", "job", "bad", "-n", bench.namespace)


def test_an_image_that_is_not_there_is_said_while_it_waits(bench):
    asked = ("target.kubernetes.image=windlass/nothing:none", "resources.nodes=1", "target.kubernetes.job=job")
    bench.submit("noimage", *asked, NO_OVERLAY)
    try:
        bench.wait(lambda: "cannot be pulled" in (bench.show("noimage")["reason"] or ""), "a reason", "noimage")
        assert "target.kubernetes.image=" in bench.show("noimage")["reason"]
    finally:
        bench.must("stop", "noimage", "--now")
