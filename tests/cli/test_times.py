"""`windlass show`: where the time went, and which rank is slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.api.summary import newest_comparison
from windlass.runfolder import RunFolder
from windlass.spec import Run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Ten steps, a death, ten again of which five are repeated; rank 1 is slow in the second half."""
    folder = RunFolder(tmp_path / "runs" / "small")
    run = {"name": "small", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}
    folder.create(Run.model_validate(run))
    history = [
        {"time": 1000.0, "event": "launched", "attempt": 1},
        {"time": 1010.0, "event": "started", "attempt": 1, "world_size": 2},
        {"time": 1022.0, "event": "rank-died", "attempt": 1, "rank": 1, "first": True, "signal": "SIGKILL"},
        {"time": 1022.0, "event": "restart", "attempt": 2},
        {"time": 1025.0, "event": "launched", "attempt": 2},
        {"time": 1030.0, "event": "resumed", "attempt": 2, "step": 5, "world_size": 2},
        {"time": 1040.0, "event": "finished", "step": 15},
        {"time": 1040.0, "event": "exit", "state": "finished", "code": 0},
    ]
    metrics: list[dict[str, Any]] = []
    for attempt, first, begin in ((1, 1, 1010.0), (2, 6, 1030.0)):
        for index in range(10):
            numbers = {"step": first + index, "steps": 15, "loss": 2.0, "step_s": 1.0, "checkpoint_s": 0.0}
            metrics.append({"kind": "step", **numbers, "attempt": attempt, "time": begin + index + 1})
    times = {"step_s": 1.0, "data_s": 0.1}
    rows = [{"rank": 0, "host": "a", **times, "behind_s": 0.0}, {"rank": 1, "host": "b", **times, "behind_s": 0.2}]
    for step, time, slow in ((8, 1033.0, []), (10, 1035.0, [1]), (12, 1037.0, [1])):
        record = {"kind": "ranks", "step": step, "steps": 2, "held_up_s": 0.4 if slow else 0.0, "slow": slow}
        metrics.append({**record, "ranks": rows, "time": time})
    folder.history.write_text("".join(json.dumps(record) + "\n" for record in history))
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in metrics))
    return folder


def test_show_says_where_the_time_went(windlass: Any, folder: RunFolder) -> None:
    shown = windlass("show", "small", "--json", "--ranks").json
    told = shown["goodput"]
    assert told["seconds"] == 40.0
    assert sum(told["parts_s"].values()) == pytest.approx(40.0)
    assert told["parts_s"] == {
        "training": pytest.approx(14.2),
        "start-up": 10.0,
        "straggler": pytest.approx(0.8),
        "repeated": 6.0,
        "detection": 1.0,
        "restart": 8.0,
    }
    assert [one["attempt"] for one in told["attempts"]] == [1, 2]
    text = windlass("show", "small").out
    assert "35.5% of 40 s trained" in text
    assert "restart 20.0%" in text


def test_show_says_who_is_slow_since_when(windlass: Any, folder: RunFolder) -> None:
    shown = windlass("show", "small", "--json", "--ranks").json["ranks"]
    assert shown["slow"] == [1]
    assert (shown["ranks"][0]["rank"], shown["ranks"][0]["slow_since_step"]) == (1, 10)
    assert shown["ranks"][1]["slow_since"] is None
    text = windlass("show", "small", "--ranks").out
    assert "SLOW SINCE" in text
    assert "step 10" in text
    folder.metrics.write_text("")
    assert "not compared yet" in windlass("show", "small", "--ranks").out


def test_a_rank_that_is_fast_again_is_forgotten() -> None:
    records = [
        {"kind": "ranks", "step": step, "slow": slow, "ranks": [{"rank": 1}], "time": float(step)}
        for step, slow in ((1, [1]), (2, []), (3, [1, "x"]))
    ]
    told = newest_comparison([*records, {"kind": "ranks", "slow": 3}, {"kind": "step", "ranks": 1}])
    assert told is not None
    assert told["ranks"][0]["slow_since_step"] == 3
    assert newest_comparison([]) is None
