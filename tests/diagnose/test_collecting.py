"""The facts that a cluster or Slurm has now, asked over HTTP and through its commands."""

from __future__ import annotations

import pytest

from tests.diagnose.test_verdict import event, exited, pod
from tests.kubernetes.api_server import Server, write_kubeconfig
from tests.kubernetes.test_client_waiting import cluster_job
from windlass.diagnose import Facts, diagnose
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.collecting import collect as collect_objects
from windlass.targets.slurm.collecting import collect as collect_records
from windlass.targets.slurm.state import SubmittedJob

TEAM = "/api/v1/namespaces/team"


@pytest.fixture
def server():
    one = Server()
    yield one
    one.stop()


@pytest.fixture
def api(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server.url, {"token": "t"})))
    one = Api(access())
    yield one
    one.close()


def serve(server, path, *items):
    server.on(path, lambda handler: handler.json({"metadata": {}, "items": list(items)}))


def test_what_a_cluster_knows(server, api):
    lost = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting"}
    serve(server, f"{TEAM}/pods", pod("llama-0", phase="Failed", state=exited(137)))
    serve(server, f"{TEAM}/events", event("Killing", "x", "llama-0"), event("Failed", "y", "other-0"))
    server.on(
        "/api/v1/nodes/node-a",
        lambda one: one.json({"metadata": {"name": "node-a"}, "status": {"conditions": [lost]}}),
    )
    facts = collect_objects(api, cluster_job())
    assert [one["involvedObject"]["name"] for one in facts["events"]] == ["llama-0"]
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == "node_lost"
    assert verdict.evidence[0].host == "node-a"


def test_what_may_not_be_read_is_left_out(server, api):
    serve(server, f"{TEAM}/pods", pod("llama-0", phase="Failed", state=exited(137, "OOMKilled")))
    for path in (f"{TEAM}/events", "/api/v1/nodes/node-a"):
        server.on(path, lambda one: one.status(403, "Forbidden", "may not"))
    facts = collect_objects(api, cluster_job())
    assert facts["nodes"] == facts["events"] == []
    assert diagnose(Facts.read(facts)).name == "host_oom"


def test_what_slurm_knows(tmp_path, monkeypatch):
    """Commands as Slurm's print, on the path of this test alone."""
    answers = {
        "scontrol": "JobId=7 JobName=x\n   JobState=TIMEOUT Reason=TimeLimit Dependency=(null)",
        "sacct": "JobID|JobName|State|ExitCode\n7|x|TIMEOUT|0:0\n7.batch|batch|CANCELLED|0:15",
    }
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = collect_records(SubmittedJob("7", None, None, None, None))
    assert diagnose(Facts.read(facts)).name == "time_limit"
