"""Hand jobs to Slurm so that each is found again, whatever becomes of sbatch, the network or this process."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from windlass.common.files import write_atomically
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.targets.launch.supervision import LOCK_FILE, is_running
from windlass.targets.protocol import JobRef
from windlass.targets.slurm import queue
from windlass.targets.slurm.commands import Commands, SilentError
from windlass.targets.slurm.render import SlurmRequest
from windlass.targets.slurm.state import JOB_FILE, SubmittedJob, lock

SCRIPT_FILE = "job.sbatch"
POLL_SECONDS = 0.2
LOCK_SECONDS = 60.0  # for somebody else to submit the same run
SEARCH_SECONDS = 60.0  # for Slurm to say whether it took a job that sbatch could not confirm
IN_FLIGHT_SECONDS = 4.0  # in which a request that sbatch gave up waiting for still becomes a job
# What sbatch says when its request, or the answer to it, may have got lost.
LOST_ON_THE_WAY = re.compile(
    r"timed out|Zero Bytes were transmitted|[Cc]onnection|[Cc]ommunication|[Tt]ransport|[Tt]ermina|[Ii]nterrupt|standby"
)


def submit(runs: Sequence[Run], request: SlurmRequest, may_submit: Callable[[JobRef], bool]) -> list[JobRef]:
    """Hand the script to sbatch, for those runs whose folder belongs to no job that may still train in it.

    What is about to be submitted is written down first: whatever becomes of sbatch and of this process, an accepted
    job is found again, and one that nobody knows starts no ranks. If Slurm refuses, nothing is left behind.
    """
    jobs = [JobRef("slurm", run.name, RunFolder(path)) for run, path in zip(runs, request.folders, strict=True)]
    allow_open_files(len(jobs))
    with contextlib.ExitStack() as held:
        for job in jobs:
            held.enter_context(locked_folder(job.folder))
        # under the lock: somebody else may have submitted the same run a moment ago
        free = [position for position, job in enumerate(jobs) if may_submit(job)]
        if not free:
            return []
        request, jobs = request.only(free), [jobs[position] for position in free]
        intents = _intents(request, jobs)
        with contextlib.ExitStack() as undo:
            for position, job, intent in zip(free, jobs, intents, strict=True):
                undo.enter_context(_restored_if_refused(job.folder, intent))
                _write(job.folder, runs[position], request.script, intent)
            number = sbatch(request, intents[0])
        for job, intent in zip(jobs, intents, strict=True):
            _confirm(job.folder, intent, number if intent.index is None else f"{number}_{intent.index}")
    return jobs


def withdraw(job: JobRef) -> None:
    """Forget a submission that Slurm does not know: should it still arrive, it starts nothing."""
    with locked_folder(job.folder):
        submitted = SubmittedJob.of(job.folder)
        if submitted is not None and submitted.number is None:
            job.folder.record("not-submitted", submission=submitted.submission, why="stopped")
            (job.folder.path / JOB_FILE).unlink(missing_ok=True)
            reason = "stopped before Slurm had taken the job"
            job.folder.record("exit", state="stopped", code=int(ExitCode.INTERRUPTED), reason=reason)


def find(
    folder: RunFolder, submitted: SubmittedJob, *, patience: float = 0.0, is_locked: bool = False
) -> SubmittedJob | None:
    """The job that became of an unconfirmed submission, written down; None where Slurm has no such job."""
    number = number_of(submitted, patience=patience)
    if number is None:
        return None
    if is_locked:
        return submitted.confirm(folder, number)
    with contextlib.suppress(OSError), lock(folder, patience=0) as is_held:
        if is_held and SubmittedJob.of(folder) == submitted:
            return submitted.confirm(folder, number)
    return replace(submitted, number=number)


def number_of(submitted: SubmittedJob, *, patience: float) -> str | None:
    """The number of the job that a submission became; None where Slurm has none within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        number = queue.find_submission(Commands(submitted.host), str(submitted.submission), submitted.index)
        if number is not None or time.monotonic() >= deadline:
            return number
        time.sleep(POLL_SECONDS)


def sbatch(request: SlurmRequest, intent: SubmittedJob) -> str:
    """The number of the new job. Raises UserError if there is none, and UnconfirmedError if nobody can say."""
    commands = Commands(request.host)
    try:
        answer = commands.call(*request.command(str(intent.submission)), text=request.script)
        complaint = answer.complaint
    except SilentError as error:
        if not error.may_have_acted:
            raise
        answer, complaint = None, "\n".join(filter(None, (error.what, error.evidence)))
    if answer is not None and answer.code > 0 and not LOST_ON_THE_WAY.search(answer.err):
        raise _not_taken(complaint)
    number = queue.parse_sbatch(answer.out) if answer is not None and answer.code == 0 else None
    if answer is not None and number is not None and answer.out.strip().split(";")[0] == number:
        return number
    try:
        return _search(commands, intent, complaint)
    except UserError:
        if number is None:
            raise
        return number  # among other lines, and the site has put a comment of its own in the place of ours


