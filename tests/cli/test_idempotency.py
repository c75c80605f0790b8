"""`--idempotency-key`: the same key starts nothing twice; and where nobody can be asked, that is an error."""

import pytest

from tests.kubernetes.conftest import api, cluster_of_objects, connect, server  # noqa: F401  (fixtures)
from tests.kubernetes.test_one_request import NAMESPACE, NODE


def test_the_same_key_starts_nothing_twice(windlass, run_file, server, api, cluster_of_objects):  # noqa: F811
    there, _ = cluster_of_objects
    server.on("/apis", lambda handler: handler.json({"groups": []}))
    server.on("/version", lambda handler: handler.json({"major": "1", "minor": "36"}))
    server.on(NAMESPACE, lambda handler: handler.json({"metadata": {"name": "team"}}))
    server.on("/api/v1/nodes", lambda handler: handler.json({"metadata": {}, "items": [NODE]}))
    pods = {"metadata": {}, "items": []}
    server.on(f"{NAMESPACE}/pods", lambda handler: handler.json({} if handler.command == "POST" else pods))
    server.on(f"{NAMESPACE}/resourcequotas", lambda handler: handler.json({"metadata": {}, "items": []}))

    def start(key):
        return windlass(
            *("run", run_file, "--on", "kubernetes", "--detach", "--no-retry", "name=once"),
            *("image.name=registry/image:1", "target.kubernetes.storage=none", "--idempotency-key", key, "--json"),
        )

    first = start("order-1")
    assert first.code == 0, first
    there["jobs", "once"]["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimit"}]}
    asked = len(server.requests)
    again = start("order-1")
    assert again.json["name"] == "once"
    assert "nothing is started" in again.json["warnings"][0]
    assert not [path for verb, path, _ in server.requests[asked:] if verb == "POST"]
    assert again.json["state"] == "failed"
    assert again.code == 1


def test_a_key_that_is_none_is_refused(windlass, run_file):
    answer = windlass("run", run_file, "--idempotency-key", "two words", "--json")
    assert (answer.code, answer.json["code"]) == (2, "usage")


def test_a_sweep_takes_no_key(windlass, run_file):
    answer = windlass("run", run_file, "--sweep", "train.seed=1,2", "--idempotency-key", "order-1", "--json")
    assert (answer.code, "--idempotency-key" in answer.json["error"]) == (2, True)


@pytest.mark.parametrize("words", [("--json",), ()])
def test_nobody_is_asked_without_a_terminal(windlass, tmp_path, words):
    """pytest's stdin is no terminal."""
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: old\nmodel: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    answer = windlass("rm", "old", *words)
    assert answer.code == 2
    assert folder.exists()
    if words:
        assert answer.json["code"] == "needs-confirmation"
        assert answer.json["fix"] == "windlass rm old --yes"
