"""Where a local run stands: what its folder records, and whether the processes that it names live.

The folder may be a copy, lie on another machine's disk, or hold anything at all: nothing in it is taken on trust.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.errors import ExitCode
from windlass.runfolder import RunFolder, real, whole, words
from windlass.targets.launch import processes
from windlass.targets.launch.machine import HostIdentity, free_bytes, this_host
from windlass.targets.launch.tail import newest_steps, records_since
from windlass.targets.protocol import ENDED, JobStatus, State

LOCK_FILE = ".lock"
SUPERVISOR_FILE = "supervisor.json"
STOP_FILE = "stop.json"
BEAT_SECONDS = 20.0  # between two signs of life of a supervisor, for other machines that see its folder
SILENCE_SECONDS = 120.0
PACE_STEPS = 20
FULL_DISK_BYTES = 64 * 1024

ABANDONED = "its supervisor was killed and nobody watches its ranks; `windlass run` or `windlass stop` lets them save"
STARTED = ("started", "resumed")

Record = Mapping[str, Any]
FolderProcesses = Callable[[RunFolder], Sequence[int]]


@dataclass(frozen=True)
class SupervisorProcess:
    """The process that supervisor.json names."""

    pid: int
    start_time: int | None
    identity: HostIdentity
    is_copy: bool = False  # the file was copied from another run folder: the process is not this one's
    beat: float = 0.0  # when it last gave a sign of life

    @property
    def host(self) -> str:
        return self.identity.host

    @property
    def alive(self) -> bool:
        """A process with the same pid that began at another moment is another process."""
        return (
            not self.is_copy
            and self.start_time is not None
            and processes.start_time(self.pid) == self.start_time
            and this_host().sees_processes_of(self.identity)
        )

    @property
    def is_elsewhere(self) -> bool:
        """On a machine, or in a container, whose processes cannot be seen from here."""
        here = this_host()
        return not self.is_copy and not here.sees_processes_of(self.identity) and not self.ended_with_its_machine

    @property
    def ended_with_its_machine(self) -> bool:
        return this_host().was_restarted_since(self.identity)

    @property
    def silence(self) -> float:
        return time.time() - self.beat

    @property
    def works_elsewhere(self) -> bool:
        return self.is_elsewhere and self.silence < SILENCE_SECONDS


def supervisor_record(folder: Path) -> dict[str, Any]:
    """What a supervisor, the process that calls this, writes to supervisor.json."""
    return {
        "pid": os.getpid(),
        "start_time": processes.start_time(os.getpid()),
        **this_host().as_dict(),
        "folder": os.path.realpath(folder),
        "inode": folder.stat().st_ino,
        "time": round(time.time(), 3),
    }


def supervisor_of(folder: RunFolder) -> SupervisorProcess | None:
    path = folder.path / SUPERVISOR_FILE
    try:
        value = json.loads(path.read_bytes())
        beat = path.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    pid = whole(value.get("pid")) if isinstance(value, dict) else None
    if pid is None or pid <= 0:
        return None
    identity = HostIdentity(
        words(value.get("host")) or "an unknown host",
        words(value.get("machine")),
        words(value.get("boot")),
        words(value.get("pids")),
    )
    return SupervisorProcess(pid, whole(value.get("start_time")), identity, _is_copy(folder, value), beat)


def _is_copy(folder: RunFolder, value: Record) -> bool:
    """A copy differs in both; the same folder may be mounted elsewhere, or lie where inodes are not kept."""
    if not value.get("folder"):
        return False  # written before folders were recorded
    inode = None
    with contextlib.suppress(OSError):
        inode = folder.path.stat().st_ino
    return value["folder"] != os.path.realpath(folder.path) and value.get("inode") != inode


def is_starting(folder: RunFolder) -> bool:
    """Whether somebody holds the folder's lock: a client that starts a supervisor, or the supervisor."""
    try:
        handle = os.open(folder.path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def is_running(folder: RunFolder) -> bool:
    """Whether a supervisor or ranks of this run work, on this machine or on another one that shares its folder."""
    supervisor = supervisor_of(folder)
    if supervisor is not None and (supervisor.alive or (supervisor.works_elsewhere and not _has_ended(folder))):
        return True
    return bool(processes.processes_of(folder.path))


def _has_ended(folder: RunFolder) -> bool:
    return _recorded_end(_since_launch(folder)) is not None


def _since_launch(folder: RunFolder) -> list[dict[str, Any]]:
    return records_since(folder.history, lambda one: one.get("event") == "launched")


def status_of(folder: RunFolder, processes_of: FolderProcesses | None = None) -> JobStatus:
    """The status of a run; `processes_of` finds the living processes of a folder, where many are asked about."""
    if not folder.run_file.exists():
        return JobStatus("failed", reason="its run folder was deleted", exit_code=int(ExitCode.FAILED))
    recent = _since_launch(folder)
    attempt = max((whole(one.get("attempt")) or 0 for one in recent), default=0) or None
    find = processes_of or (lambda one: processes.processes_of(one.path))
    status = JobStatus(**_state(folder, supervisor_of(folder), recent, find), attempt=attempt)
    return _with_silence(with_progress(status, folder), folder)


def _state(
    folder: RunFolder, supervisor: SupervisorProcess | None, recent: Sequence[Record], find: FolderProcesses
) -> dict[str, Any]:
    """Living processes first, then what was written down, then what can be concluded."""
    training = any(one.get("event") in STARTED for one in recent)
    end = _recorded_end(recent)
    if supervisor is not None and supervisor.alive:
        return _under_way("running" if training else "waiting", None if training else "ranks are starting")
    starting = is_starting(folder)
    if end is not None and not starting:
        return end
    if supervisor is not None and supervisor.works_elsewhere and end is None:
        return _under_way("running" if training else "waiting", f"on {supervisor.host}")
    if starting:
        return _under_way("running" if training and end is None else "waiting", "it is being started")
    if supervisor is None:
        return _state_without_supervisor(folder, recent)
    if supervisor.is_copy:
        reason = "a copy of a run that was under way; `windlass run` goes on from the last checkpoint in it"
        return {"state": "stopped", "exit_code": int(ExitCode.INTERRUPTED), "reason": reason}
    if find(folder):
        return _under_way("running", ABANDONED)
    if _trained_to_the_end(folder, recent):
        return {"state": "finished", "exit_code": int(ExitCode.OK), "reason": "its supervisor was killed after the end"}
    why = "its supervisor was killed"
    if supervisor.ended_with_its_machine:
        why = "the machine was restarted while it trained"
    elif supervisor.is_elsewhere:
        why = f"its supervisor on {supervisor.host} has been silent for {supervisor.silence / 60:.0f} min"
    reason = f"{why}; `windlass run` goes on from the last checkpoint"
    return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": reason}


def _under_way(state: State, reason: str | None) -> dict[str, Any]:
    return {"state": state, "reason": reason}


def _recorded_end(recent: Sequence[Record]) -> dict[str, Any] | None:
    """The last `exit` since the ranks were launched, whatever was recorded after it: an export, a pruning."""
    for one in reversed(recent):
        if one.get("event") == "exit":
            return _end(one)
        if one.get("event") in ("launched", "restart"):
            return None
    return None


def _end(record: Record) -> dict[str, Any]:
    state = words(record.get("state"))
    code = whole(record.get("code"))
    return {
        "state": state if state in ENDED else "failed",
        "exit_code": int(ExitCode.FAILED) if code is None else code,
        "reason": words(record.get("reason")),
    }


def _trained_to_the_end(folder: RunFolder, recent: Sequence[Record]) -> bool:
    happened = {one.get("event") for one in recent}
    if "finished" not in happened:
        return False
    with contextlib.suppress(Exception):  # a damaged run file: whether an export was wanted is not known
        return "exported" in happened or not folder.load_run().checkpoint.export
    return True


def _state_without_supervisor(folder: RunFolder, recent: Sequence[Record]) -> dict[str, Any]:
    """A run that was started by torchrun itself: only its own records can be asked."""
    begun = next((index for index in reversed(range(len(recent))) if recent[index].get("event") in STARTED), None)
    for one in recent[(begun or 0) :]:
        if one.get("event") == "finished":
            return {"state": "finished", "exit_code": int(ExitCode.OK)}
        if one.get("event") == "preempted":
            return {"state": "preempted", "exit_code": int(ExitCode.PREEMPTED)}
    if begun is None:
        exported = any(one.get("event") == "exported" for one in recent)
        if exported:
            return {"state": "finished", "exit_code": int(ExitCode.OK)}
        return {"state": "waiting", "reason": "not started"}
    written = folder.metrics.stat().st_mtime if folder.metrics.exists() else real(recent[begun].get("time")) or 0.0
    silent = time.time() - written
    if silent < SILENCE_SECONDS:
        return {"state": "running", "reason": "started without `windlass run`"}
    return {"state": "stopped", "reason": f"started without `windlass run`; silent for {silent / 60:.0f} min"}


STOPS = ("stop-requested", "stop-refused")


def told_end(folder: RunFolder) -> JobStatus | None:
    """The end that a job on a cluster wrote down; None if it has not, or was submitted again since."""
    recent = records_since(folder.history, lambda one: one.get("event") in ("submitted", "launched", "restart"))
    for index in reversed(range(len(recent))):
        one = recent[index]
        if one.get("event") == "exit":
            attempt = max((whole(record.get("attempt")) or 0 for record in recent), default=0)
            stops = [record["event"] for record in recent[:index] if record.get("event") in STOPS]
            asked = stops[-1:] == ["stop-requested"]  # and the scheduler did not refuse to pass it on
            return with_progress(JobStatus(**_named_after_who_asked(_end(one), asked), attempt=attempt), folder)
        if one.get("event") in ("submitted", "launched", "restart"):
            return None
    return None


def _named_after_who_asked(end: dict[str, Any], asked: bool) -> dict[str, Any]:
    """Saved and left: because its owner said stop, or because a machine was taken away."""
    if end["state"] == "preempted" and asked:
        return {**end, "state": "stopped", "reason": "stopped by `windlass stop`; saved first"}
    return end


def with_progress(status: JobStatus, folder: RunFolder) -> JobStatus:
    steps = newest_steps(folder.metrics, PACE_STEPS)
    if not steps:
        return status
    last = steps[-1]
    return replace(
        status,
        step=whole(last.get("step")),
        steps=whole(last.get("steps")),
        loss=real(last.get("loss")),
        tokens_per_s=pace(steps, "tokens_per_s"),
        eta=seconds_left(steps) if status.state == "running" else None,
    )


def _with_silence(status: JobStatus, folder: RunFolder) -> JobStatus:
    """Say so where a running run has written nothing for long: its numbers are old."""
    if status.state != "running" or status.step is None:
        return status
    silent = time.time() - folder.metrics.stat().st_mtime
    step_s = pace(newest_steps(folder.metrics, PACE_STEPS), "step_s") or 0.0
    if silent < max(SILENCE_SECONDS, 5 * step_s):
        return status
    text = f"no step written for {silent / 60:.0f} min"
    if free_bytes(folder.path) < FULL_DISK_BYTES:
        text = f"the disk of {folder.path} is full: {text}"
    return replace(status, eta=None, reason=f"{status.reason}; {text}" if status.reason else text)


def pace(steps: Sequence[Record], key: str) -> float | None:
    """The median of the newest steps: a save or a first step among them counts for little."""
    values = [value for one in list(steps)[-PACE_STEPS:] if (value := real(one.get(key))) is not None]
    return statistics.median(values) if values else None


def seconds_left(steps: Sequence[Record]) -> float | None:
    """Time to the last step at the pace of the newest ones."""
    step_s = pace(steps, "step_s")
    last, step = (whole(steps[-1].get("steps")), whole(steps[-1].get("step"))) if steps else (None, None)
    return float(last - step) * step_s if step_s is not None and last is not None and step is not None else None
