"""Whose supervisor it is: copies, links, renamed machines, ranks that nobody watches, and a stop that comes early."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.targets.local_runs import events
from windlass.cli.main import run_command
from windlass.runfolder import RunFolder
from windlass.targets.launch import processes
from windlass.targets.launch.supervision import supervisor_of
from windlass.targets.local.state import status_of
from windlass.targets.protocol import JobRef

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(in_tmp, capfd):
    """`windlass` as it is typed; in a process of its own where something is to go `before` it."""

    def run(*arguments, before=()):
        if before:
            words = [*before, sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]
            made = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
            answer = Answer(made.returncode, made.stdout, made.stderr)
        else:
            capfd.readouterr()
            answer = Answer(int(run_command([str(argument) for argument in arguments])), *capfd.readouterr())
        assert answer.returncode == 0, answer
        return answer

    return run


@contextlib.contextmanager
def under_way(alone, run, **plan):
    """A run that trains until the test is over."""
    job = alone.submit(run, **plan)
    try:
        alone.wait(job, lambda status: (status.step or 0) >= 2)
        yield job
    finally:
        alone.target.stop(job, save_first=False)
        processes.end_leftovers(job.folder.path, patience=0)


def state(command, name, *, before=()):
    rows = {row["name"]: row for row in json.loads(command("ls", "--json", before=before).stdout)}
    return rows[name]


def test_a_copy_of_a_live_run_is_not_running_and_stopping_it_leaves_the_run_alone(alone, make_run, command):
    with under_way(alone, make_run(train={"steps": 4000})) as job:
        shutil.copytree(job.folder.path, job.folder.path.with_name("copy"))
        assert state(command, "copy")["state"] == "stopped"
        answer = command("stop", "copy", "--now")
        assert "has ended already" in answer.stdout
        assert supervisor_of(job.folder).alive
        assert state(command, "r")["state"] == "running"


def test_a_run_is_the_same_through_a_link(alone, make_run, command, in_tmp, monkeypatch):
    with under_way(alone, make_run(train={"steps": 4000})) as job:
        (in_tmp / "linked").symlink_to(in_tmp / "runs")
        monkeypatch.setenv("WINDLASS_RUNS", "linked")
        assert state(command, "r")["state"] == "running"
        assert processes.processes_of(Path("linked/r")) == processes.processes_of(job.folder.path) != []
        command("stop", "r")
        assert processes.processes_of(job.folder.path) == []


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_rank_that_nobody_watches_is_running_and_stop_lets_it_save(
    alone, make_run, command, in_tmp, monkeypatch, through_a_link
):
    with under_way(alone, make_run(train={"steps": 4000}), orphan=True) as job:
        folder = job.folder.path
        os.kill(supervisor_of(job.folder).pid, signal.SIGKILL)
        alone.wait(job, lambda _: not supervisor_of(job.folder).alive)
        if through_a_link:
            (in_tmp / "linked").symlink_to(in_tmp / "runs")
            monkeypatch.setenv("WINDLASS_RUNS", "linked")
        row = state(command, "r")
        assert row["state"] == "running", row
        assert "nobody watches" in row["reason"]
        answer = command("stop", "r")
        assert "stopped" in answer.stdout
        assert events(job, "preempted"), "it was killed before it could save"
        assert processes.processes_of(folder) == []
        assert state(command, "r")["state"] == "stopped"


def test_a_new_start_lets_such_a_rank_save_and_goes_on_from_there(alone, make_run):
    with under_way(alone, make_run(train={"steps": 4000}), orphan=True) as job:
        os.kill(supervisor_of(job.folder).pid, signal.SIGKILL)
        alone.wait(job, lambda _: not supervisor_of(job.folder).alive)
        (orphan,) = processes.processes_of(job.folder.path)
        alone.target.attach(make_run(train={"steps": 4000}), alone.request(make_run(train={"steps": 4000})))
        alone.wait(job, lambda status: status.attempt == 2 and status.state == "running")
        assert processes.start_time(orphan) is None
        assert events(job, "resumed")[-1]["step"] == events(job, "preempted")[-1]["step"]


def unshared_name():
    words = ["unshare", "--uts", "sh", "-c", 'hostname another && exec "$@"', "sh"]
    if shutil.which("unshare") is None:
        return None
    return words if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else None


@pytest.mark.skipif(unshared_name() is None, reason="needs the right to change a host name")
def test_under_another_host_name_runs_keep_their_state_and_stop_saves(alone, make_run, command):
    renamed = unshared_name()
    ended = alone.submit(make_run("ended"))
    alone.wait(ended)
    with under_way(alone, make_run(train={"steps": 4000})) as job:
        assert state(command, "ended", before=renamed)["state"] == "finished"
        assert state(command, "r", before=renamed)["state"] == "running"
        answer = command("stop", "r", before=renamed)
        assert "stopped" in answer.stdout
        assert events(job, "preempted")
        assert not events(job, "leftovers-killed")
        assert events(job, "exit")[-1]["code"] == 75


def elsewhere(folder, **facts):
    """The folder as a supervisor on another machine leaves it, which wrote a moment ago."""
    record = json.loads((folder.path / "supervisor.json").read_text())
    record |= {"host": "other", "boot": "another-boot", "machine": "another-machine", **facts}
    (folder.path / "supervisor.json").write_text(json.dumps(record))


def test_stop_asks_a_supervisor_on_another_machine_through_the_folder(alone, make_run, command):
    """A run folder that two machines share: no signal reaches the other one, a request does."""
    with under_way(alone, make_run(train={"steps": 4000})) as job:
        elsewhere(job.folder)
        row = state(command, "r")
        assert (row["state"], row["reason"]) == ("running", "on other")
        answer = command("stop", "r")
        assert "stopped" in answer.stdout
        assert events(job, "preempted")


def test_a_silent_machine_is_not_waited_for_and_nothing_is_killed(alone, make_run, command, in_tmp):
    job = alone.submit(make_run(train={"steps": 4000}))
    alone.wait(job, lambda status: (status.step or 0) >= 2)
    os.kill(supervisor_of(job.folder).pid, signal.SIGKILL)
    alone.wait(job, lambda _: not processes.processes_of(job.folder.path))
    elsewhere(job.folder)
    long_ago = time.time() - 3600
    for path in (job.folder.path / "supervisor.json", job.folder.metrics, job.folder.history):
        os.utime(path, (long_ago, long_ago))
    row = state(command, "r")
    assert row["state"] == "failed"
    assert "other has been silent for 60 min" in row["reason"]
    before = job.folder.history.read_text()
    assert "has ended already" in command("stop", "r").stdout
    assert job.folder.history.read_text() == before


def test_this_machine_after_a_restart_is_this_machine(alone, make_run, command):
    job = alone.submit(make_run(train={"steps": 4000}))
    alone.wait(job, lambda status: (status.step or 0) >= 2)
    os.kill(supervisor_of(job.folder).pid, signal.SIGKILL)
    alone.wait(job, lambda _: not processes.processes_of(job.folder.path))
    record = json.loads((job.folder.path / "supervisor.json").read_text()) | {"boot": "before"}
    (job.folder.path / "supervisor.json").write_text(json.dumps(record))
    row = state(command, "r")
    assert row["state"] == "failed"
    assert "the machine was restarted" in row["reason"]


@pytest.mark.parametrize("earlier", ["none", "finished"])
def test_a_stop_during_a_start_is_honoured(alone, make_run, command, earlier):
    """The lock is held, and no supervisor has said yet that it is there."""
    run = make_run(train={"steps": 20})
    folder = RunFolder.of(run)
    if earlier == "finished":
        alone.wait(alone.submit(run))
    else:
        folder.create(run)
    lock = os.open(folder.path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state(command, "r")["state"] == "waiting"
    words = [sys.executable, "-m", "windlass.cli.main", "stop", "r"]
    stopping = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not (folder.path / "stop.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (folder.path / "stop.json").exists(), "it left no request"
        launches = len(events(JobRef("local", "r", folder), "launched"))
        alone.start(run, lock)
        out, _ = stopping.communicate(timeout=60)
    finally:
        stopping.kill()
    assert "r is stopped" in out, out
    assert len(events(JobRef("local", "r", folder), "launched")) == launches, "it was started all the same"
    assert status_of(folder).state == "stopped"
    alone.wait(alone.submit(make_run(train={"steps": 25})))  # the request is not held against the next start
    assert status_of(folder).state == "finished"


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_stop_of_another_users_run_says_whose_it_is(alone, make_run, in_tmp):
    alone.wait(alone.submit(make_run("ended")))
    with under_way(alone, make_run(train={"steps": 4000})) as job:
        for path in (in_tmp, *in_tmp.parents):
            if path.stat().st_uid == os.getuid() and str(path).startswith("/tmp"):
                path.chmod(path.stat().st_mode | 0o055)
        program = (  # what `ls` and a stop of an ended run import is there before the user changes
            "import os, sys, pwd\n"
            "from windlass.cli.main import run_command\n"
            "run_command(['ls']), run_command(['stop', 'ended'])\n"
            "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
            "sys.exit(run_command(['stop', 'r']))"
        )
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert answer.returncode == 1, answer
        assert "the run r belongs to root" in answer.stderr
        assert "unexpected" not in answer.stderr
        assert supervisor_of(job.folder).alive


def test_a_deleted_folder_ends_its_run_and_its_follower(alone, make_run):
    job = alone.submit(make_run(train={"steps": 4000}))
    alone.wait(job, lambda status: (status.step or 0) >= 2)
    supervisor = supervisor_of(job.folder)
    shutil.rmtree(job.folder.path, ignore_errors=True)
    deadline = time.monotonic() + 20
    while supervisor.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not supervisor.alive, "it trains on"
    assert processes.processes_of(job.folder.path) == []
    status = status_of(job.folder)
    assert (status.state, status.exit_code) == ("failed", 1)
    assert "deleted" in status.reason
