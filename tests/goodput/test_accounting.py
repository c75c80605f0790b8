"""Where the time of a run went: every second has one name, and the names are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.goodput.accounting import Slowness, StepTime, Validation, account, read_metrics


def events(*records: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"time": time, "event": event, **facts} for time, event, facts in records]


def steps(first: int, last: int, *, begin: float, seconds: float = 1.0, stall_s: float = 0.0) -> list[StepTime]:
    return [
        StepTime(step, begin + (index + 1) * seconds, seconds, stall_s)
        for index, step in enumerate(range(first, last + 1))
    ]


def test_a_run_that_is_killed_once() -> None:
    """Launched at 0, trains from 10; steps 1 to 20 of 1 s; a rank dies in step 21; the next begins with step 11."""
    history = events(
        (0.0, "launched", {"attempt": 1}),
        (10.0, "started", {"attempt": 1}),
        (21.0, "checkpoint", {"step": 10}),
        (38.0, "rank-died", {"attempt": 1}),
        (38.5, "restart", {"attempt": 2}),
        (40.0, "launched", {"attempt": 2}),
        (48.0, "resumed", {"attempt": 2, "step": 10}),
        (79.0, "finished", {}),
        (80.0, "exit", {}),
    )
    first = [StepTime(1, 16.0, 6.0, 0.0), *steps(2, 20, begin=16.0)]
    told = account(history, [*first, *steps(11, 40, begin=48.0)])
    assert [attempt.attempt for attempt in told.attempts] == [1, 2]
    assert told.attempts[0].as_dict()["parts_s"] == {
        "training": 20.0,
        "start-up": 10.0,
        "compile": 5.0,
        "repeated": 1.0,
        "detection": 2.0,
    }
    assert told.attempts[1].as_dict()["parts_s"] == {
        "training": 20.0,
        "repeated": 10.0,
        "restart": 10.0,
        "finishing": 2.0,
    }
    assert told.seconds == 80.0
    assert told.goodput == pytest.approx(0.5)


def test_queue_hang_saves_validation_and_stragglers_have_their_names() -> None:
    history = events(
        (0.0, "submitted", {}),
        (100.0, "launched", {"attempt": 1}),
        (110.0, "started", {"attempt": 1}),
        (200.0, "hang", {"rank": 1}),
        (205.0, "rank-died", {"attempt": 1}),
    )
    done = steps(1, 10, begin=110.0, seconds=2.0, stall_s=0.5)
    told = account(history, [*done, Slowness(130.0, 3.0)], now=210.0)
    parts = told.attempts[0].parts
    assert parts["queue"] == 100.0
    assert parts["saving"] == pytest.approx(5.0)
    assert parts["straggler"] == pytest.approx(3.0)
    assert parts["training"] == pytest.approx(12.0)
    assert parts["hang"] == pytest.approx(205.0 - 130.0 - 1.5)
    late = account(history, [*done[:-1], Validation(), StepTime(10, 160.0, 2.0, 0.5)], now=210.0)
    assert late.attempts[0].parts["validation"] == pytest.approx(30.0)


def test_time_between_an_end_and_a_new_start_is_not_paid() -> None:
    history = events(
        (0.0, "launched", {"attempt": 1}),
        (5.0, "started", {"attempt": 1}),
        (20.0, "exit", {}),
        (5000.0, "launched", {"attempt": 2}),
        (5004.0, "resumed", {"attempt": 2}),
        (5030.0, "exit", {}),
    )
    told = account(history, [])
    assert told.seconds == 50.0
    assert told.attempts[1].parts["start-up"] == 4.0, "started by hand: no restart"


def test_without_a_launcher_the_starts_divide_a_run() -> None:
    history = events((0.0, "started", {"attempt": 1}), (50.0, "resumed", {"attempt": 1}), (90.0, "finished", {}))
    told = account(history, [*steps(1, 20, begin=0.0), *steps(11, 40, begin=50.0)])
    assert len(told.attempts) == 2
    assert told.attempts[1].parts["repeated"] == pytest.approx(10.0)


KINDS = ("submitted", "launched", "started", "resumed", "checkpoint", "hang", "rank-died", "node-lost", "restart")
KINDS += ("requeue", "preempted", "finished", "gave-up", "exit", "stop-requested")
TIMES = st.floats(0.0, 1e6, allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(TIMES, st.sampled_from(KINDS), st.integers(1, 5)), max_size=25),
    st.lists(st.tuples(st.integers(1, 50), TIMES, st.floats(0, 1e4), st.floats(0, 1e4)), max_size=25),
    st.lists(st.tuples(TIMES, st.floats(0, 1e4)), max_size=5),
    st.booleans(),
    st.one_of(st.none(), TIMES),
)
def test_parts_add_up(history: Any, done: Any, slow: Any, in_order: bool, now: float | None) -> None:
    """Of any records, in any order; no part is negative."""
    if in_order:
        history, done = sorted(history), sorted(done, key=lambda step: step[1])
    told = account(
        [{"time": time, "event": event, "attempt": number} for time, event, number in history],
        [*(StepTime(*step) for step in done), *(Slowness(*item) for item in slow)],
        now=now,
    )
    for attempt in told.attempts:
        assert sum(attempt.parts.values()) == pytest.approx(attempt.seconds, abs=1e-3)
        assert all(seconds >= -1e-6 for seconds in attempt.parts.values())
    assert sum(told.parts.values()) == pytest.approx(told.seconds, abs=1e-2)
    for before, after in zip(told.attempts, told.attempts[1:], strict=False):
        assert after.begin >= before.end - 1e-6, "no second belongs to two attempts"


def test_metrics_are_read_as_the_trainer_writes_them(tmp_path: Path) -> None:
    record = {"kind": "step", "step": 7, "loss": 2.5, "step_s": 0.125, "data_s": 0.0, "checkpoint_s": 1e-06}
    record |= {"memory_gib": 1.0, "epoch": 0.1, "attempt": 1, "time": 1700000000.25}
    lines = [json.dumps(record, separators=(",", ":")), json.dumps(record | {"step": 8}), '{"kind":"step","st']
    lines += ['{"kind":"validation","step":8}', '{"kind":"ranks","step":8,"held_up_s":0.5,"time":1700000001}', "[1]"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    step = StepTime(7, 1700000000.25, 0.125, 1e-06)
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        step,
        step._replace(step=8),
        Validation(),
        Slowness(1700000001.0, 0.5),
    ]
    assert list(read_metrics(tmp_path / "none")) == []
