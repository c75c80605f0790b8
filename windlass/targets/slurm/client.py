"""Slurm runs: submit, status, logs, stop, list."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root, write_atomically
from windlass.spec import Run
from windlass.targets.local.client import LOCK_FILE
from windlass.targets.local.state import is_running, told_end
from windlass.targets.local.tail import Tail
from windlass.targets.protocol import JobRef, JobStatus, LogLine
from windlass.targets.slurm import checks, queue, render, state
from windlass.targets.slurm.commands import Commands
from windlass.targets.slurm.render import Place, SlurmRequest

SCRIPT_FILE = "job.sbatch"
ASK_SECONDS = 2.0  # between two questions about one job: a controller serves many users
POLL_SECONDS = 0.2
END_SECONDS = 90.0  # for Slurm to end a job it was told to


@dataclass
class SlurmTarget:
    """A Slurm cluster."""

    _asked: dict[state.SubmittedJob, tuple[float, queue.QueuedJob | None]] = field(default_factory=dict)
    _partitions: dict[str | None, dict[str, queue.Partition]] = field(default_factory=dict)

    def offline(self) -> SlurmTarget:
        from windlass.targets.slurm.offline import OfflineSlurm  # which is one of these

        return OfflineSlurm()

    def settle(self, run: Run) -> Run:
        """One rank per GPU of a node; without GPUs, CPU processes that share the node's cores."""
        asked = run.resources
        num_gpus, threads = asked.gpus_per_node, asked.threads_per_process
        if num_gpus is None or threads is None:
            there = checks.partition_of(run, self._partitions_of(run))
            if num_gpus is None:
                by_name = run.target.slurm.gres
                num_gpus = queue.parse_gpus(by_name) if by_name else there.gpus_per_node
            num_ranks = num_gpus or asked.processes_per_node or 1
            threads = threads or max(1, there.cpus_per_node // num_ranks)
        num_ranks = num_gpus or asked.processes_per_node or 1
        update = {"gpus_per_node": num_gpus, "processes_per_node": num_ranks, "threads_per_process": threads}
        return run.model_copy(update={"resources": asked.model_copy(update=update)})

    def world_size(self, run: Run) -> int:
        return (run.resources.processes_per_node or 1) * run.resources.nodes

    def check(self, run: Run, *, bytes_needed: int | None) -> list[str]:
        if not run.target.host:
            Commands().must("sbatch", "--version")
        return checks.check(run, RunFolder.of(run), self._partitions_of(run), bytes_needed=bytes_needed)

    def render(self, run: Run, *, faults: str | None = None) -> SlurmRequest:
        return render.render(run, place_of(run), faults=faults)

    def render_sweep(
        self, name: str, runs: Sequence[Run], indices: Sequence[int], *, faults: str | None = None
    ) -> SlurmRequest:
        return render.render_sweep(name, runs, indices, place_of(runs[0]), faults=faults)

    def submit(self, run: Run, request: SlurmRequest) -> JobRef:
        return self.submit_all([run], request)[0]

    def submit_all(self, runs: Sequence[Run], request: SlurmRequest) -> list[JobRef]:
        """Create the run folders and hand the script to sbatch; if it refuses, nothing is left behind."""
        folders = [RunFolder(path) for path in request.folders]
        jobs = [JobRef("slurm", run.name, folder) for run, folder in zip(runs, folders, strict=True)]
        with contextlib.ExitStack() as undo:
            for run, folder in zip(runs, folders, strict=True):
                undo.enter_context(_prepared(folder, run, request.script))
            # under the lock: somebody else may have submitted the same run a moment ago
            if request.indices is None and not self._ended_or_new(jobs[0]):
                return jobs
            number = self._sbatch(request)
            for position, folder in enumerate(folders):
                mine = f"{number}_{request.indices[position]}" if request.indices is not None else number
                job = state.SubmittedJob(mine, request.host)
                write_atomically(folder.path / state.JOB_FILE, json.dumps(job.as_dict()) + "\n")
                folder.record("submitted", job=mine, host=request.host)
        return jobs

    def status(self, job: JobRef) -> JobStatus:
        submitted = state.SubmittedJob.of(job.folder)
        if submitted is None:
            return JobStatus("waiting", reason="not submitted")
        told = told_end(job.folder)
        if told is not None:
            return told
        status = state.status_of(job.folder, submitted, self._ask(submitted))
        # it may have written down its end while Slurm was being asked
        return (told_end(job.folder) or status) if status.ended else status

    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of one rank, or of all ranks; the launcher's where no rank has said anything."""
        tails: dict[int | None, list[Tail]] = {}
        while True:
            ended = not follow or self.status(job).ended
            _find_logs(job.folder, rank, tails, ended=ended)
            for number in sorted(tails, key=lambda one: -1 if one is None else one):
                for tail in tails[number]:
                    for text in tail.lines(rest=ended):
                        yield LogLine(number, text)
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus:
        """Stop a run and wait until it has stopped; with `save_first` the ranks get their grace period."""
        before = self.status(job)
        submitted = state.SubmittedJob.of(job.folder)
        if before.ended or submitted is None:
            return before
        commands = Commands(submitted.host)
        job.folder.record("stop-requested", save_first=save_first)
        if before.state == "running":  # its steps alone: the script lives on to write down how it ended
            self._scancel(commands, submitted, "--signal=TERM" if save_first else "--signal=KILL")
        else:
            self._scancel(commands, submitted)
        grace = job.folder.load_run().checkpoint.grace_seconds if save_first else END_SECONDS / 3
        overdue, deadline = time.monotonic() + grace, time.monotonic() + grace + END_SECONDS
        told_again = before.state != "running"
        while not (now := self.status(job)).ended:
            if time.monotonic() > overdue and not told_again:
                told_again = True
                self._scancel(commands, submitted)
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run {job.name} has not stopped",
                    evidence=f"job {submitted.number} is still there: {now.reason or now.state}",
                    fix=f"scancel {submitted.number}",
                    exit_code=ExitCode.FAILED,
                )
            time.sleep(POLL_SECONDS)
        if told_end(job.folder) is None:
            job.folder.record("exit", state=now.state, code=now.exit_code, reason=now.reason)
        return now

    def list(self) -> list[JobRef]:
        found = sorted(runs_root().glob(f"*/{state.JOB_FILE}"))
        return [JobRef("slurm", path.parent.name, RunFolder(path.parent)) for path in found]

    def _ask(self, job: state.SubmittedJob) -> queue.QueuedJob | None:
        when, answer = self._asked.get(job, (float("-inf"), None))
        if time.monotonic() - when >= ASK_SECONDS:
            answer = queue.job(Commands(job.host), job.number)
            self._asked[job] = (time.monotonic(), answer)
        return answer

    def _partitions_of(self, run: Run) -> dict[str, queue.Partition]:
        host = run.target.host
        if host not in self._partitions:
            self._partitions[host] = queue.partitions(Commands(host))
        return self._partitions[host]

    def _ended_or_new(self, job: JobRef) -> bool:
        return state.SubmittedJob.of(job.folder) is None or self.status(job).ended

    def _sbatch(self, request: SlurmRequest) -> str:
        answer = Commands(request.host).call(*request.argv, text=request.script)
        if answer.code != 0:
            raise UserError(
                "Slurm did not take the job",
                evidence=answer.complaint,
                fix="--dry-run    shows what it was asked",
            )
        return answer.out.strip().splitlines()[-1].split(";")[0]

    def _scancel(self, commands: Commands, job: state.SubmittedJob, *options: str) -> None:
        answer = commands.call("scancel", *options, job.number)
        self._asked.pop(job, None)
        ended_meanwhile = queue.NO_SUCH_JOB in answer.err or "already completing" in answer.err
        if answer.code != 0 and not ended_meanwhile:
            raise UserError(f"job {job.number} could not be stopped", evidence=answer.complaint)


