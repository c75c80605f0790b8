"""What is said while a run is followed."""

import json

import pytest

from windlass.cli.runs.follow import Bar, Follower, JsonLines, Lines, describe_event
from windlass.common.files import append_json_line
from windlass.runfolder import RunFolder
from windlass.targets.protocol import JobRef, JobStatus


class Ending:
    """A target whose job writes its news between two looks, and then has ended."""

    def __init__(self, folder):
        self.folder, self.looks = folder, 0

    def status(self, _job):
        self.looks += 1
        if self.looks == 2:
            for step in (1, 2, 3):
                facts = {"step": step, "steps": 10, "loss": 1.0 / step, "tokens_per_s": 1234.5, "step_s": 2.0}
                append_json_line(self.folder.metrics, {"kind": "step", **facts})
            append_json_line(self.folder.metrics, {"kind": "validation", "step": 3, "loss": 0.25})
            self.folder.rank_log(1).write_text("t rank 1 INFO fine\nt rank 1 WARNING a slow disk\n")
            self.folder.record("rank-died", rank=1, signal="SIGKILL", code=-9, first=True)
            self.folder.record("checkpoint-damaged", checkpoint="step-00000002", file="a.distcp", reason="truncated")
            self.folder.record("restart", attempt=2, why="rank 1 was killed by SIGKILL")
        return JobStatus("finished" if self.looks > 2 else "running", exit_code=0)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.logs.mkdir(parents=True)
    folder.record("started", world_size=2)
    append_json_line(folder.metrics, {"kind": "step", "step": 99, "steps": 99})
    return folder


def follow(folder, reporter):
    return Follower(folder).follow(Ending(folder), JobRef("local", "r", folder), reporter)


def test_lines_for_files_and_pipes(folder, capsys):
    assert follow(folder, Lines()).state == "finished"
    assert capsys.readouterr().out.splitlines() == [
        "step 1/10  loss 1.0000  1,234 tok/s  18 s left",
        "step 3/10  loss 0.3333  1,234 tok/s  14 s left",
        "step 3: validation loss 0.2500",
        "[rank-0001] t rank 1 WARNING a slow disk",
        "rank 1 was killed by SIGKILL",
        "passed over the checkpoint step-00000002: a.distcp: truncated",
        "restarting from the last checkpoint (attempt 2)",
    ]


def test_a_rank_error_is_shown_before_the_job_has_ended(folder, capsys):
    """A cluster takes its time to say so; ranks that lost a peer are no news beside the one that failed."""
    old = {"rank": 0, "attempt": 1, "time": 1.0, "type": "KeyError", "traceback": "KeyError: 'old'\n"}
    folder.rank_error(0).write_text(json.dumps(old))

    class Failing(Ending):
        def status(self, _job):
            self.looks += 1
            if self.looks == 2:
                lost = {**old, "rank": 1, "time": 2.0, "traceback": "PeerLostError: rank 2\n", "retry": True}
                wrong = {**old, "rank": 2, "time": 3.0, "traceback": "Traceback\n  line 1\nKeyError: 'new'\n"}
                for error in (lost, wrong, {**wrong, "rank": 3, "time": 4.0}):
                    self.folder.rank_error(error["rank"]).write_text(json.dumps(error))
            if self.looks == 4:
                shown.append(capsys.readouterr().out)
            return JobStatus("failed" if self.looks == 4 else "running", exit_code=1)

    shown: list[str] = []
    Follower(folder).follow(Failing(folder), JobRef("kubernetes", "r", folder), Lines())
    assert shown == ["rank 2 failed\nTraceback\n  line 1\nKeyError: 'new'\n"]
    assert capsys.readouterr().out == ""


def test_what_happened_between_two_looks_is_told_in_its_order(folder, capsys):
    """A short run is over before it is looked at again: its events stand in one file, its steps in another."""

    class Short(Ending):
        def status(self, _job):
            self.looks += 1
            if self.looks == 1:
                append_json_line(self.folder.history, {"event": "started", "world_size": 1, "time": 1.0})
                append_json_line(self.folder.history, {"event": "checkpoint", "step": 2, "seconds": 1, "time": 3.5})
                append_json_line(self.folder.history, {"event": "finished", "step": 4, "time": 6.0})
                for step in (1, 2, 3, 4):
                    append_json_line(
                        self.folder.metrics, {"kind": "step", "step": step, "steps": 4, "time": step + 1.0}
                    )
                append_json_line(self.folder.metrics, {"kind": "validation", "step": 4, "loss": 1, "time": 5.5})
            return JobStatus("finished", exit_code=0)

    news = Lines()
    Follower(folder).follow(Short(folder), JobRef("local", "r", folder), news)
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "started on 1 rank",
        "step 1/4",
        "step 2/4",
        "saved the checkpoint of step 2 (1.0 s)",
        "step 4/4",
        "step 4: validation loss 1.0000",
        "trained to step 4",
    ]


def test_a_bar_for_terminals(folder, capsys):
    follow(folder, Bar(10))
    shown = capsys.readouterr().out
    assert "restarting from the last checkpoint" in shown
    assert "3/10" in shown
    assert "0.3333" in shown


def test_json_lines_for_programs(folder, capsys):
    follow(folder, JsonLines())
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in err.splitlines()]
    assert out == ""
    assert [one["step"] for one in records if one["kind"] == "step"] == [1, 2, 3]
    assert [one["event"] for one in records if one["kind"] == "event"][-1] == "restart"


def test_what_is_not_news_is_not_said():
    assert describe_event({"event": "launched", "argv": []}) is None
    assert describe_event({"event": "rank-died", "rank": 0, "code": -15, "first": False}) is None
