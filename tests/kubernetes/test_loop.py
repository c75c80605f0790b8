"""The retry loop that --detach leaves in a cluster: what it is made of, what it carries, and whose word counts."""

import base64
import json

import pytest

from tests.kubernetes.golden import SERVED
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.loop import LoopRecords, ReplacedError, pull, records_for_loop
from windlass.targets.kubernetes.manifests import code
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind
from windlass.targets.kubernetes.manifests.code import Carried, config_maps
from windlass.targets.kubernetes.manifests.loop import render_loop
from windlass.targets.kubernetes.manifests.render import layout_of
from windlass.targets.protocol import LOOP_VARIABLE

OVERLAY = {
    "containers": [
        {
            "name": "trainer",
            "env": [
                {"name": "PROXY", "value": "http://proxy"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}},
            ],
            "resources": {"limits": {"nvidia.com/gpu": "8"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tools", "mountPath": "/tools"}],
        }
    ],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "unbound"}},
        {"name": "tools", "hostPath": {"path": "/opt/tools"}},
    ],
}


def run_with(**options):
    target = {"kind": "kubernetes", "kubernetes": {"image": "registry/llm:1", "context": "mine", **options}}
    return parse_run(
        {"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}, "target": target}
    )


def loop_of(run, kind=JobKind.INDEXED, **carried):
    facts = ClusterFacts(SERVED, namespace="team")
    return render_loop(run, run, kind, facts, Carried(**carried), patience=60, faults=None, history="")


def test_its_pod_starts_where_those_of_the_run_cannot():
    loop = loop_of(run_with(pod=OVERLAY))
    spec = loop.job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert "TOKEN" not in str(container), "a secret that may be missing"
    assert "unbound" not in str(spec), "a claim that may be"
    assert "gpu" not in str(spec)
    assert {"PROXY", "WINDLASS_LOOP"} <= {one["name"] for one in container["env"]}
    assert {"name": "tools", "mountPath": "/tools"} in container["volumeMounts"]
    assert "windlass.dev/run" not in str(loop.job), "it is no rank"


@pytest.mark.parametrize("kind", JobKind)
def test_its_role_is_of_its_namespace_and_of_the_kind_that_it_submits(kind):
    loop = loop_of(run_with(), kind)
    role = next(one for one in loop.objects if one["kind"] == "Role")
    assert all("*" not in str(rule) for rule in role["rules"])
    kinds = {name for rule in role["rules"] for name in rule["resources"] if name.endswith("jobs")}
    assert kinds == {"jobs", SERVED.kinds[kind].plural}
    of_cluster = [rule for one in loop.for_nodes for rule in one.get("rules", ())]
    assert of_cluster == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]


def test_secrets_are_sent_and_not_shown():
    loop = loop_of(run_with(secrets=["HF_TOKEN"]), secret_values={"HF_TOKEN": "correct-horse"})
    assert loop.secret_values == {"HF_TOKEN": "correct-horse"}
    assert "correct-horse" not in str(loop) + repr(loop)


def test_the_loop_submits_the_very_bytes_that_were_carried(tmp_path, monkeypatch):
    """Not those of its own pod: the code's folder is on another machine."""
    archive = bytes(range(256)) * 8000
    for part in config_maps("r-loop-code", archive):
        for key, data in part["binaryData"].items():
            (tmp_path / key).write_bytes(base64.b64decode(data))
    monkeypatch.setattr(code, "CARRIED", str(tmp_path))
    run = run_with(code="/home/me/code", secrets=["KEY=file:/home/me/key"])
    carried = code.gather(run, {LOOP_VARIABLE: "r", "KEY": "value"})
    assert carried.archives == {"code": archive}
    assert carried.secret_values == {"KEY": "value"}


@pytest.fixture
def config_map(server):
    """One ConfigMap of an API server, which takes a change of its newest version alone."""
    value = {"metadata": {"name": "r-loop", "resourceVersion": "1"}, "data": {"history.jsonl": ""}}

    def answer(handler):
        if handler.command == "PATCH":
            change = json.loads(handler.body)
            if change["metadata"].pop("resourceVersion") != value["metadata"]["resourceVersion"]:
                handler.status(409, "Conflict", "the object has been modified")
                return
            value["metadata"] |= change["metadata"]
            value["metadata"]["resourceVersion"] += "1"
            value["data"] |= change.get("data") or {}
        handler.json(value)

    server.on("/api/v1/namespaces/team/configmaps/r-loop", answer)
    return value


def test_a_loop_that_was_replaced_decides_nothing(api, config_map, tmp_path):
    first, second = (LoopRecords(api, RunFolder(tmp_path / pod), "r-loop", pod) for pod in ("a", "b"))
    first.claim()
    first.record("retry", why="gone")
    first.folder.record("checkpoint", step=3)  # as it came from a pod
    first.folder.record("submitted", job="r")
    first.push()
    second.claim()
    assert [one["event"] for one in read_json_lines(second.folder.history)] == ["retry", "submitted"]
    with pytest.raises(ReplacedError):
        first.record("retry", why="again")
    assert len(list(read_json_lines(first.folder.history))) == 3, "and it wrote down nothing"
    second.record("waits", why="a secret is missing")
    assert config_map["data"]["history.jsonl"].count("\n") == 3


def test_another_machine_takes_over_what_the_loop_did(api, server, config_map, tmp_path):
    run = run_with()
    folder = RunFolder(tmp_path / "r")
    folder.create(run)
    folder.record("submitted", job="r")
    loop = LoopRecords(api, RunFolder(tmp_path / "pod"), "r-loop", "a")
    config_map["data"]["history.jsonl"] = records_for_loop(folder)
    loop.claim()
    loop.folder.create(run_with(memory="7Gi", context=None, namespace="team"))
    loop.record("retry", why="too much memory", edit={"target.kubernetes.memory": ["500Gi", "7Gi"]})
    server.on(
        "/apis/batch/v1/namespaces/team/jobs/r",
        lambda handler: handler.json({"metadata": {"name": "r", "uid": "second", "annotations": {}}}),
    )
    layout = layout_of(JobKind.INDEXED, run)
    job = ClusterJob("mine", "team", JobKind.INDEXED, "batch/v1", "jobs", "r", "first", "d", "s", layout, ended=True)
    for _ in range(2):
        job = pull(api, folder, job)
    assert (job.uid, job.ended, ClusterJob.of(folder)) == ("second", False, job)
    assert [one["event"] for one in read_json_lines(folder.history)] == ["submitted", "retry"]
    options = folder.load_run().target.kubernetes
    assert (options.memory, options.context) == ("7Gi", "mine")
