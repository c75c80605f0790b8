"""Ends that nobody recorded, from the folder alone: what `show` says, `why` says too."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from windlass.api.diagnosis import explain
from windlass.api.runs import job
from windlass.api.training import _locked
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.launch.supervision import SUPERVISOR_FILE, supervisor_record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.create(parse_run({"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}))
    return folder


def test_a_supervisor_that_was_killed_before_its_first_record(folder: RunFolder) -> None:
    gone = {**supervisor_record(folder.path), "start_time": 1}
    (folder.path / SUPERVISOR_FILE).write_text(json.dumps(gone))
    shown = job("r").show()
    assert (shown.state, "supervisor was killed" in (shown.reason or "")) == ("failed", True)
    assert [record["event"] for record in shown.history] == ["exit"]
    assert explain("r").name == "killed"


def test_what_python_is_told_of_a_killed_run_is_what_the_commands_say(folder: RunFolder) -> None:
    """Its error is a failure and no bad input, and an older attempt's traceback is no evidence of it."""
    gone = {**supervisor_record(folder.path), "start_time": 1}
    (folder.path / SUPERVISOR_FILE).write_text(json.dumps(gone))
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "rank-0000.log").write_text('Traceback (most recent call last):\n  File "x"\nOSError: old\n')
    result = job("r").wait()
    assert result.error is not None
    assert (result.error.code, result.error.exit_code, result.exit_code) == ("failed", 1, 1)
    assert (result.error.evidence, result.error.fix) == (None, "windlass why r")


def test_ranks_without_a_supervisor_that_fell_silent_were_cancelled_by_nobody(folder: RunFolder) -> None:
    folder.record("started", attempt=1, world_size=1, step=0)
    folder.metrics.write_text("")
    long_ago = time.time() - 3600
    os.utime(folder.metrics, (long_ago, long_ago))
    assert job("r").show().state == "stopped"
    assert explain("r").name == "killed"


def test_a_run_that_was_never_started_has_no_end(folder: RunFolder) -> None:
    shown = job("r").show()
    assert (shown.state, list(shown.history)) == ("waiting", [])


def test_the_end_is_not_before_the_last_save_nor_moved_by_what_came_after(folder: RunFolder) -> None:
    (folder.path / SUPERVISOR_FILE).write_text(json.dumps({**supervisor_record(folder.path), "start_time": 1}))
    folder.metrics.write_text("")
    for path in (folder.metrics, folder.path / SUPERVISOR_FILE):
        os.utime(path, (1000.0, 1000.0))
    events = ("launched", "checkpoint", "preempted", "notice-failed", "settings-changed")
    lines = [json.dumps({"time": 1000.0 + number, "event": event}) for number, event in enumerate(events)]
    folder.history.write_text("\n".join(lines) + "\n")
    end = job("r").show().history[-1]
    assert (end["event"], end["time"]) == ("exit", 1002.0)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_that_goes_on_without_a_supervisor_runs(folder: RunFolder, recorded: bool) -> None:
    (folder.path / SUPERVISOR_FILE).write_text(json.dumps({**supervisor_record(folder.path), "start_time": 1}))
    folder.record("launched", attempt=1, job="1-1")
    folder.record("started", attempt=1, world_size=1, step=0)
    if recorded:
        folder.record("exit", state="failed", code=1, reason="as it was")
    with _locked(folder):
        folder.record("resumed", attempt=1, world_size=1, step=10)
        folder.metrics.write_text('{"kind":"step","step":11,"steps":20,"loss":1.0,"attempt":1}\n')
        status = job("r").status()
        assert (status.state, status.step) == ("running", 11)
        folder.record("finished", step=20, loss=1.0)
    shown = job("r").show()
    assert shown.state == "finished"
    assert [record["state"] for record in shown.history if record["event"] == "exit"][:1] == ["failed"]
