"""What follows when the ranks have ended on their nodes. Pure, or in a folder alone."""

import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath
from windlass.targets.protocol import JobRef
from windlass.targets.slurm.attempt import JobFacts, Requeue, begin, decide_with_slurm, end, is_recorded, refused
from windlass.targets.slurm.client import SlurmTarget
from windlass.targets.slurm.state import SubmittedJob, lock

RUNNING, REQUEUED, CANCELLED = JobFacts("RUNNING", 0), JobFacts("COMPLETING", 1), JobFacts("COMPLETING", 0)
SAVED = [{"event": "checkpoint", "step": 8}, {"event": "preempted", "step": 8}]
FINISHED = [{"event": "finished"}]
NOT_FINITE = {"rank": 0, "error": "not finite", "retry": False, "exit_code": 1}
LOST_PEER = {"rank": 0, "error": "peer lost", "retry": True}
KILLED = RankDeath(1, -9, "t")
OPTIONS = {"max_restarts": 3, "limit_near": False, "may_requeue": True}


@pytest.mark.parametrize(
    ("ended", "job", "options", "expected"),
    [
        (AttemptEnd(0, FINISHED), RUNNING, {}, ("finished", 0)),
        (AttemptEnd(0, FINISHED), CANCELLED, {}, ("finished", 0)),
        (AttemptEnd(1, SAVED), RUNNING, {}, Requeue("told to leave the nodes", "preempted")),
        (AttemptEnd(1, SAVED), RUNNING, {"limit_near": True}, Requeue("the time limit is near", "time_limit")),
        (AttemptEnd(-9), RUNNING, {"limit_near": True}, Requeue("the time limit is near", "time_limit")),
        (AttemptEnd(-9), CANCELLED, {"limit_near": True}, Requeue("the time limit is near", "time_limit")),
        (AttemptEnd(1, SAVED), RUNNING, {"may_requeue": False}, ("preempted", 75)),
        (AttemptEnd(1, SAVED), REQUEUED, {}, None),
        (AttemptEnd(-9), REQUEUED, {}, None),
        (AttemptEnd(1, errors=[LOST_PEER]), REQUEUED, {}, None),
        (AttemptEnd(1, SAVED), CANCELLED, {}, ("stopped", 75)),
        (AttemptEnd(-9), CANCELLED, {}, ("stopped", 130)),
        (AttemptEnd(1, SAVED, stop_requested=True), RUNNING, {}, ("stopped", 75)),
        (AttemptEnd(-9, stop_requested=True), RUNNING, {}, ("stopped", 130)),
        (AttemptEnd(1, errors=[NOT_FINITE]), RUNNING, {}, ("failed", 1)),
        (AttemptEnd(1, errors=[NOT_FINITE]), RUNNING, {"limit_near": True}, ("failed", 1)),
        (AttemptEnd(1, errors=[NOT_FINITE]), REQUEUED, {}, ("failed", 1)),
        (AttemptEnd(1, errors=[LOST_PEER], deaths=[KILLED]), RUNNING, {}, "rank 1 was killed by SIGKILL"),
        (AttemptEnd(1, apart="the nodes did not meet"), RUNNING, {}, "the nodes did not meet"),
        (AttemptEnd(1), RUNNING, {}, ("failed", 1)),
    ],
)
def test_follow_up(ended, job, options, expected):
    verdict = decide_with_slurm(ended, [], job, **{**OPTIONS, **options})
    if isinstance(expected, tuple):
        assert isinstance(verdict, Done)
        assert (verdict.state, verdict.code) == expected
    elif isinstance(expected, str):
        assert (verdict.action, verdict.reason) == ("retry", expected)
    else:
        assert verdict == expected


