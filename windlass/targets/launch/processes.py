"""Processes of this machine, through /proc: who is who, who is alive, and none left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from windlass.targets.launch.torchrun import FOLDER_VARIABLE

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: with the pid, it names one process for ever. None: gone."""
    fields = _stat(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def ranks_of(launcher: int) -> dict[int, int]:
    """The ranks that a torchrun started: rank to pid."""
    return {
        int(rank): pid
        for pid in all_pids()
        if parent(pid) == launcher and start_time(pid) is not None and (rank := environment(pid).get("RANK"))
    }


def signal_ranks(launcher: int, number: int) -> int:
    """Signal the ranks that a torchrun started; how many there are."""
    ranks = ranks_of(launcher)
    for pid in ranks.values():
        send(pid, number)
    return len(ranks)


def processes_by_folder() -> dict[str, list[int]]:
    """Every living process that was started for a run folder, by the folder's real path, whoever its parent is now."""
    by_folder: dict[str, list[int]] = {}
    for pid in all_pids():
        mark = environment(pid).get(FOLDER_VARIABLE) if pid != os.getpid() else None
        if mark and start_time(pid) is not None:
            by_folder.setdefault(os.path.realpath(mark), []).append(pid)
    return by_folder


def processes_of(folder: Path) -> list[int]:
    return processes_by_folder().get(os.path.realpath(folder), [])


def end_leftovers(folder: Path, *, patience: float, save_first: bool = False) -> list[int]:
    """Wait for the processes of a run folder to leave, then kill what has not; the pids that had to be killed.

    With `save_first` its ranks are asked to save and leave, as a stop asks them.
    """
    deadline = time.monotonic() + patience
    if save_first:
        pids = processes_of(folder)
        ranks = [pid for pid in pids if "RANK" in environment(pid)]
        for pid in ranks or pids:
            send(pid, signal.SIGTERM)
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        reap()
        time.sleep(POLL_SECONDS)
    killed = left
    while left:
        for pid in left:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(POLL_SECONDS)
        left = processes_of(folder)
    return killed


def send(pid: int, number: int) -> bool:
    """Signal a process; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def reap() -> None:
    """Take note of ended orphans that this process, as their subreaper, inherited."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def adopt_orphans() -> None:
    """Become the parent of ranks whose torchrun was killed, so that they can be seen and ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """For the child between fork and exec: SIGTERM when the parent is gone, however it went."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
