"""The facts that a cluster or Slurm has now, asked over HTTP and through its commands."""

from __future__ import annotations

import json

import pytest

from tests.diagnose.test_verdict import event, exited, pod
from tests.kubernetes.api_server import Server, write_kubeconfig
from tests.kubernetes.test_client_waiting import cluster_job
from windlass.cli.main import run_command
from windlass.diagnose import Facts, diagnose
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.collecting import collect as collect_objects
from windlass.targets.slurm.commands import Commands
from windlass.targets.slurm.queue import collect as collect_records

TEAM = "/api/v1/namespaces/team"


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def api(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server.url, {"token": "t"})))
    api = Api(access())
    yield api
    api.close()


def serve(server, path, *items):
    server.on(path, lambda handler: handler.json({"metadata": {}, "items": list(items)}))


def test_what_a_cluster_knows(server, api):
    lost = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting"}
    serve(server, f"{TEAM}/pods", pod("llama-0", phase="Failed", state=exited(137)))
    serve(server, f"{TEAM}/events", event("Killing", "x", "llama-0"), event("Failed", "y", "other-0"))
    server.on(
        "/api/v1/nodes/node-a",
        lambda handler: handler.json({"metadata": {"name": "node-a"}, "status": {"conditions": [lost]}}),
    )
    facts = collect_objects(api, cluster_job())
    assert [event["involvedObject"]["name"] for event in facts["events"]] == ["llama-0"]
    verdict = diagnose(Facts.read(facts))
    assert verdict.name == "node_lost"
    assert verdict.evidence[0].host == "node-a"


def test_what_may_not_be_read_is_left_out(server, api):
    serve(server, f"{TEAM}/pods", pod("llama-0", phase="Failed", state=exited(137, "OOMKilled")))
    for path in (f"{TEAM}/events", "/api/v1/nodes/node-a"):
        server.on(path, lambda handler: handler.status(403, "Forbidden", "may not"))
    facts = collect_objects(api, cluster_job())
    assert facts["nodes"] == facts["events"] == []
    assert diagnose(Facts.read(facts)).name == "host_oom"


FOREIGN = {
    "pytorchjob": ("kubeflow.org", "v1", "pytorchjobs", "training.kubeflow.org/job-name"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "jobset.sigs.k8s.io/jobset-name"),
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-name"),
    "job": ("batch", "v1", "jobs", "batch.kubernetes.io/job-name"),
    "rayjob": ("ray.io", "v1", "rayjobs", "ray.io/cluster"),
    "hyperpodpytorchjob": ("sagemaker.amazonaws.com", "v1", "hyperpodpytorchjobs", "app.kubernetes.io/name"),
}


def worker(job, label, error):
    value = pod(f"{job}-worker-1", phase="Failed", state=exited(1))
    value["metadata"] |= {"namespace": "team", "labels": {label: job}}
    log = f"2026-11-15T10:05:00Z step 3 loss 2.1\n2026-11-15T10:06:00Z {error}"
    return value, log


@pytest.fixture
def ask(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server.url, {"token": "t"})))

    def command(*arguments):
        code = run_command(["why", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return command


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_job_that_windlass_did_not_launch(kind, server, ask):
    group, version, plural, label = FOREIGN[kind]
    server.on(
        f"/apis/{group}", lambda handler: handler.json({"preferredVersion": {"groupVersion": f"{group}/{version}"}})
    )
    status = {"rayClusterName": "theirs"} if kind == "rayjob" else {}
    job = {"metadata": {"name": "theirs", "uid": "u1"}, "status": status}
    server.on(f"/apis/{group}/{version}/namespaces/team/{plural}/theirs", lambda handler: handler.json(job))
    own, log = worker("theirs", label, "ModuleNotFoundError: No module named 'apex'")
    other, _ = worker("others", label, "")
    serve(server, f"{TEAM}/pods", own, other)
    server.on(f"{TEAM}/pods/theirs-worker-1/log", lambda handler: handler.stream(log.encode()))
    code, answer = ask(f"{kind}/theirs", "-n", "team")
    assert code == 0
    assert answer["class"] == "user_import"
    told = answer["evidence"][0]
    assert (told["source"], told["host"], told["time"]) == ("theirs-worker-1", "node-a", "2026-11-15T10:06:00Z")


def test_a_pod_that_windlass_did_not_launch(server, ask):
    waiting = {
        "waiting": {"reason": "ImagePullBackOff", "message": "toomanyrequests: You have reached your pull limit"}
    }
    server.on(f"{TEAM}/pods/web-0", lambda handler: handler.json(pod("web-0", phase="Pending", state=waiting)))
    assert ask("pod/web-0", "-n", "team")[1]["class"] == "image_rate_limit"
    requests = [path for _, path, _ in server.requests]
    assert not any(path.endswith("/log") for path in requests)  # it has not run


def test_a_job_that_is_not_there_and_a_kind_that_is_not_served(ask):
    for name, words in (
        ("pod/x", "no pod x in the namespace"),
        ("pytorchjob/x", "does not serve"),
        ("cat/x", "no kind"),
    ):
        code, answer = ask(name, "-n", "team")
        assert code != 0
        assert words in answer["error"]


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
    facts = collect_records(Commands(), "7")
    assert diagnose(Facts.read(facts)).name == "time_limit"