@pytest.mark.parametrize(
    ("ended", "options", "name"),
    [
        (AttemptEnd(1, apart="the nodes did not meet"), {}, "rendezvous"),
        (AttemptEnd(-9), {"limit_near": True}, "time_limit"),  # a limit that is too short for one checkpoint
    ],
)
def test_restarts_without_progress_are_bounded(ended, options, name):
    history = [{"event": "restart", "class": name}] * 3
    verdict = decide_with_slurm(ended, history, RUNNING, **{**OPTIONS, **options})
    assert (verdict.state, verdict.name) == ("failed", name)
    saved = [*history, {"event": "checkpoint", "step": 4}]
    assert not isinstance(decide_with_slurm(ended, saved, RUNNING, **{**OPTIONS, **options}), Done)


def test_facts():
    line = "JobId=21 JobName=a JobState=RUNNING x JobState=COMPLETING Reason=None Requeue=1 Restarts=2 ExitCode=0:0"
    facts = JobFacts.parse(line, asked_restarts=1)
    assert (facts.state, facts.requeued, facts.cancelled) == ("COMPLETING", True, False)
    assert JobFacts.parse("slurm_load_jobs error: Invalid job id specified", asked_restarts=1).state == "UNKNOWN"


@pytest.fixture
def folder(tmp_path):
    run = parse_run(
        {"name": "r", "model": {"preset": "llama-tiny"}, "data": {}, "target": {"kind": "slurm", "max_restarts": 1}}
    )
    made = RunFolder(tmp_path / "r")
    made.create(run)
    belongs_to(made, "7")
    return made


def belongs_to(folder, job):
    SubmittedJob(job).write(folder)


def test_begin_counts_and_gives_up(folder, capsys):
    assert begin(folder, job="7", port=None) == 0
    attempt, port = capsys.readouterr().out.split()
    assert attempt == "1"
    assert 0 < int(port) < 65536
    assert begin(folder, job="7", port=29500) == 0
    assert capsys.readouterr().out == "2 29500\n"
    assert begin(folder, job="7", port=None) == 1
    last = list(read_json_lines(folder.history))[-1]
    assert (last["event"], last["state"], last["code"]) == ("exit", "failed", 1)
    assert "given up after 1 restart without a new checkpoint" in last["reason"]
    belongs_to(folder, "8")
    assert begin(folder, job="8", port=None) == 0  # submitted again by somebody


SUBMITTED = SubmittedJob(None, submission="0123456789abcdef")
CARRIES_IT = "JobId=9 Comment=for the lab windlass:0123456789abcdef Restarts=0"


@pytest.mark.parametrize(
    ("record", "job", "facts", "expected"),
    [
        (SubmittedJob("9"), "9", "", True),
        (SubmittedJob("9"), "8", CARRIES_IT, False),
        (SubmittedJob("9_1"), "9_2", "", False),
        (SUBMITTED, "9", CARRIES_IT, True),
        (SUBMITTED, "9", "slurm_load_jobs error: Socket timed out", False),
        (SUBMITTED, "9", "JobId=9 Comment=windlass:fedcba9876543210", False),
        (None, "9", CARRIES_IT, False),
    ],
)
def test_a_folder_belongs_to_one_job(folder, capsys, record, job, facts, expected):
    if record is None:
        (folder.path / "slurm.json").unlink()
    else:
        record.write(folder)
    assert is_recorded(folder, job=job, facts=facts, patience=0) == expected
    if expected:
        assert SubmittedJob.of(folder).number == job
    else:
        assert begin(folder, job=job, port=None, facts=facts) == 2
        assert [record["event"] for record in read_json_lines(folder.history)] == ["job-left"]
        assert f"{job} is not the job of this run" in capsys.readouterr().err


def test_a_job_waits_for_whoever_submits_it(folder):
    """The client holds the lock while sbatch works: the job that has begun meanwhile leaves the decision to it."""
    SUBMITTED.write(folder)
    with lock(folder, patience=0) as is_held:
        assert is_held
        threading.Timer(0.5, lambda: SUBMITTED.confirm(folder, "9")).start()
        assert is_recorded(folder, job="9", facts="", patience=20)
    SUBMITTED.write(folder)
    with lock(folder, patience=0):
        threading.Timer(0.5, lambda: SUBMITTED.confirm(folder, "10")).start()
        assert not is_recorded(folder, job="9", facts=CARRIES_IT.replace("0123", "4567"), patience=20)


