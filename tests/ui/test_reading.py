"""What the page reads: files that grow, tear and vanish, and curves that are thinned without losing a peak."""

import json
import math
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ui.folders import write_lines, write_run
from windlass.cli.views.ui import sources
from windlass.ui import logs
from windlass.ui.figure import Chart, Curve, draw, ticks
from windlass.ui.growing import MOST_LINE_BYTES, GrowingRecords
from windlass.ui.library import Library, UnknownRunError, to_json
from windlass.ui.ranks import MOST_COLUMNS, RankTimes
from windlass.ui.runs import RunView
from windlass.ui.series import Series

ALWAYS = math.inf


def read(file, until=ALWAYS):
    return list(file.read(until=until))


def test_records_are_read_once_as_lines_are_completed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = GrowingRecords(path)
    assert read(file) == []
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    assert read(file) == [{"step": 1}, {"step": 2}]
    with path.open("ab") as other:
        other.write(b'ep":3}\nnot json\n[1]\n{"step":4}\n')
    assert read(file) == [{"step": 3}, {"step": 4}]
    assert read(file) == []
    assert file.at_end


def test_a_huge_line_is_passed_over_in_bounded_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"x":"' + b"a" * (3 * MOST_LINE_BYTES) + b'"}\n{"step":2}\n')
    file = GrowingRecords(path)
    assert read(file) == [{"step": 1}, {"step": 2}]


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n')
    file = GrowingRecords(path)
    read(file)
    path.rename(tmp_path / "metrics.old-1.jsonl")
    path.write_text('{"step":7}\n')
    assert read(file) == [{"step": 7}]
    assert file.was_replaced


def test_a_long_file_is_read_in_slices_of_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": step, "text": "x" * 300} for step in range(5000)])
    file = GrowingRecords(path)
    first = read(file, until=0.0)
    assert 0 < len(first) < 5000
    assert not file.at_end
    assert len(first) + len(read(file)) == 5000


numbers = st.floats(-1e6, 1e6, width=32) | st.none()


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(10, 60))
def test_thinning_keeps_the_extremes_and_the_bound(values, most_points):
    series = Series(["loss"])
    for step, value in enumerate(values, 1):
        series.add({"step": step, "loss": value})
    xs, ys = series.thinned("loss", "step", (0, len(series)), most_points)
    known = [float(f"{value:.6g}") for value in values if value is not None]
    assert len(xs) == len(ys) <= most_points
    assert xs == sorted(xs)
    if known:
        assert (min(ys), max(ys)) == (min(known), max(known))


@given(st.lists(numbers, min_size=1, max_size=300), st.integers(4, 40))
def test_a_series_that_is_too_long_keeps_its_extremes(values, most_rows):
    series = Series(["loss"], most_rows=most_rows)
    for step, value in enumerate(values, 1):
        series.add({"step": step, "loss": value})
    assert len(series) <= most_rows
    assert series.steps[-1] == len(values)
    known = [float(f"{value:.6g}") for value in values if value is not None]
    _, ys = series.thinned("loss", "step", (0, len(series)), 10_000)
    assert (min(ys, default=None), max(ys, default=None)) == (min(known, default=None), max(known, default=None))


