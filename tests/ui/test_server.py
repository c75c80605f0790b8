"""The server: who may read, what is never served, and what it answers when folders are damaged or vanish."""

import gzip
import json
import shutil
import socket
import time

import pytest

from tests.ui.conftest import Served
from tests.ui.folders import write_run

pytest.importorskip("uvicorn")


def test_every_answer_has_the_policy_and_nothing_runs_inline(served):
    for path in ("/", "/run?id=small", "/static/main.js", "/api/runs", "/nowhere"):
        _, headers, _ = served.ask(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    _, _, page = served.ask("/")
    assert b"<script src=" in page
    assert page.count(b"<script") == page.count(b'src="/static/') - page.count(b'<img src="/static/')
    assert b"http://" not in page
    assert b"https://" not in page


def test_scripts_come_packed_and_are_not_sent_twice(served):
    status, headers, packed = served.ask("/static/vendor/uPlot.js", accept_encoding="gzip")
    _, plain_headers, plain = served.ask("/static/vendor/uPlot.js")
    assert (status, headers["content-encoding"], gzip.decompress(packed)) == (200, "gzip", plain)
    assert "content-encoding" not in plain_headers
    assert served.ask("/static/vendor/uPlot.js", if_none_match=headers["etag"])[::2] == (304, b"")


def test_nothing_but_reading_is_answered(served):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = served.ask("/api/runs", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")


OUTSIDE = (
    "/static/../server.py",
    "/static/..%2f..%2fserver.py",
    "/static/vendor/../../library.py",
    "//etc/passwd",
    "/../../../../etc/passwd",
    "/static/main.js%00.html",
    "/static/vendor/manifest.json",
)
NO_RUNS = ("../small", "..", "/etc", "small/../small", "small/logs", "", "a\0b", "x" * 5000)


def test_no_path_leads_out_and_ids_are_no_paths(served):
    for path in OUTSIDE:
        status, _, content = served.ask(path)
        assert (status, b"import" in content) == (404, False), path
    for run_id in NO_RUNS:
        for what in ("run", "series", "logs", "runfile", "verdict", "ranks"):
            status, answer = served.json(what, id=run_id)
            assert status in (400, 404), (what, run_id, answer)


def test_a_link_out_of_the_run_folder_is_not_followed(served, root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("what lies outside\n")
    (root / "small" / "logs" / "rank-0009.log").symlink_to(secret)
    (root / "small" / "run.yaml").unlink()
    (root / "small" / "run.yaml").symlink_to(secret)
    for what in ("logs", "runfile"):
        _, answer = served.json(what, id="small")
        assert "outside" not in json.dumps(answer)


def test_other_names_and_other_pages_are_refused(served):
    assert served.ask("/api/runs", host="evil.example")[0] == 421  # a name that leads here: DNS rebinding
    assert served.ask("/api/runs", host=f"127.0.0.1:{served.port}")[0] == 200
    assert served.ask("/api/runs", host=f"localhost:{served.port}")[0] == 200
    assert served.ask("/api/runs", sec_fetch_site="cross-site", sec_fetch_mode="cors")[0] == 403
    assert "access-control-allow-origin" not in served.ask("/api/runs")[1]


def test_another_address_needs_the_token(root):
    server = Served(root, host="0.0.0.0", token="s3cret-token")
    try:
        for path in ("/", "/api/runs", "/static/main.js", "/api/runs?token=wrong"):
            assert server.ask(path)[0] == 401
        status, headers, _ = server.ask("/run?id=small&token=s3cret-token")
        assert (status, headers["location"]) == (303, "/run?id=small")  # the token leaves the address bar
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert server.ask("/api/runs", cookie=cookie.partition(";")[0])[0] == 200
        assert server.ask("/api/runs", authorization="Bearer s3cret-token")[0] == 200
        assert server.ask("/api/runs", authorization="Bearer s3cret-token", host="evil.example")[0] == 421
    finally:
        server.end()


def test_what_pages_ask_for(served, root):
    write_run(root, "other", steps=30, rate=1e-3)
    status, listing = served.json("runs")
    assert status == 200
    assert {row["name"] for row in listing["runs"]} == {"small", "other"}
    _, detail = served.json("run", id="small")
    assert detail["row"]["state"] == "finished"
    assert [attempt["attempt"] for attempt in detail["attempts"]] == [1]
    _, series = served.json("series", id="small", metric="loss", points=20, smooth=0.9)
    assert max(series["curves"]["loss"]["y"]) == 11.5  # a peak of one step
    assert len(series["curves"]["loss"]["x"]) <= 20
    _, part = served.json("series", id="small", metric="loss", **{"from": 20, "to": 25})
    assert part["curves"]["loss"]["x"] == [19, 20, 21, 22, 23, 24, 25, 26]
    _, file = served.json("runfile", id="small", against="other")
    assert file["differences"]["train.learning_rate"] == [0.0003, 0.001]
    comparison = json.loads(served.ask("/api/compare?id=small&id=other")[2])
    assert [summary["steps"] for summary in comparison["summaries"]] == [40, 30]
    for wrong in ({"metric": "no"}, {"points": "many"}, {"axis": "sideways"}, {"from": "nan"}):
        assert served.json("series", id="small", **wrong)[0] == 400


def test_a_run_that_was_just_made_is_known(served, root):
    assert served.json("runs")[0] == 200  # the list is kept for a moment
    write_run(root, "newer", steps=5)
    assert served.json("run", id="newer")[0] == 200


def test_a_folder_that_vanishes_and_one_that_is_damaged(served, root):
    assert served.json("run", id="small")[0] == 200
    write_run(root, "damaged", steps=5)
    (root / "damaged" / "run.yaml").write_bytes(b"\xff\xfe not yaml: [")
    (root / "damaged" / "history.jsonl").write_bytes(b'{"event": 3, "time": "x"}\n[]\n{"event":"restart"}\n\x00\xff\n')
    (root / "damaged" / "metrics.jsonl").write_bytes(b'{"kind":"step","step":"one"}\n{"kind":"ranks","ranks":[1,{}]}\n')
    time.sleep(1)
    assert {row["name"]: row["state"] for row in served.json("runs")[1]["runs"]}["damaged"] == "unknown"
    for what in ("run", "series", "logs", "runfile", "ranks"):
        assert served.json(what, id="damaged")[0] == 200, what
    shutil.rmtree(root / "small")
    deadline = time.monotonic() + 10
    while served.json("run", id="small")[0] != 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "small" in served.json("run", id="small")[1]["error"]


def test_events_say_what_changes(served, root):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    connection.sendall(b"GET /api/events?id=small HTTP/1.1\r\nHost: localhost\r\n\r\n")
    stream = connection.makefile("rb")
    first = next(json.loads(line[6:]) for line in stream if line.startswith(b"data: "))
    assert first["changed"]["row small"]["step"] == 40
    with (root / "small" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 41, "steps": 41, "loss": 1.0, "time": 1.0, "attempt": 1}) + "\n")
    later = next(json.loads(line[6:]) for line in stream if line.startswith(b"data: "))
    assert later["changed"]["view small"]["version"] > first["changed"]["view small"]["version"]
    stream.close()
    connection.close()