def test_a_copied_run_folder_has_no_job(folder, tmp_path):
    """So that `stop` of the copy does not end the original."""
    replace(SubmittedJob("7"), folder=str(folder.path)).write(folder)
    folder.record("launched", attempt=1, job="7")
    shutil.copytree(folder.path, tmp_path / "copy")
    copy = JobRef("slurm", "copy", RunFolder(tmp_path / "copy"))
    status = SlurmTarget().status(copy)
    assert (status.state, status.ended, f"a copy of {folder.path}" in status.reason) == ("stopped", True, True)
    assert SlurmTarget().stop(copy, save_first=False) == status
    assert SubmittedJob.of(folder).belongs_to(folder)
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert SubmittedJob.of(RunFolder(link)).belongs_to(RunFolder(link))


def test_a_silent_slurm_is_asked_once_for_all_runs(folder, tmp_path, monkeypatch):
    """And what the runs wrote down themselves is shown meanwhile."""
    squeue = tmp_path / "squeue"
    squeue.write_text(
        f"#!/bin/sh\necho >>{tmp_path}/asked\n"
        "echo 'squeue: error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    jobs = []
    for number in ("7", "8", "9"):
        copy = RunFolder(tmp_path / f"run-{number}")
        copy.create(folder.load_run())
        belongs_to(copy, number)
        jobs.append(JobRef("slurm", copy.name, copy))
    jobs[0].folder.record("launched", attempt=1, job="7")
    jobs[0].folder.record("started", attempt=1)
    target = SlurmTarget()
    found = [target.status(job) for job in jobs]
    assert [item.state for item in found] == ["running", "waiting", "waiting"]
    assert all("Unable to contact slurm controller" in item.reason for item in found)
    assert (tmp_path / "asked").read_text() == "\n"


def test_the_end_of_a_node_that_was_thought_lost_changes_nothing(folder, capsys):
    begin(folder, job="7", port=None)
    begin(folder, job="7", port=None)
    before = folder.history.read_text()
    capsys.readouterr()
    end(folder, attempt=1, code=1, limit_near=False, restarts=0, facts="JobState=RUNNING Restarts=0")
    assert capsys.readouterr().out == "exit 75\n"
    assert folder.history.read_text() == before


def test_a_full_disk_does_not_hide_the_end(folder, capsys, monkeypatch):
    begin(folder, job="7", port=None)
    capsys.readouterr()

    def full(*_arguments, **_facts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "record", full)
    end(folder, attempt=1, code=1, limit_near=False, restarts=0, facts="JobState=RUNNING Restarts=0")
    out, err = capsys.readouterr()
    assert out == "exit 1\n"
    assert "No space left" in err


MANY_LOCKS = """
import contextlib, resource, sys
from pathlib import Path
from windlass.runfolder import RunFolder
from windlass.targets.slurm.submission import allow_open_files, locked_folder
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
allow_open_files(400)
with contextlib.ExitStack() as held:
    for index in range(400):
        held.enter_context(locked_folder(RunFolder(Path(sys.argv[1]) / f"run-{index}")))
"""


@pytest.mark.slow
def test_a_large_sweep_holds_more_locks_than_a_shell_allows_files(tmp_path):
    """And a folder that became no run is gone again."""
    subprocess.run([sys.executable, "-c", MANY_LOCKS, str(tmp_path / "runs")], check=True, timeout=120)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("why", "ends"), [("Job is pending execution for job 23", 0), ("Access denied", 1)])
def test_a_job_that_slurm_has_requeued_itself_has_not_ended(tmp_path, why, ends):
    """A preempted job whose script is slow: `scontrol requeue` comes too late, and the job goes on."""
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    assert refused(folder, why=why) == 0
    assert len([record for record in read_json_lines(folder.history) if record["event"] == "exit"]) == ends
