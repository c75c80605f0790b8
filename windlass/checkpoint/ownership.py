"""Whose checkpoints a folder holds: the id of its run, by which what lies outside is found, and a lock while it trains.

A name can be used again, an id cannot.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from windlass.common.files import write_atomically
from windlass.common.locks import FileLock
from windlass.runfolder import RunFolder

ID_FILE = "id"
LOCK_FILE = ".lock"


def read_id(folder: RunFolder) -> str | None:
    return next(iter(_lines(folder)), None)


def known_to(folder: RunFolder, store_url: str) -> bool:
    """Whether a store was told that this run is the one of its name."""
    return store_url in _lines(folder)[1:]


def write_id(folder: RunFolder, run_id: str, *, known_to: str | None = None) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.path / ID_FILE, "\n".join([run_id, *([known_to] if known_to else [])]) + "\n")


def _lines(folder: RunFolder) -> list[str]:
    try:
        return (folder.path / ID_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def begin_anew(folder: RunFolder) -> str:
    """A new run in this folder: what memories, disks and stores hold of an earlier one of its name is not its own."""
    run_id = secrets.token_hex(6)
    write_id(folder, run_id)
    return run_id


def place_of(folder: RunFolder) -> str:
    """The first part of the name of this run's folder on every node: the same for all runs that this path ever held."""
    return f"{folder.name}-{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:8]}"


def node_folder(root: Path, folder: RunFolder, run_id: str) -> Path:
    """Where a node keeps its part of this run's checkpoints, below a tier's path."""
    return root / f"{place_of(folder)}-{run_id}"


def hold(checkpoints: Path) -> int | None:
    """Hold the folder while this process lives; waits while a command clears it up. None where it cannot be held."""
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock = FileLock(checkpoints / LOCK_FILE)
        lock.acquire(shared=True)
    except OSError:  # file systems without locks: commands then go by how long a run has been silent
        return None
    return lock.detach()


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