def _search(commands: Commands, intent: SubmittedJob, complaint: str) -> str:
    """The number of a job of which sbatch said nothing that can be used: the queue has it, or will have it soon."""
    began, answered_at = time.monotonic(), None
    while True:
        try:
            number = queue.find_submission(commands, str(intent.submission), intent.index)
            answered_at = answered_at or time.monotonic()
        except SilentError:
            number = None
        now = time.monotonic()
        if number is not None:
            return number.split("_")[0]
        if answered_at is not None and now - answered_at > IN_FLIGHT_SECONDS:
            raise _not_taken(complaint)
        if now - began > SEARCH_SECONDS:
            raise UnconfirmedError(
                "it is not known whether Slurm took the job",
                evidence=complaint or "sbatch printed no number",
                cause="Slurm does not answer",
                fix="the same command again    looks for the job first, and submits it only if there is none",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)


def _confirm(folder: RunFolder, intent: SubmittedJob, number: str) -> None:
    now = SubmittedJob.of(folder)
    if now is not None and now.submission == intent.submission:
        if now.number is None:
            intent.confirm(folder, number)
    else:  # on a file system without locks somebody else came first
        Commands(intent.host).call("scancel", number)
        folder.record("job-left", job=number, why="another job was submitted at the same time")


def _not_taken(complaint: str) -> UserError:
    return UserError("Slurm did not take the job", evidence=complaint, fix="--dry-run    shows what it was asked")


class UnconfirmedError(UserError):
    """Nobody knows whether Slurm took the job."""


def _intents(request: SlurmRequest, jobs: Sequence[JobRef]) -> list[SubmittedJob]:
    """What is about to be submitted, for each run folder."""
    submission = secrets.token_hex(8)
    indices: Sequence[int | None] = [None] if request.indices is None else request.indices
    return [
        SubmittedJob(None, request.host, submission, index, os.path.realpath(job.folder.path))
        for index, job in zip(indices, jobs, strict=True)
    ]


def _write(folder: RunFolder, run: Run, script: str, intent: SubmittedJob) -> None:
    folder.create(run)
    write_atomically(folder.path / SCRIPT_FILE, script)
    intent.write(folder)
    folder.record("submitting", **intent.as_dict())


@contextlib.contextmanager
def _restored_if_refused(folder: RunFolder, intent: SubmittedJob) -> Iterator[None]:
    """Put back what a run folder held before, where it comes to nothing; not where nobody knows what came of it."""
    earlier = {name: content(folder.path / name) for name in ("run.yaml", SCRIPT_FILE, JOB_FILE)}
    try:
        yield
    except UnconfirmedError:
        raise
    except (UserError, OSError):
        for name, text in earlier.items():
            with contextlib.suppress(OSError):
                if text is None:
                    (folder.path / name).unlink(missing_ok=True)
                else:
                    write_atomically(folder.path / name, text)
        with contextlib.suppress(OSError):
            if folder.history.exists():
                folder.record("not-submitted", submission=intent.submission)
        raise


def allow_open_files(locks: int) -> None:
    """Every lock is an open file: a large sweep needs more of them than many a shell allows by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = locks + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def locked_folder(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock. A folder that was made for it, and has become no run, is removed again.

    An OSError of what is done under it is one of this folder's disk, and raised as a UserError that says so.
    """
    is_new, made_runs = not folder.path.exists(), not folder.path.parent.exists()
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        here = is_running(folder)
        with lock(folder, patience=0.0 if here else LOCK_SECONDS) as is_held:
            if not is_held:
                here = here or is_running(folder)
                raise UserError(
                    f"the run {folder.name} is {'already running on this machine' if here else 'being submitted'}",
                    evidence=f"{folder.path / LOCK_FILE} is locked",
                    fix=f"windlass stop {folder.name}" if here else f"windlass logs {folder.name} --follow",
                )
            try:
                yield
            finally:
                if is_new and not folder.run_file.exists():
                    shutil.rmtree(folder.path, ignore_errors=True)
                    if made_runs:
                        with contextlib.suppress(OSError):  # another run is in it by now
                            folder.path.parent.rmdir()
    except OSError as error:
        raise UserError(f"the run folder {folder.path} cannot be written", evidence=str(error)) from None


def content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
