"""Who works in a run folder: its lock, and the supervisor that supervisor.json names, here or on another machine.

The folder may be a copy, lie on another machine's disk, or hold anything at all: nothing in it is taken on trust.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.common.files import whole, words
from windlass.runfolder import RunFolder
from windlass.targets.launch import processes
from windlass.targets.launch.machine import HostIdentity, this_host
from windlass.targets.launch.progress import Record, end_since_launch, since_launch

LOCK_FILE = ".lock"
SUPERVISOR_FILE = "supervisor.json"
BEAT_SECONDS = 20.0  # between two signs of life of a supervisor, for other machines that see its folder
SILENCE_SECONDS = 120.0


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
    def job(self) -> str:
        """By which its launches are told from those of others."""
        return f"{self.pid}-{self.start_time}"

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
        **asdict(this_host()),
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
    if supervisor is not None and supervisor.alive:
        return True
    if supervisor is not None and supervisor.works_elsewhere and end_since_launch(since_launch(folder)) is None:
        return True
    return bool(processes.processes_of(folder.path))
