"""Which run a folder is: a name can be used again, an id cannot. What lies outside the folder is found by it."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from windlass.common.files import write_atomically
from windlass.runfolder import RunFolder

FILE = "id"


def read_id(folder: RunFolder) -> str | None:
    return next(iter(_lines(folder)), None)


def known_to(folder: RunFolder, store_url: str) -> bool:
    """Whether a store was told that this run is the one of its name."""
    return store_url in _lines(folder)[1:]


def write_id(folder: RunFolder, run_id: str, *, known_to: str | None = None) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.path / FILE, "\n".join([run_id, *([known_to] if known_to else [])]) + "\n")


def _lines(folder: RunFolder) -> list[str]:
    try:
        return (folder.path / FILE).read_text(encoding="utf-8").splitlines()
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
