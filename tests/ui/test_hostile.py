"""The server against folders, requests and clients that mean it no good."""

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.ui.conftest import Served
from tests.ui.folders import write_lines, write_run
from windlass.cli.views.ui import sources
from windlass.runfolder import RunFolder
from windlass.ui import library as library_module
from windlass.ui.growing import GrowingRecords
from windlass.ui.library import Library
from windlass.ui.report import report
from windlass.ui.runs import RunView
from windlass.ui.series import Series

ASKED = ("run", "series", "ranks", "logs", "runfile", "verdict")
HUGE = 100 * 1024 * 1024


def strict(content):
    def refuse(name):
        raise ValueError(name)

    return json.loads(content, parse_constant=refuse)


def see_everything(served, name="small"):
    """Every answer about a run is JSON that a browser takes, and none is a failure of the server."""
    answers = {}
    for what in ASKED:
        status, _, content = served.ask(f"/api/{what}?id={name}")
        assert status == 200, (what, status, content[:300])
        answers[what] = strict(content)
    assert served.ask(f"/api/compare?id={name}&id={name}")[0] == 200
    return answers


STRANGE = (None, True, "<script>", "NaN", [], {}, [[[]]], -1, 0, 2**62, 10**30, -(10**30), 1e308, -1e308, 0.5)


def test_whatever_metrics_hold_is_read(served, root):
    metrics = root / "small" / "metrics.jsonl"
    lines = ['{"kind":"step","step":41,"loss":NaN,"grad_norm":Infinity,"mfu":-Infinity,"time":1}', "[" * 100_000]
    for value in STRANGE:
        for key in ("kind", "step", "loss", "time", "tokens", "attempt", "ranks", "steps", "mfu"):
            record = {"kind": "step", "step": 42, "loss": 1.0, "time": 2.0, "attempt": 1, "<b>key</b>": value}
            lines.append(json.dumps({**record, key: value}))
            lines.append(json.dumps({"kind": "validation", "step": 42, "loss": 1.0, key: value}))
            rank = {"rank": 0, "host": "a", "step_s": 1.0, "behind_s": 0.1}
            for part in rank:
                ranks = {"kind": "ranks", "step": 42, "ranks": [{**rank, part: value}]}
                lines.append(json.dumps(ranks if key != "ranks" else {**ranks, "ranks": value}))
    with metrics.open("a") as file:
        file.write("\n".join(lines) + '\n{"kind":"step","step":50,"steps":50,"loss":1.5,"time":3}\n{"kind":"st')
    time.sleep(1)
    answers = see_everything(served)
    assert answers["series"]["curves"]["loss"]["y"][-1] == 1.5
    assert answers["run"]["row"]["loss"] == 1.5


EVENTS = """
submitted launched started resumed checkpoint rank-died node-lost restart gave-up exit finished preempted exported
checkpoint-failed checkpoint-damaged upload-failed killing retry hang stop-requested pruned nothing-known
"""
FIELDS = """
time attempt step seconds bytes tier rank signal code first error oom class why left backoff checkpoint state reason
world_size host
"""


def test_whatever_the_history_holds_is_read(served, root):
    history = root / "small" / "history.jsonl"
    events = EVENTS.split()
    records = [{"event": event} for event in events]
    for event, field, value in itertools.product(events, FIELDS.split(), STRANGE):
        records.append({"event": event, "time": 5.0, field: value})
    with history.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    time.sleep(1)
    see_everything(served)
    report(RunFolder(root / "small"), sources())


def resident_mib():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) / 1024


def test_lines_without_an_end_are_read_in_bounded_memory(served, root):
    see_everything(served)
    before = resident_mib()
    for name in ("metrics.jsonl", "logs/rank-0000.log", "logs/launcher.log"):
        with (root / "small" / name).open("ab") as file:
            file.truncate(file.tell() + HUGE)  # zeros, and no disk is filled
    time.sleep(1)
    begin = time.monotonic()
    see_everything(served)
    assert served.ask("/api/logs?id=small&search=ready")[0] == 200
    print(f"{time.monotonic() - begin:.1f} s, {resident_mib() - before:.0f} MiB")
    assert resident_mib() - before < 150


@pytest.mark.parametrize("name", ["run.yaml", "metrics.jsonl", "history.jsonl", "events.jsonl", "logs/rank-0000.log"])
def test_a_pipe_in_place_of_a_file_stops_nobody(root, name, monkeypatch):
    monkeypatch.setattr(library_module, "QUIET_SECONDS", 0.0)
    write_run(root, "trap", steps=5)
    path = root / "trap" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    os.mkfifo(root / "trap.sweep.json")
    server = Served(root)
    try:
        begin = time.monotonic()
        assert "small" in {row["name"] for row in server.json("runs")[1]["runs"]}
        for what in ASKED:
            server.json(what, id="trap")
            assert server.json(what, id="small")[0] == 200
        time.sleep(1)
        server.json("runs")
        while any(thread.name == "goodput" for thread in threading.enumerate()):
            assert time.monotonic() - begin < 20  # it is counted for one run after the other
            time.sleep(0.1)
        rows = {row["name"]: row for row in server.json("runs")[1]["runs"]}
        assert rows["small"]["goodput"] > 0
    finally:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "wb"):  # whoever waits for it goes on
            server.end()


