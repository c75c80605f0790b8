"""Local runs: submit, status, logs, stop, list."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from windlass.catalog.gpus import Gpu, gpu_of_device
from windlass.common.files import parse_record, real, write_atomically
from windlass.common.locks import FileLock
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import Run
from windlass.targets.launch import processes
from windlass.targets.launch.decision import Done, stopped_by_owner
from windlass.targets.launch.logs import follow_logs
from windlass.targets.launch.machine import Machine, this_host, this_machine
from windlass.targets.launch.progress import since_launch
from windlass.targets.launch.supervision import LOCK_FILE, is_running, is_starting, supervisor_of
from windlass.targets.launch.torchrun import FOLDER_VARIABLE, Place
from windlass.targets.local import checks, render
from windlass.targets.local.render import LocalRequest
from windlass.targets.local.state import status_of
from windlass.targets.local.supervisor import LAUNCHER_LOG, REQUEST_FILE, STOP_FILE, STOP_NOW
from windlass.targets.protocol import LOOP_VARIABLE, Detached, JobRef, JobStatus, LogLine

SUPERVISOR_LOG, LOOP_LOG = "supervisor.log", "loop.log"
POLL_SECONDS = 0.2
LOCK_SECONDS = 1.0  # somebody who asks whether a run is being started holds the lock for an instant
SCAN_SECONDS = 1.0  # for which a look at all processes of this machine holds
KILL_SECONDS = 30.0  # for the kernel to end killed processes


@dataclass
class LocalTarget:
    """This machine."""

    loop_notifies: ClassVar[bool] = False
    given_machine: Machine | None = None
    _scan: tuple[float, dict[str, list[int]]] = field(default=(float("-inf"), {}), repr=False)

    @cached_property
    def machine(self) -> Machine:
        return self.given_machine or this_machine()

    def settle(self, run: Run) -> Run:
        return render.settle(run, self.machine, os.environ)

    def gpu(self, run: Run) -> Gpu | None:
        """The GPU of a settled run's ranks; None on CPUs, and where the catalogue does not know it."""
        if not run.resources.gpus_per_node or not self.machine.gpus:
            return None
        return gpu_of_device(self.machine.gpus[0].name)

    def host_memory(self, run: Run) -> int | None:
        return self.machine.memory_bytes

    def check_run(self, run: Run) -> None:
        checks.one_node(run)
        checks.gpus_are_there(run, self.machine)

    def gather(self, run: Run) -> Place:
        return Place(runs=runs_root(), working_directory=Path.cwd(), python=sys.executable)

    def render(self, run: Run, gathered: Place, *, faults: str | None = None) -> LocalRequest:
        return render.render(run, gathered, faults=faults)

    def check(self, run: Run, request: LocalRequest, *, bytes_needed: int | None) -> list[str]:
        return checks.check(run, self.machine, request.folder, bytes_needed=bytes_needed)

    def submit(self, run: Run, request: LocalRequest) -> JobRef:
        """Create the run folder and start its supervisor; returns when the supervisor holds the run."""
        folder = RunFolder(request.working_directory / request.folder)
        folder.logs.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            supervisor = supervisor_of(folder)
            if supervisor is not None and supervisor.works_elsewhere and not status_of(folder).ended:
                raise already_running(folder)  # not every file system has locks that other machines see
            (folder.path / STOP_FILE).unlink(missing_ok=True)  # it was asked of an earlier start
            start_supervisor(folder, run, request, lock)
        finally:
            os.close(lock)
        return JobRef("local", run.name, folder)

    def attach(self, run: Run, request: LocalRequest) -> JobRef:
        """The run under way; ranks that nobody watches any more are let save, and the run goes on from there."""
        folder = RunFolder(request.working_directory / request.folder)
        supervisor = supervisor_of(folder)
        if is_starting(folder) or (supervisor is not None and (supervisor.alive or supervisor.works_elsewhere)):
            return JobRef("local", run.name, folder)
        return self.submit(run, request)

    def status(self, job: JobRef) -> JobStatus:
        status = status_of(job.folder, self._processes_of)
        if status.state == "failed" and self.has_loop(job):  # which has yet to answer it
            return replace(status, state="waiting", reason=f"{status.reason}; its retry loop decides", exit_code=None)
        return status

    def _processes_of(self, folder: RunFolder) -> Sequence[int]:
        """As processes.processes_of, with one look at /proc for many folders."""
        when, by_folder = self._scan
        if time.monotonic() - when > SCAN_SECONDS:
            by_folder = processes.processes_by_folder()
            self._scan = (time.monotonic(), by_folder)
        return by_folder.get(os.path.realpath(folder.path), [])

    def logs(self, job: JobRef, *, rank: int | None, follow: bool) -> Iterator[LogLine]:
        """Lines of one rank, or of all ranks, their launcher and their supervisor; with `follow` until the end."""
        return follow_logs(
            job.folder,
            rank,
            lambda: not follow or self.status(job).ended,
            launchers={LAUNCHER_LOG: "launcher", SUPERVISOR_LOG: "supervisor"},
            only_without_ranks=False,
        )

    def stop(self, job: JobRef, *, save_first: bool) -> JobStatus:
        """Stop a run and wait until it has stopped; with `save_first` it gets its grace period for a checkpoint.

        The request is left in the folder, for a supervisor that is only starting or is on another machine; one that
        lives here gets a signal as well.
        """
        folder = job.folder
        deadline = time.monotonic() + KILL_SECONDS
        while loops := self._loops_of(job):  # first: it would answer the end by another start
            for pid in loops:
                processes.send(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if not is_starting(folder) and not is_running(folder):
            return self.status(job)
        grace = _grace_seconds(folder) if save_first else 0
        deadline = time.monotonic() + grace + KILL_SECONDS
        signalled = None
        while True:
            supervisor = supervisor_of(folder)
            if supervisor is not None and supervisor.alive:
                _request_stop(folder, save_first=save_first)
                if signalled != supervisor.pid:
                    signalled = supervisor.pid
                    with contextlib.suppress(PermissionError):  # it reads the request
                        processes.send(supervisor.pid, signal.SIGTERM if save_first else STOP_NOW)
            elif is_starting(folder) or (supervisor and supervisor.works_elsewhere and not self.status(job).ended):
                _request_stop(folder, save_first=save_first)
            else:
                self._end_abandoned(folder, save_first=save_first, grace=grace)
                return self.status(job)
            if time.monotonic() > deadline:
                who = f"process {supervisor.pid} on {supervisor.host}" if supervisor else "whoever is starting it"
                raise UserError(
                    f"the run {job.name} has not stopped",
                    evidence=f"its supervisor, {who}, is there {grace + KILL_SECONDS:.0f} s later",
                    fix=f"windlass stop {job.name} --now",
                    exit_code=ExitCode.FAILED,
                )
            time.sleep(POLL_SECONDS)

    def render_loop(self, run: Run, gathered: Place, detached: Detached) -> list[str] | None:
        """A process that edits the run where its GPUs are too full; the supervisor does everything else."""
        if not run.resources.gpus_per_node and "oom" not in (detached.faults or ""):
            return None
        return [gathered.python, "-m", "windlass.cli.main", *detached.arguments]

    def check_loop(self, run: Run, command: Sequence[str]) -> list[str]:
        return []

    def start_loop(self, job: JobRef, command: Sequence[str]) -> None:
        if self.has_loop(job):
            return
        with (job.folder.logs / LOOP_LOG).open("ab") as output:
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {LOOP_VARIABLE: os.path.realpath(job.folder.path)},
                start_new_session=True,  # it outlives this terminal
            )

    def has_loop(self, job: JobRef) -> bool:
        return bool(self._loops_of(job))

    def _loops_of(self, job: JobRef) -> Sequence[int]:
        mark = os.path.realpath(job.folder.path)
        if not (job.folder.logs / LOOP_LOG).exists() or os.environ.get(LOOP_VARIABLE) == mark:
            return []
        return [pid for pid in processes.all_pids() if processes.environment(pid).get(LOOP_VARIABLE) == mark]

    def list(self) -> list[JobRef]:
        run_files = sorted(runs_root().glob("*/run.yaml"))
        return [JobRef("local", path.parent.name, RunFolder(path.parent)) for path in run_files]

    def _end_abandoned(self, folder: RunFolder, *, save_first: bool, grace: float) -> None:
        """End ranks whose supervisor was killed, and write down how they ended, which nobody else would."""
        if not processes.processes_of(folder.path):
            return
        try:
            killed = processes.end_leftovers(folder.path, patience=grace, save_first=save_first)
        except PermissionError:
            raise _belongs_to_another(folder) from None
        self._scan = (float("-inf"), {})
        if killed:
            folder.record("leftovers-killed", pids=killed)
        recent = since_launch(folder)
        saved = [record for record in recent if record.get("event") == "preempted"]
        done = Done("stopped", ExitCode.INTERRUPTED, "stopped without a new checkpoint")
        if saved:
            done = stopped_by_owner(saved[-1].get("step"))
        if not any(record.get("event") == "finished" for record in recent):
            folder.record("exit", state=done.state, code=int(done.code), reason=done.reason)