def test_steps_that_are_trained_again_replace_those_that_were_lost():
    series = Series(["loss"])
    for step in (*range(1, 11), *range(7, 9)):
        series.add({"step": step, "loss": float(step), "tokens": step * 10, "time": 1000.0 + step})
    assert list(series.steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert series.rows_between("tokens", 25, 45) == (1, 5)  # and one more on each side


def test_smoothing_of_a_constant_is_the_constant():
    series = Series(["loss"])
    for step in range(1, 100):
        series.add({"step": step, "loss": 3.0})
    xs, ys = series.smoothed("loss", "step", (0, len(series)), 20, 0.95)
    assert set(ys) == {3.0}
    assert xs[-1] == 99


def test_ranks_stay_bounded_and_the_slow_one_is_named():
    times = RankTimes()
    for step in range(1, 3001):
        rows = [{"rank": 3, "host": "node-0", "step_s": 2.0, "behind_s": 1.0 if step > 2000 else 0.01}]
        times.add({"kind": "ranks", "step": step, "ranks": rows})
    assert len(times.columns) <= MOST_COLUMNS
    slow = times.heat_map(8)["slow"]
    assert [(row["rank"], row["host"], row["share"], row["seconds"]) for row in slow] == [(3, "node-0", 0.5, 1.0)]
    assert 1980 < slow[0]["since"] < 2100
    times.add({"kind": "ranks", "step": "x", "ranks": None})  # whatever a line holds


def test_a_view_goes_through_a_kill_and_a_torn_line(tmp_path):
    folder = write_run(tmp_path, "small", steps=20)
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":21,"lo')
    view = RunView(folder, lambda record: str(record["event"]))
    view.refresh()
    assert view.is_complete
    assert len(view.steps) == 20
    assert [attempt.ended is not None for attempt in view.attempts.values()] == [True]
    folder.record("launched", attempt=2)
    folder.record("rank-died", attempt=2, first=True)
    folder.record("launched", attempt=3)
    view.refresh()
    assert list(view.attempts) == [1, 2, 3]
    assert [attempt.ended is None for attempt in view.attempts.values()] == [False, False, True]


def test_a_cluster_that_does_not_answer_holds_nothing_up(tmp_path):
    write_run(tmp_path, "here", steps=5)
    there = write_run(tmp_path, "there", steps=5)
    there.run_file.write_text(there.run_file.read_text().replace("kind: local", "kind: slurm"))
    answers = threading.Event()
    known = sources()

    def row(folder):
        if folder.name == "there":
            answers.wait(30)
        return known.row(folder) | {"state": "running" if folder.name == "there" else "finished"}

    def elsewhere():
        return [{"name": "far", "target": "kubernetes:lab", "state": "running", "started": None}]

    library = Library(tmp_path, replace(known, row=row, clusters={"kubernetes:lab": elsewhere}))
    begin = time.monotonic()
    rows = library.rows()
    assert time.monotonic() - begin < 10
    assert (rows["here"]["state"], rows["there"]["reason"]) == ("finished", "asking the cluster")
    answers.set()
    deadline = time.monotonic() + 30
    while "kubernetes:lab/far" not in (rows := library.rows()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert rows["there"]["state"] == "running"
    with pytest.raises(UnknownRunError):
        library.view("kubernetes:lab/far")  # it has no folder here


def test_numbers_that_are_not_finite_are_null():
    assert json.loads(to_json({"a": [math.inf, 1.5], "b": (math.nan,)})) == {"a": [None, 1.5], "b": [None]}


def test_logs_are_merged_filtered_and_bounded(tmp_path):
    folder = write_run(tmp_path / "runs", "small", ranks=2)
    folder.rank_log(0).write_text(
        "2026-01-01T00:00:01 rank 0 INFO one\nTraceback here\n2026-01-01T00:00:03 rank 0 ERROR no\n"
    )
    folder.rank_log(1).write_text("2026-01-01T00:00:02 rank 1 INFO two\n" + "y" * 5_000_000 + "\n")
    (folder.logs / "launcher.log").write_text("2026-01-01T00:00:01 rank 0 INFO one\nonly the launcher\n")
    secret = tmp_path / "secret.log"
    secret.write_text("what lies outside\n")
    (folder.logs / "rank-0007.log").symlink_to(secret)
    found = logs.read_logs(folder)
    texts = [line["text"] for line in found["lines"]]
    assert found["sources"] == ["rank 0", "rank 1", "launcher"]
    stamped = [text[11:] for text in texts if text.startswith("2026")]
    assert stamped == ["00:00:01 rank 0 INFO one", "00:00:02 rank 1 INFO two", "00:00:03 rank 0 ERROR no"]
    assert max(map(len, texts)) < 3000
    assert not any("outside" in text for text in texts)
    only = logs.read_logs(folder, source="rank 0", search="TRACEBACK")
    assert [line["text"] for line in only["lines"]] == ["Traceback here"]


def test_a_search_ends_in_time(tmp_path):
    folder = write_run(tmp_path, "small", ranks=1)
    folder.rank_log(0).write_bytes(b"some line of a log\n" * 500_000)
    begin = time.monotonic()
    logs.read_logs(folder, search="not there")
    assert time.monotonic() - begin < 30


def test_figures_escape_what_they_are_told():
    svg = draw(Chart("<script>", [Curve("a&b", [1, 2], [1.0, math.nan]), Curve("c", [1, 2], [3.0, 4.0])]))
    assert "<script>" not in svg
    assert "a&amp;b" in svg
    assert "nan" not in svg


@given(st.integers(-(10**6), 10**6), st.floats(0.1, 1e9))
def test_ticks_are_few_and_inside(low, span):
    values = ticks(low, low + span, 5)
    assert 1 <= len(values) <= 7
    assert values[0] >= low - span * 1e-6
    assert values[-1] <= low + span * (1 + 1e-6)


def test_the_fixture_is_as_the_trainer_writes(tmp_path):
    folder = write_run(tmp_path, "small", steps=3)
    step = json.loads(folder.metrics.read_text().splitlines()[0])
    assert {"kind", "step", "loss", "tokens_per_s", "time", "attempt"} <= set(step)
