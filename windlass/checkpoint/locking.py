"""Whether a run may be saving this very moment: its trainer holds a lock on the folder of its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from windlass.common.locks import FileLock
from windlass.runfolder import RunFolder

LOCK_FILE = ".lock"


def hold(checkpoints: Path) -> FileLock | None:
    """Hold the folder until the lock is closed; waits while a command clears it up. None where it cannot be held."""
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock = FileLock(checkpoints / LOCK_FILE)
        lock.acquire(shared=True)
    except OSError:  # file systems without locks: commands then go by how long a run has been silent
        return None
    return lock


@contextlib.contextmanager
def alone(folder: RunFolder) -> Iterator[bool]:
    """Whether nobody trains in a run folder on a machine that shares its locks; nobody begins to while it lasts."""
    with contextlib.ExitStack() as stack:
        paths = (folder.path / LOCK_FILE, folder.checkpoints / LOCK_FILE)
        yield all(_taken(path, stack) for path in paths if path.exists())


def _taken(path: Path, stack: contextlib.ExitStack) -> bool:
    try:
        lock = stack.enter_context(contextlib.closing(FileLock(path, create=False)))
        return lock.acquire(patience_s=0)
    except OSError:
        return True
