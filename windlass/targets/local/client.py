"""Local runs: submit, status, logs, stop, list."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from windlass.catalog.gpus import Gpu, gpu_of_device
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root, write_atomically
from windlass.spec import Run
from windlass.targets.local import checks, processes, render
from windlass.targets.local.machine import Machine, this_machine
from windlass.targets.local.render import LocalRequest
from windlass.targets.local.state import is_running, status_of, supervisor_of
from windlass.targets.local.supervisor import LAUNCHER_LOG, REQUEST_FILE, STOP_NOW
from windlass.targets.local.tail import Tail
from windlass.targets.protocol import JobRef, JobStatus, LogLine

LOCK_FILE = ".lock"
SUPERVISOR_LOG = "supervisor.log"
POLL_SECONDS = 0.2
KILL_SECONDS = 30.0  # for the kernel to end killed processes


@dataclass
class LocalTarget:
    """This machine."""

    machine: Machine = field(default_factory=this_machine)

    def settle(self, run: Run) -> Run:
        return render.settle(run, self.machine)

    def world_size(self, run: Run) -> int:
        return (run.resources.processes_per_node or 1) * run.resources.nodes

    def gpu(self, run: Run) -> Gpu | None:
        """The GPU of a settled run's ranks; None on CPUs, and where the catalogue does not know it."""
        if not run.resources.gpus_per_node or not self.machine.gpus:
            return None
        return gpu_of_device(self.machine.gpus[0].name)

    def check(self, run: Run, *, bytes_needed: int | None) -> list[str]:
        return checks.check(run, self.machine, RunFolder.of(run).path, bytes_needed=bytes_needed)

    def render(self, run: Run, *, faults: str | None = None) -> LocalRequest:
        return render.render(run, python=sys.executable, runs=runs_root(), working_directory=Path.cwd(), faults=faults)

    def submit(self, run: Run, request: LocalRequest) -> JobRef:
        """Create the run folder and start its supervisor; returns when the supervisor holds the run."""
        folder = RunFolder(request.working_directory / request.folder)
        folder.logs.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            folder.create(run)
            write_atomically(folder.path / REQUEST_FILE, json.dumps(request.as_dict(), indent=2) + "\n")
            _start_supervisor(folder, lock)
        finally:
            os.close(lock)
        return JobRef("local", run.name, folder)

    def status(self, job: JobRef) -> JobStatus:
        return status_of(job.folder)

    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of one rank, or of all ranks; with `follow` until the run has ended."""
        tails: dict[int | None, Tail] = {}
        while True:
            ended = not follow or self.status(job).ended
            _find_logs(job.folder, rank, tails)
            for number in sorted(tails, key=lambda one: -1 if one is None else one):
                for text in tails[number].lines(rest=ended):
                    yield LogLine(number, text)
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus:
        """Stop a run and wait until it has stopped; with `save_first` it gets its grace period for a checkpoint."""
        supervisor = supervisor_of(job.folder)
        if supervisor is None or not supervisor.alive:
            self._end_abandoned(job)
            return self.status(job)
        processes.send(supervisor.pid, signal.SIGTERM if save_first else STOP_NOW)
        grace = job.folder.load_run().checkpoint.grace_seconds if save_first else 0
        deadline = time.monotonic() + grace + KILL_SECONDS
        while supervisor.alive:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run {job.name} has not stopped",
                    evidence=f"its supervisor, process {supervisor.pid}, is alive {grace + KILL_SECONDS:.0f} s later",
                    fix=f"windlass stop {job.name} --now",
                    exit_code=ExitCode.FAILED,
                )
            time.sleep(POLL_SECONDS)
        return self.status(job)

    def list(self) -> list[JobRef]:
        found = sorted(runs_root().glob("*/run.yaml"))
        return [JobRef("local", path.parent.name, RunFolder(path.parent)) for path in found]

    def _end_abandoned(self, job: JobRef) -> None:
        """Ranks whose supervisor was killed end by themselves; whoever says stop does not want to wait for that."""
        if processes.processes_of(job.folder.path):
            killed = processes.end_leftovers(job.folder.path, patience=0.0)
            job.folder.record("leftovers-killed", pids=killed)


def _lock(folder: RunFolder) -> int:
    """The folder's lock, held by whoever may start ranks in it: first the client, then the supervisor it starts."""
    handle = os.open(folder.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise already_running(folder) from None
    return handle


def already_running(folder: RunFolder) -> UserError:
    supervisor = supervisor_of(folder)
    who = f"process {supervisor.pid} on {supervisor.host} holds {folder.path}" if supervisor else str(folder.path)
    return UserError(
        f"the run {folder.name} is already running",
        evidence=who,
        fix=f"windlass logs {folder.name} --follow",
    )


def _start_supervisor(folder: RunFolder, lock: int) -> None:
    reader, writer = os.pipe()
    with (folder.logs / SUPERVISOR_LOG).open("ab") as output, os.fdopen(reader, "rb") as answer:
        path = os.path.abspath(folder.path)
        # what every process of the run is marked with must not be inherited from a run that starts this one
        environment = {name: value for name, value in os.environ.items() if name != render.FOLDER_VARIABLE}
        subprocess.Popen(
            [sys.executable, "-m", "windlass.targets.local.supervisor", path, str(lock), str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # it outlives this terminal
            pass_fds=(lock, writer),
        )
        os.close(writer)
        if answer.read() != b"ready\n":
            log = (folder.logs / SUPERVISOR_LOG).read_text(errors="replace").strip().splitlines()
            raise UserError(
                f"the supervisor of {folder.name} did not start",
                evidence=log[-1] if log else None,
                cause=f"see {folder.logs / SUPERVISOR_LOG}",
                exit_code=ExitCode.FAILED,
            )


def _find_logs(folder: RunFolder, rank: int | None, tails: dict[int | None, Tail]) -> None:
    """Add the logs that have come to exist since the last look."""
    if rank is not None:
        tails.setdefault(rank, Tail(folder.rank_log(rank)))
        return
    for path in folder.logs.glob("rank-*.log"):
        with contextlib.suppress(ValueError):
            tails.setdefault(int(path.stem.removeprefix("rank-")), Tail(path))
    if not tails and (folder.logs / LAUNCHER_LOG).exists() and not is_running(folder):
        tails.setdefault(None, Tail(folder.logs / LAUNCHER_LOG))  # no rank got as far as to say something