def _grace_seconds(folder: RunFolder) -> float:
    """Of the request that is being carried out; the run file may be damaged, or changed since."""
    request = None
    with contextlib.suppress(OSError):
        request = parse_record((folder.path / REQUEST_FILE).read_bytes())
    seconds = real(request.get("grace_seconds")) if request else None
    return seconds if seconds is not None else float(folder.load_run().checkpoint.grace_seconds)


def _request_stop(folder: RunFolder, *, save_first: bool) -> None:
    """Leave a stop request for the supervisor; a stronger one replaces a weaker one."""
    path = folder.path / STOP_FILE
    with contextlib.suppress(OSError):
        earlier = parse_record(path.read_bytes())
        if earlier is not None and (save_first or earlier.get("save_first") is False):
            return
    by = getpass.getuser() if "USER" in os.environ or "LOGNAME" in os.environ else str(os.getuid())
    request = {"save_first": save_first, "by": f"{by} on {this_host().host}", "time": time.time()}
    try:
        write_atomically(path, json.dumps(request) + "\n")
    except PermissionError:
        raise _belongs_to_another(folder) from None


def _belongs_to_another(folder: RunFolder) -> UserError:
    owner = folder.path.stat().st_uid
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(owner).pw_name  # type: ignore[assignment]
    return UserError(
        f"the run {folder.name} belongs to {owner}, and you may not stop it",
        evidence=f"{folder.path} cannot be written by you",
        fix=f"sudo -u {owner} windlass stop {folder.name}",
        exit_code=ExitCode.FAILED,
    )


