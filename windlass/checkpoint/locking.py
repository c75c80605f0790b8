"""Whether a run may be saving this very moment: its trainer holds a lock on the folder of its checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from windlass.runfolder import RunFolder

LOCK_FILE = ".lock"


def hold(checkpoints: Path) -> int | None:
    """Hold the folder as long as this process lives; waits while a command clears it up. None where it cannot be held.

    The kernel lets go of it when the process dies, however it dies.
    """
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        handle = os.open(checkpoints / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_SH)
    except OSError:  # file systems without locks: commands then go by how long a run has been silent
        return None
    return handle


@contextlib.contextmanager
def alone(folder: RunFolder) -> Iterator[bool]:
    """Whether nobody trains in a run folder on a machine that shares its locks; nobody begins to while it lasts."""
    with contextlib.ExitStack() as stack:
        paths = (folder.path / LOCK_FILE, folder.checkpoints / LOCK_FILE)
        yield all(_taken(path, stack) for path in paths if path.exists())


def _taken(path: Path, stack: contextlib.ExitStack) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
