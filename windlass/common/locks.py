"""Locks between processes: flock on a file. The kernel gives a lock back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.1


class FileLock:
    """A lock on one file, made if it is not there; nothing is locked before `acquire`.

    It is given back when it is closed, or no longer referred to.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)

    def acquire(self, *, shared: bool = False, patience_s: float = math.inf) -> bool:
        """Take the lock; False if another process still holds it after `patience_s` seconds."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if patience_s == math.inf:
            fcntl.flock(self._file, kind)
            return True
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Give the lock back; it can be acquired again."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def detach(self) -> int:
        """A handle that keeps the lock until it is closed or the process ends, whatever becomes of this object."""
        return os.dup(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@contextmanager
def locked(path: Path, *, patience_s: float = math.inf) -> Iterator[bool]:
    """Hold the lock on `path` for the body; False if another process still holds it after `patience_s` seconds."""
    lock = FileLock(path)
    try:
        yield lock.acquire(patience_s=patience_s)
    finally:
        lock.close()