def _lock(folder: RunFolder) -> int:
    """The folder's lock, held by whoever may start ranks in it: first the client, then the supervisor it starts."""
    supervisor = supervisor_of(folder)
    patience = 0.0 if supervisor is not None and supervisor.alive else LOCK_SECONDS
    lock = FileLock(folder.path / LOCK_FILE)
    try:
        if not lock.acquire(patience_s=patience):
            raise already_running(folder)
        return lock.detach()
    finally:
        lock.close()


def already_running(folder: RunFolder) -> UserError:
    supervisor = supervisor_of(folder)
    who = str(folder.path)
    if supervisor and not supervisor.is_copy and (supervisor.alive or supervisor.works_elsewhere):
        who = f"process {supervisor.pid} on {supervisor.host} holds {folder.path}"
    elif ranks := processes.processes_of(folder.path):
        who = f"process {', '.join(map(str, ranks))}, which nobody watches, trains in {folder.path}"
    return UserError(
        f"the run {folder.name} is already running",
        error_code="under-way",
        evidence=who,
        fix=f"windlass logs {folder.name} --follow",
    )


def start_supervisor(folder: RunFolder, run: Run, request: LocalRequest, lock: int) -> None:
    """Write down what is to be done and start the supervisor, which inherits the lock."""
    folder.create(run)
    write_atomically(folder.path / REQUEST_FILE, json.dumps(request.as_dict(), indent=2) + "\n")
    reader, writer = os.pipe()
    with (folder.logs / SUPERVISOR_LOG).open("ab") as output, os.fdopen(reader, "rb") as answer:
        path = os.path.realpath(folder.path)
        # what every process of the run is marked with must not be inherited from a run that starts this one
        marks = (FOLDER_VARIABLE, LOOP_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name not in marks}
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
