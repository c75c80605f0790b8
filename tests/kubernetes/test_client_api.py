"""The API client on a bad day: busy servers, lost places in lists and watches, dropped streams, stale tokens."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.targets.kubernetes.api.errors import RefusedError, UnreachableError, from_status
from windlass.targets.kubernetes.api.http import GoneError, Halt, parse_change
from windlass.targets.kubernetes.api.kubeconfig import Access
from windlass.targets.kubernetes.watch.job_watch import Watched


def pod(name, version="1"):
    return {"metadata": {"name": name, "uid": name, "resourceVersion": version}}


def page(*names, further=None, version="7"):
    metadata = {"resourceVersion": version, **({"continue": further} if further else {})}
    return {"items": [pod(name) for name in names], "metadata": metadata}


def change(kind, name, version):
    return json.dumps({"type": kind, "object": pod(name, version)}).encode() + b"\n"


def test_a_busy_server_is_asked_again(server, connect):
    busy = lambda handler: handler.status(429, "TooManyRequests", "slow down", Retry_After="0")  # noqa: E731
    server.on(
        "/things", busy, lambda handler: handler.status(503, "", "starting"), lambda handler: handler.json({"ok": 1})
    )
    api = connect()
    assert api.get("/things") == {"ok": 1}
    assert api.num_requests == 3


def test_what_may_have_been_done_is_not_done_twice(server, connect):
    server.on("/things", lambda handler: handler.status(500, "InternalError", "who knows"))
    api = connect()
    with pytest.raises(RefusedError) as error:
        api.create("/things", {})
    assert error.value.code == 500
    assert len(server.requests) == 1
    assert server.requests[0][2] == {"fieldValidation": "Strict"}
    server.on(
        "/others",
        lambda handler: handler.status(429, "", "busy", Retry_After="0"),
        lambda handler: handler.json({"ok": 1}),
    )
    assert api.create("/others", {}) == {"ok": 1}  # a 429 was not carried out


def test_lists_come_in_pages_and_survive_a_lost_snapshot(server, connect):
    server.on(
        "/pods",
        lambda handler: handler.json(page("a", "b", further="next")),
        lambda handler: handler.status(410, "Expired", "too old", metadata={"continue": "newer"}),
        lambda handler: handler.json(page("c")),
    )
    api = connect()
    assert [pod["metadata"]["name"] for pod in api.items("/pods")] == ["a", "b", "c"]
    assert [params.get("continue") for _, _, params in server.requests] == [None, "next", "newer"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_watch_that_is_too_old_says_so(server, connect, inside):
    if inside:
        gone = json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}).encode() + b"\n"
        server.on("/pods", lambda handler: handler.stream(gone))
    else:
        server.on("/pods", lambda handler: handler.status(410, "Expired", "too old"))
    with pytest.raises(GoneError):
        list(connect().watch("/pods", "3"))


def test_a_watched_list_heals(server, connect):
    """A dropped stream is gone on with from its last change; a place that is too old is listed anew."""
    blocked = threading.Event()
    server.on(
        "/pods",
        lambda handler: handler.json(page("a", version="1")),
        lambda handler: handler.stream(change("ADDED", "b", "2"), change("BOOKMARK", "b", "5"), broken=True),
        lambda handler: handler.status(410, "Expired", "too old"),
        lambda handler: handler.json(page("a", "b", "c", version="9")),
        lambda handler: (blocked.wait(20), handler.stream()),
    )
    lists, changes, troubles, halt = [], [], [], Halt()
    watched = Watched(
        connect(),
        "/pods",
        halt,
        listed=lambda found: lists.append([item["metadata"]["name"] for item in found]),
        changed=lambda kind, value: changes.append((kind, value["metadata"]["name"])),
        trouble=troubles.append,
    )
    watched.start()
    deadline = time.monotonic() + 20
    while len(server.requests) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    halt.now()
    blocked.set()
    watched.thread.join(20)
    assert not watched.thread.is_alive()
    assert lists == [["a"], ["a", "b", "c"]]
    assert changes == [("ADDED", "b")]
    assert [params.get("resourceVersion") for _, _, params in server.requests] == [None, "1", "5", None, "9"]
    assert any("does not answer" in trouble for trouble in troubles if trouble)
    assert troubles[-1] is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(("ERROR", "ADDED")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "object", "metadata", "resourceVersion", "code", "x")), inner)
    ),
)


@settings(deadline=None)
@given(line=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
@example(line=change("ADDED", "a", "1").strip())
@example(line=b"[" * 100_000)
def test_fuzz_a_line_of_a_watch_is_a_change_or_none(line):
    found = parse_change(line)
    if found is not None and found["type"] != "ERROR":
        assert isinstance(found["object"]["metadata"]["resourceVersion"], str)
    elif found is not None:
        here = Access("here", "team", "https://one", {}, {}, "ann", Path(), Path(), "file")
        assert isinstance(from_status(here, found["object"], "to watch"), RefusedError)


def test_a_stream_is_broken_off_from_another_thread(server, connect):
    waiting = threading.Event()
    halt, lines = Halt(), []

    def hang(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"6\r\nfirst\n\r\n")
        handler.wfile.flush()
        waiting.wait(20)

    server.on("/log", hang)
    api = connect()
    thread = threading.Thread(target=lambda: lines.extend(api.lines("/log", {"follow": "true"}, halt)), daemon=True)
    thread.start()
    while not server.requests:
        time.sleep(0.01)
    time.sleep(0.05)
    halt.now()
    thread.join(10)
    waiting.set()
    assert not thread.is_alive()
    assert lines in ([], [b"first"])


def test_only_newlines_end_lines(server, connect):
    server.on("/log", lambda handler: handler.stream(b"10%\r20", b"%\r100%\nnext \xe2\x80\xa8 line\n", b"rest"))
    found = list(connect().lines("/log", {}))
    assert found == [b"10%\r20%\r100%", "next \u2028 line".encode(), b"rest"]


def test_a_forbidden_verb_is_named_with_the_question_that_proves_it(server, connect):
    message = 'pods is forbidden: User "ann" cannot create resource "pods/exec" in API group "" in the namespace "team"'
    server.on("/pods", lambda handler: handler.status(403, "Forbidden", message))
    with pytest.raises(RefusedError) as error:
        connect().get("/pods")
    assert error.value.what == "you may not create pods/exec in the namespace team"
    assert "kubectl auth can-i create pods --subresource=exec -n team --context here" in error.value.fix


def test_nobody_there(connect, server):
    api = connect()
    server.stop()
    with pytest.raises(UnreachableError) as error:
        api.get("/version")
    assert "does not answer" in error.value.what
    server.__init__()  # for the fixture's own stop


def test_a_plugin_is_asked_again_when_its_token_is_refused(server, connect, tmp_path):
    calls = tmp_path / "calls"
    plugin = tmp_path / "plugin"
    plugin.write_text(
        f"#!/bin/sh\necho x >> {calls}\n"
        f'echo "{{\\"status\\": {{\\"token\\": \\"token-$(wc -l < {calls} | tr -d " ")\\"}}}}"\n'
    )
    plugin.chmod(0o755)
    seen = []

    def guarded(handler):
        seen.append(handler.headers["Authorization"])
        if handler.headers["Authorization"] == "Bearer token-2":
            handler.json({"ok": 1})
        else:
            handler.status(401, "Unauthorized", "Unauthorized")

    server.on("/version", guarded)
    api = connect({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}})
    assert api.get("/version") == {"ok": 1}
    assert seen == ["Bearer token-1", "Bearer token-2"]
    assert api.get("/version") == {"ok": 1}
    assert len(seen) == 3


def test_a_rotated_token_file_is_read_again(server, connect, tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")

    def guarded(handler):
        if handler.headers["Authorization"] == "Bearer new":
            handler.json({"ok": 1})
        else:
            token.write_text("new\n")
            handler.status(401, "Unauthorized", "Unauthorized")

    server.on("/version", guarded)
    assert connect({"tokenFile": "token"}).get("/version") == {"ok": 1}  # relative to the kubeconfig