def test_links_lead_nowhere(served, root, tmp_path):
    outside = write_run(tmp_path, "outside", steps=7)
    outside.rank_log(0).write_text("2026-01-01T00:00:01 rank 0 ERROR RuntimeError: CUDA out of memory SECRETWORD\n")
    shutil.copytree(root / "small", root / "links")
    for name in ("metrics.jsonl", "history.jsonl", "logs/rank-0000.log"):
        (root / "links" / name).unlink()
        (root / "links" / name).symlink_to(outside.path / name)
    shutil.copytree(root / "small", root / "logs-out")
    shutil.rmtree(root / "logs-out" / "logs")
    (root / "logs-out" / "logs").symlink_to(outside.path / "logs")
    (root / "away.sweep.json").symlink_to(outside.run_file)
    time.sleep(1)
    for name in ("links", "logs-out"):
        for what in ASKED:
            _, _, content = served.ask(f"/api/{what}?id={name}")
            assert b"SECRETWORD" not in content, (name, what)
    assert served.json("series", id="links", metric="loss")[1].get("curves", {}).get("loss", {}).get("x", []) == []


def test_a_file_written_anew_in_place_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step, "time": 1.5} for step in range(3)])
    file = GrowingRecords(path)
    assert len(list(file.read(until=1e18))) == 3
    write_lines(path, [{"step": step, "time": 2.5} for step in range(8)])  # the same inode, and longer than before
    assert [record["step"] for record in file.read(until=1e18)] == list(range(8))
    assert file.was_replaced


def test_a_clock_that_jumps_back_keeps_the_axis_in_order(tmp_path):
    series = Series(["loss"])
    for step, when in enumerate([100.0, 200.0, 50.0, 60.0, 300.0], 1):
        series.add({"step": step, "time": when, "tokens": when, "loss": 1.0})
    for axis in ("time", "tokens"):
        xs, _ = series.thinned("loss", axis, series.rows_between(axis, 0, 1e9), 100)
        assert xs == sorted(xs)
        assert len(xs) == 5


def test_two_attempts_at_once_and_steps_trained_again(tmp_path):
    folder = write_run(tmp_path, "twice", steps=20)
    launches = [{"event": "launched", "attempt": 2, "time": 10.0}, {"event": "launched", "attempt": 3, "time": 9.0}]
    write_lines(folder.history, [{"event": "launched", "attempt": 1, "time": 5.0}, *launches])
    with folder.metrics.open("a") as file:
        for step in range(11, 31):
            for attempt in (2, 3):  # two writers, step by step
                line = {"kind": "step", "step": step, "loss": float(attempt), "attempt": attempt, "time": float(step)}
                file.write(json.dumps(line) + "\n")
    view = RunView(folder, lambda record: None)
    view.refresh(10)
    assert list(view.steps.steps) == list(range(1, 31))
    assert list(view.steps.low["loss"])[10:] == [3.0] * 20
    assert all(attempt.ended is None or attempt.ended >= attempt.began for attempt in view.attempts.values())


def test_many_saves_push_no_death_out(tmp_path):
    folder = write_run(tmp_path, "saves", steps=5)
    deaths = [{"event": "rank-died", "rank": 1, "signal": "SIGKILL", "time": 1.0}]
    write_lines(folder.history, deaths + [{"event": "checkpoint", "step": step, "time": 2.0} for step in range(9000)])
    view = RunView(folder, lambda record: None if record["event"] == "checkpoint" else "rank 1 died")
    view.refresh(10)
    events = view.as_dict()["events"]
    assert "rank-died" in [event["event"] for event in events]
    assert len(json.dumps(events)) < 500_000  # it is sent every second


NAMES = """evil.example localhost.evil.example 127.0.0.1.evil.example evil@127.0.0.1 127.0.0.1@evil 0x7f.1"""


def test_no_name_but_its_own(served):
    for name in ("", *NAMES.split()):
        assert served.ask("/api/runs", host=f"{name}:{served.port}")[0] in (400, 421), name
    for name in ("LOCALHOST", "[::1]", "127.0.0.1"):
        assert served.ask("/api/runs", host=f"{name}:{served.port}")[0] == 200, name