def place_of(run: Run) -> Place:
    asked = run.target.slurm
    if asked.environment:
        python = f"{asked.environment.rstrip('/')}/bin/python"
    else:
        python = "python3" if asked.container else sys.executable
    return Place(runs=Path(os.path.abspath(runs_root())), working_directory=Path.cwd(), python=python)


@contextlib.contextmanager
def _prepared(folder: RunFolder, run: Run, script: str) -> Iterator[None]:
    """The run folder with the run and its script in it, locked; as it was before if the body raises."""
    is_new, made_runs = not folder.path.exists(), not folder.path.parent.exists()
    earlier = {name: _content(folder.path / name) for name in ("run.yaml", SCRIPT_FILE)}
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            try:
                folder.create(run)
                write_atomically(folder.path / SCRIPT_FILE, script)
                yield
            except BaseException:
                for name, text in earlier.items():
                    _restore(folder.path / name, text)
                raise
    except BaseException as error:
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
            if made_runs:
                with contextlib.suppress(OSError):  # another run is in it by now
                    folder.path.parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"the run folder {folder.path} cannot be written", evidence=str(error)) from None
        raise


@contextlib.contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    handle = os.open(folder.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            here = is_running(folder)
            raise UserError(
                f"the run {folder.name} is {'already running on this machine' if here else 'being submitted'}",
                evidence=f"{folder.path / LOCK_FILE} is locked",
                fix=f"windlass stop {folder.name}" if here else f"windlass logs {folder.name} --follow",
            ) from None
        yield
    finally:
        os.close(handle)


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _restore(path: Path, text: str | None) -> None:
    with contextlib.suppress(OSError):
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, text)


def _find_logs(folder: RunFolder, rank: int | None, tails: dict[int | None, list[Tail]], *, ended: bool) -> None:
    """Add the logs that have come to exist since the last look."""
    if rank is not None:
        tails.setdefault(rank, [Tail(folder.rank_log(rank))])
        return
    for path in folder.logs.glob("rank-*.log"):
        with contextlib.suppress(ValueError):
            tails.setdefault(int(path.stem.removeprefix("rank-")), [Tail(path)])
    if not tails and ended:  # no rank got as far as to say something
        others = [*sorted(folder.logs.glob("slurm-*.out")), *sorted(folder.logs.glob("launcher-*.log"))]
        tails[None] = [Tail(path) for path in others]
