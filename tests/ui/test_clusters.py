"""Runs of clusters in the list: asked for over HTTP, as Kubernetes answers."""

import json
import time

import pytest

from tests.kubernetes.api_server import Server
from tests.ui.folders import write_run
from windlass.cli.views.ui import sources
from windlass.targets.kubernetes.api import http as api_module
from windlass.targets.kubernetes.manifests.labels import MANAGED_BY, NAME_ANNOTATION
from windlass.ui import library as library_module
from windlass.ui.library import Library

JOBS = "/apis/batch/v1/namespaces/team/jobs"


def job(name, **status):
    return {"metadata": {"name": name, "labels": MANAGED_BY, "annotations": {NAME_ANNOTATION: name}}, "status": status}


@pytest.fixture
def clusters(tmp_path, monkeypatch):
    """Two clusters, `lab` and `farm`, of one kubeconfig."""
    servers = {"lab": Server(), "farm": Server()}
    for server in servers.values():
        server.on("/apis", lambda handler: handler.json({"groups": []}))
        server.on("/version", lambda handler: handler.json({"major": "1", "minor": "34"}))
    names = list(servers)
    context = {"user": "ann", "namespace": "team"}
    config = {
        "contexts": [{"name": name, "context": {**context, "cluster": name}} for name in names],
        "clusters": [{"name": name, "cluster": {"server": servers[name].url}} for name in names],
        "users": [{"name": "ann", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(api_module, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(library_module, "CLUSTER_SECONDS", 0.2)
    monkeypatch.setattr(library_module, "ROW_SECONDS", 0.05)
    yield servers
    for server in servers.values():
        server.stop()


def rows_once(library, condition):
    deadline = time.monotonic() + 20
    while not condition(rows := library.rows(), library.problem):
        assert time.monotonic() < deadline, (rows, library.problem)
        time.sleep(0.05)
    return rows


def test_runs_of_clusters_stand_in_the_same_list_and_one_that_fails_hides_no_other(tmp_path, clusters):
    write_run(tmp_path / "runs", "here", steps=5)
    lab, farm = clusters["lab"], clusters["farm"]
    done = job("done", conditions=[{"type": "Complete", "status": "True"}], succeeded=1)
    lab.on(JOBS, lambda handler: handler.json({"items": [job("far", active=2), job("here", active=1), done]}))
    farm.on(JOBS, lambda handler: handler.json({"items": [job("cow", active=1)]}))
    library = Library(tmp_path / "runs", sources(("kubernetes:lab", "kubernetes:farm")))
    rows = rows_once(library, lambda rows, _: len(rows) == 4)
    states = {run_id: row["state"] for run_id, row in rows.items()}
    assert states == {
        "here": "finished",  # its folder is on this machine: it is not listed twice
        "kubernetes:lab/far": "running",
        "kubernetes:lab/done": "finished",
        "kubernetes:farm/cow": "running",
    }
    assert rows["kubernetes:lab/far"]["target"] == "kubernetes:lab"

    lab.on(JOBS, lambda handler: handler.status(403, "Forbidden", "ann may not list jobs"))
    farm.on(JOBS, lambda handler: handler.json({"items": [job("pig", active=1)]}))
    rows = rows_once(library, lambda rows, problem: problem and "kubernetes:farm/pig" in rows)
    assert "kubernetes:lab" in library.problem
    assert "may not list jobs" in library.problem or "403" in library.problem
    assert "kubernetes:lab/far" in rows  # what it said before
    assert "kubernetes:farm/cow" not in rows

    lab.on(JOBS, lambda handler: handler.json({"items": []}))
    rows = rows_once(library, lambda _, problem: problem is None)
    assert set(rows) == {"here", "kubernetes:farm/pig"}