def test_the_token_leads_nowhere_else(root):
    server = Served(root, host="0.0.0.0", token="s3cret-token")
    try:
        for path in ("//evil.example/", "/\\evil.example/", "///evil.example", "//evil.example//x"):
            _, headers, _ = server.ask(f"{path}?token=s3cret-token")
            location = headers.get("location", "/")
            assert not re.match(r"[/\\]{2}|https?:", location), (path, location)
        _, headers, _ = server.ask("/?token=s3cret-token")
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert str(server.port) in headers["set-cookie"].partition("=")[0]  # browsers send cookies to every port
        for wrong in ("", "%ff", "s3cret-token%00", "é", "x" * 40_000):
            assert server.ask(f"/?token={wrong.encode('ascii', 'ignore').decode()}")[0] == 401
        assert server.ask("/api/runs", cookie="windlass-token=\xff")[0] == 401
    finally:
        server.end()


def test_huge_and_repeated_parameters_cost_little(served):
    begin = time.monotonic()
    many = "&".join(["metric=loss"] * 4000)
    assert served.ask(f"/api/series?id=small&smooth=0.9&{many}")[0] in (200, 400)
    ids = "&".join(["id=small"] * 4000)
    assert served.ask(f"/api/compare?{ids}")[0] in (200, 400)
    queries = ("id=" + "x" * 60_000, "id=small&from=1e999&to=-1e999", "id=small&points=1e308")
    for query in (*queries, "id=small&search=" + "y" * 50_000):
        for what in ("series", "logs"):
            assert served.ask(f"/api/{what}?{query}")[0] in (200, 400, 404), query[:40]
    with contextlib.suppress(ConnectionError):  # it may hang up while the rest is still being sent
        assert served.ask("/api/runs?" + "x" * 200_000)[0] in (400, 414, 431)
    assert time.monotonic() - begin < 15


def open_stream(served, query=""):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    connection.sendall(f"GET /api/events?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def test_many_pages_and_some_that_never_read(served, root):
    streams = [open_stream(served) for _ in range(70)]
    time.sleep(2)
    begin = time.monotonic()
    assert served.json("run", id="small")[0] == 200
    assert time.monotonic() - begin < 5
    answers = [stream.recv(15).split(b" ")[1] for stream in streams]
    assert answers.count(b"200") == 64
    assert answers.count(b"503") == 6
    for stream in streams:
        stream.close()
    deadline = time.monotonic() + 20
    while True:
        stream = open_stream(served)
        status = stream.recv(15).split(b" ")[1]
        stream.close()
        if status == b"200":
            break
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_names_that_are_no_text(served, root):
    os.rename(write_run(root, "bytes", steps=5).path, os.fsencode(root) + b"/bad\xff\xed\xa0\x80")
    os.rename(write_run(root, "more", steps=5).path, str(root) + "/a\n\u202eb'\"%2e<img>")
    time.sleep(1)
    _, _, content = served.ask("/api/runs")
    rows = strict(content)["runs"]
    assert len(rows) == 3
    for row in rows:
        row["id"].encode()  # a browser makes an address of it
        assert served.json("run", id=row["id"])[0] == 200


@pytest.mark.slow
def test_five_hundred_runs_are_listed_in_time(root):
    for number in range(500):
        shutil.copytree(root / "small", root / f"run-{number}")
    server = Served(root)
    try:
        begin = time.monotonic()
        assert len(server.json("runs")[1]["runs"]) == 501
        first = time.monotonic() - begin
        time.sleep(1)
        begin = time.monotonic()
        server.json("runs")
        again = time.monotonic() - begin
        print(f"500 runs: first {first:.2f} s, again {again:.2f} s, load {os.getloadavg()[0]:.1f}")
        assert first < 30
        assert again < 5
    finally:
        server.end()


def test_a_disk_that_fails_hides_one_run_and_no_other(root):
    write_run(root, "stale", steps=5)
    known = sources()

    def row(folder):
        if folder.name == "stale":
            raise OSError(116, "Stale file handle")
        return known.row(folder)

    rows = Library(root, replace(known, row=row)).rows()
    assert (rows["small"]["state"], rows["stale"]["state"]) == ("finished", "unknown")
    assert "Stale file handle" in rows["stale"]["reason"]


@pytest.mark.slow
def test_logs_of_a_thousand_ranks_are_merged_in_time(served, root):
    line = "2026-01-01T00:00:01 rank 0 INFO step 1 loss 2.0 and some more words to make it as long as a line is\n"
    cpu_s = {}
    for ranks in (100, 1000):
        for rank in range(ranks):
            (root / "small" / "logs" / f"rank-{rank:04d}.log").write_text(line * 400)
        begin = time.process_time()
        status, answer = served.json("logs", id="small")
        cpu_s[ranks] = time.process_time() - begin
        assert (status, len(answer["lines"])) == (200, 1000)
    print(f"CPU seconds by the number of logs: {cpu_s}")
    assert cpu_s[1000] < 25 * cpu_s[100], "ten times the logs take about ten times as long, on any machine"
