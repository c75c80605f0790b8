"""A supervisor that is killed with its ranks: nobody wrote down the end, and every command tells the same one."""

import json
import os
import signal

import pytest

from tests.commands import run_forked
from tests.targets.local_runs import events
from windlass.cli.views.ui import sources
from windlass.targets.launch import processes
from windlass.targets.launch.supervision import supervisor_of
from windlass.ui.library import Library

pytestmark = pytest.mark.slow
KILLED = "its supervisor was killed"


@pytest.fixture
def killed(alone, make_run):
    job = alone.submit(make_run(train={"steps": 4000}))
    alone.wait(job, lambda status: (status.step or 0) >= 7)
    ranks = processes.processes_of(job.folder.path)
    for pid in (supervisor_of(job.folder).pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    alone.wait(job)
    return job


@pytest.fixture
def windlass(in_tmp):
    def run(*words):
        done = run_forked(words, cwd=in_tmp, env=os.environ, timeout=120)
        assert done.returncode == 0, done
        return done.stdout

    return run


def test_all_commands_agree_on_the_end(killed, windlass):
    before = killed.folder.history.read_bytes()
    (row,) = json.loads(windlass("ls", "--json"))
    assert (row["state"], KILLED in row["reason"]) == ("failed", True)
    shown = json.loads(windlass("show", "r", "--json"))
    assert (shown["state"], shown["reason"]) == (row["state"], row["reason"])
    end = shown["history"][-1]
    assert (end["event"], end["state"], end["reason"]) == ("exit", "failed", row["reason"])
    (launched,) = events(killed, "launched")
    assert shown["seconds"] == pytest.approx(end["time"] - launched["time"], abs=1)
    assert shown["goodput"]["seconds"] == pytest.approx(shown["seconds"], abs=1)
    assert f"failed: {KILLED}" in " ".join(windlass("show", "r", "--history").split())
    why = json.loads(windlass("why", "r", "--json"))
    assert (why["class"], why["retry"]) == ("killed", "yes")
    assert KILLED in why["evidence"][0]["line"]
    windlass("logs", "r", "--follow")  # ends
    assert killed.folder.history.read_bytes() == before, "reading a run changes nothing"


def test_the_page_agrees(killed):
    library = Library(killed.folder.path.parent, sources())
    row = library.row("r")
    detail = library.detail("r")
    assert row["state"] == "failed"
    assert detail["attempts"][-1]["ended"] is not None
    assert KILLED in detail["events"][-1]["text"]
    assert library.verdict("r")["class"] == "killed"


def test_the_next_start_writes_the_end_down(killed, alone, make_run, windlass):
    (end,) = [record for record in json.loads(windlass("show", "r", "--json"))["history"] if record["event"] == "exit"]
    run = make_run(train={"steps": 20})
    job = alone.submit(run)
    alone.wait(job, lambda status: status.state == "finished")
    told = [record["event"] for record in events(job, "launched", "exit")]
    assert told == ["launched", "exit", "launched", "exit"]
    assert events(job, "exit")[0] == end, "as the commands told it before"
    assert KILLED in windlass("show", "r", "--history")


def test_a_new_start_does_not_tell_the_numbers_of_the_dead_attempt(killed, alone, make_run):
    dead = alone.target.status(killed)
    assert (dead.attempt, dead.state) == (1, "failed")
    assert dead.step >= 7
    job = alone.submit(make_run(train={"steps": 4000}), pause=0.5)
    try:
        told = [alone.target.status(job)]  # before its supervisor has launched anything
        while not told[-1].step:
            told.append(alone.target.status(job))
        (resumed,) = events(job, "resumed")
        assert {status.attempt for status in told} == {2}
        assert {status.state for status in told} <= {"waiting", "running"}
        assert told[0].state == "waiting"
        assert not [status for status in told[:-1] if status.loss or status.tokens_per_s or "no step" in str(status)]
        assert told[-1].step == resumed["step"] + 1
    finally:
        alone.target.stop(job, save_first=False)
