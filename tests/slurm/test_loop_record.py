"""The retry loop of a detached run, found again whatever becomes of the process that submits it.

A small program stands in for sbatch, squeue and scancel: it can end its caller at the worst moment.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.targets.protocol import JobRef
from windlass.targets.slurm import submission
from windlass.targets.slurm.client import LOOP_FILE, SlurmTarget
from windlass.targets.slurm.state import SubmittedJob

SLURM = f"""#!{sys.executable}
import json, os, pathlib, re, signal, sys, time

jobs, name, options = pathlib.Path(__file__).parent / "jobs", pathlib.Path(sys.argv[0]).name, sys.argv[1:]
given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
moment = os.environ.get("ENDS_CALLER")
if name == "sbatch":
    if moment == "refused":
        sys.exit("sbatch: error: Batch job submission failed: Invalid qos specification")
    if moment in ("before", "in flight"):
        os.kill(os.getppid(), signal.SIGKILL)
    if moment == "before":
        sys.exit(1)
    if moment in ("in flight", "slow"):
        time.sleep(1 if moment == "in flight" else 6)
    number = str(100 + len(list(jobs.iterdir())))
    job = {{"%i": number, "%T": "PENDING", "%r": "Dependency", "%k": given.get("comment", "")}}
    (jobs / number).write_text(json.dumps(job))
    if moment == "after":
        os.kill(os.getppid(), signal.SIGKILL)
    print(number)
elif name == "squeue":
    wanted = options[options.index("--jobs") + 1] if "--jobs" in options else None
    form = options[options.index("--format") + 1]
    queued = [json.loads(path.read_text()) for path in jobs.iterdir()]
    if wanted and not any(job["%i"] == wanted for job in queued):
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for job in queued:
        if wanted in (None, job["%i"]):
            print(re.sub("%[iTrk]", lambda match: job[match[0]], form))
elif name == "scancel":
    (jobs / options[-1]).unlink(missing_ok=True)
else:
    sys.exit(1)
"""
START = """
import sys
from pathlib import Path
from windlass.runfolder import RunFolder
from windlass.targets.protocol import JobRef
from windlass.targets.slurm.client import SlurmTarget
SlurmTarget().start_loop(JobRef("slurm", "mine", RunFolder(Path(sys.argv[1]))), "#!/bin/bash")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A run that was submitted as job 7, which Slurm has forgotten since."""
    commands = tmp_path / "commands"
    (commands / "jobs").mkdir(parents=True)
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
        (commands / name).write_text(SLURM)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    folder = RunFolder(tmp_path / "mine")
    folder.logs.mkdir(parents=True)
    SubmittedJob("7").write(folder)
    return JobRef("slurm", "mine", folder)


def start(job, moment=None):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"ENDS_CALLER": moment} if moment else {}
    return subprocess.run([sys.executable, "-c", START, str(job.folder.path)], env=environment, check=False).returncode


def loops(job):
    return sorted(path.name for path in (job.folder.path.parent / "commands" / "jobs").iterdir())


@pytest.mark.parametrize("moment", ["after", "in flight", "before", None])
def test_a_loop_whose_number_was_never_written_down_is_found_and_ended(job, moment):
    assert start(job, moment) == (-9 if moment else 0)
    assert start(job) == 0  # the same command again: one loop, not two
    assert loops(job) == ["100"]
    assert SlurmTarget().has_loop(job)
    assert "its retry loop decides" in SlurmTarget().status(job).reason
    SlurmTarget().stop(job, save_first=True)
    assert loops(job) == []
    assert not (job.folder.path / LOOP_FILE).exists()
    assert not SlurmTarget().has_loop(job)


def test_stop_ends_a_loop_that_becomes_a_job_a_moment_later(job):
    assert start(job, "in flight") == -9
    SlurmTarget().stop(job, save_first=True)
    assert loops(job) == []


def test_stop_beside_an_sbatch_that_is_slower_than_it_waits_leaves_no_loop(job):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ENDS_CALLER": "slow"}
    with subprocess.Popen([sys.executable, "-c", START, str(job.folder.path)], env=environment) as starting:
        while not (job.folder.path / LOOP_FILE).exists():
            time.sleep(0.05)
        SlurmTarget().stop(job, save_first=True)
        assert starting.poll() is None, "sbatch was not slower"
    assert starting.returncode == 0
    assert loops(job) == []
    assert not (job.folder.path / LOOP_FILE).exists()
    assert not SlurmTarget().has_loop(job)


def test_the_loop_that_submits_another_is_recorded_until_that_is_known(job, monkeypatch):
    """`stop` must end the one that is at work too: it would submit a job behind its back."""
    assert start(job) == 0
    monkeypatch.setenv("WINDLASS_LOOP", "mine")
    assert start(job, "after") == -9
    monkeypatch.delenv("WINDLASS_LOOP")
    assert json.loads((job.folder.path / LOOP_FILE).read_text())["job"] == "100"
    assert loops(job) == ["100", "101"]
    SlurmTarget().stop(job, save_first=True)
    assert loops(job) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job":"x; rm"}', '{"submission":7}', '{"job":7,"submission":"0"}'])
def test_a_damaged_record_is_no_loop(job, text):
    (job.folder.path / LOOP_FILE).write_text(text)
    assert not SlurmTarget().has_loop(job)
    SlurmTarget().stop(job, save_first=True)
    assert not (job.folder.path / LOOP_FILE).exists()


def test_a_loop_that_slurm_refuses_leaves_nothing(job, monkeypatch):
    monkeypatch.setenv("ENDS_CALLER", "refused")
    with pytest.raises(UserError, match="its retry loop is not") as error:
        SlurmTarget().start_loop(job, "#!/bin/bash")
    assert "Invalid qos" in error.value.evidence
    assert not (job.folder.path / LOOP_FILE).exists()


def test_a_loop_that_slurm_refuses_while_the_run_is_stopped(job, monkeypatch):
    def refused(request, intent):
        (job.folder.path / LOOP_FILE).unlink()  # as `stop` does, which found no such job
        raise UserError("Slurm did not take the job", evidence="Invalid qos specification")

    monkeypatch.setattr(submission, "sbatch", refused)
    with pytest.raises(UserError, match="its retry loop is not"):
        SlurmTarget().start_loop(job, "#!/bin/bash")
