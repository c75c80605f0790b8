"""Disk space for a run folder: how much is free, and whether the folder can be made there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from windlass.errors import UserError

FULL_BYTES = 2**16  # a disk with less than this free takes no more records


def free_bytes(path: Path) -> int:
    """Free space of the file system that `path`, which need not exist yet, would be on."""
    return shutil.disk_usage(nearest_existing(path)).free


def is_full(path: Path) -> bool:
    return free_bytes(path) < FULL_BYTES


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def folder_can_be_made(folder: Path) -> None:
    parent = nearest_existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"the run folder {folder} cannot be made",
            evidence=f"{parent} is {'not writable' if parent.is_dir() else 'not a folder'}",
            fix="set WINDLASS_RUNS to a folder of your own",
        )


def space_is_there(folder: Path, bytes_needed: int | None) -> None:
    free = free_bytes(folder)
    if bytes_needed is not None and bytes_needed > free:
        raise UserError(
            f"the checkpoints of this run need {_size(bytes_needed)}, {_size(free)} are free",
            evidence=f"file system of {folder}",
            fix="set WINDLASS_RUNS to a larger disk    or, where one checkpoint fits, checkpoint.keep=1",
        )


def _size(number: int) -> str:
    """Bytes in a unit in which they are not nothing."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
