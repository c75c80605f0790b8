"""`windlass run --on kubernetes` makes one request: what the API server has checked is what it gets."""

import json
from pathlib import Path

import windlass

NAMESPACE = "/api/v1/namespaces/team"
NODE = {
    "metadata": {"name": "n1"},
    "status": {"allocatable": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
}


def answer_as_a_cluster(server):
    server.on("/apis", lambda handler: handler.json({"groups": []}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    server.on(NAMESPACE, lambda handler: handler.json({"metadata": {"name": "team"}}))
    server.on("/api/v1/nodes", lambda handler: handler.json({"metadata": {}, "items": [NODE]}))
    server.on(f"{NAMESPACE}/pods", lambda handler: handler.json({}, 201))
    server.on(f"{NAMESPACE}/resourcequotas", lambda handler: handler.json({"metadata": {}, "items": []}))


def test_the_bytes_that_were_checked_are_the_bytes_that_are_sent(
    windlass,
    run_file,
    server,
    api,
    cluster_of_objects,
    tmp_path,
):
    """Also what is drawn or read anew by every rendering: the submission's secret, packed code, a secret's value."""
    there, _ = cluster_of_objects
    answer_as_a_cluster(server)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("x = 1\n")
    (tmp_path / "key").write_text("a-value")
    answer = windlass(
        *("run", run_file, "--on", "kubernetes", "--detach", "--no-retry", "name=once", "image.name=registry/image:1"),
        *("target.kubernetes.code=code", f"target.kubernetes.secrets=['KEY=file:{tmp_path / 'key'}']"),
        *("target.kubernetes.storage=none", "--inject", "kill:rank=1,step=3"),
    )
    assert answer.code == 0, answer
    assert ("jobs", "once") in there
    checked, sent = [], []
    for (command, path, params), body in zip(server.requests, server.bodies, strict=True):
        if command == "POST" and not path.endswith("/pods"):
            (checked if params.pop("dryRun", None) else sent).append((path, params, body))
    assert len(sent) == 5
    assert checked == sent
    secrets = [json.loads(body)["stringData"] for path, _, body in sent if path.endswith("/secrets")]
    assert secrets[0]["KEY"] == "a-value"
    assert len(secrets[0]["WINDLASS_TOKEN"]) == 64


def test_a_run_that_is_under_way_is_submitted_once_and_keeps_its_loop(run_file, server, api, cluster_of_objects):
    there, _ = cluster_of_objects
    answer_as_a_cluster(server)
    settings = ("name=once", "image.name=registry/image:1", "target.kubernetes.storage=none")
    run = windlass.load(run_file, *settings)
    first = windlass.submit(run, on="kubernetes")
    assert {name for plural, name in there if plural == "jobs"} == {"once", "once-loop"}
    asked = Path(first.folder) / "asked.yaml"
    before = (asked.stat().st_mtime_ns, len([1 for verb, *_ in server.requests if verb == "POST"]))
    again = windlass.submit(run, on="kubernetes", patience=5.0)
    assert again.folder == first.folder
    assert (asked.stat().st_mtime_ns, len([1 for verb, *_ in server.requests if verb == "POST"])) == before
