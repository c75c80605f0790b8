"""Work in progress that outlives its process: a locked folder, what it is for, and how far it has come."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from windlass.common.files import parse_record, write_atomically
from windlass.common.locks import FileLock, locked
from windlass.errors import ExitCode, UserError

log = logging.getLogger(__name__)

PLAN, PROGRESS, LOCK, PUBLISHING = "plan.json", "progress.json", "lock", "publishing"
KEPT_LONGEST = frozenset({PLAN, PROGRESS, LOCK, PUBLISHING})


class Work:
    """A folder that belongs to one process at a time and to one plan: files under it, and a small JSON of progress."""

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        self.path = path
        self.plan = json.loads(json.dumps(plan))

    def progress(self) -> dict[str, Any] | None:
        """What was saved last, by this process or one before it."""
        return read_object(self.path / PROGRESS)

    def save(self, progress: dict[str, Any]) -> None:
        write_atomically(self.path / PROGRESS, json.dumps(progress))

    def publishing(self, proof: str) -> None:
        """The result is about to appear; `proof` tells it from whatever else may be there."""
        write_atomically(self.path / PUBLISHING, proof)

    def start_over(self) -> None:
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_atomically(self.path / PLAN, json.dumps(self.plan))


@contextmanager
def work_in(path: Path, plan: dict[str, Any], *, what: str) -> Iterator[Work]:
    """The work folder `path`; what an earlier process with the same plan left in it is still there.

    It is removed when the work is done or turns out to be impossible, and kept for the next try otherwise: after a
    kill, a lost connection, a full disk.
    """
    work = Work(path, plan)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be written to", evidence=str(error)) from None
    with closing(lock):
        if not lock.acquire(patience_s=0):
            raise UserError(
                f"{what} is being made by another process", evidence=f"it holds {path / LOCK}", fix="wait for it"
            )
        before = read_object(path / PLAN)
        if before is not None and before != work.plan:
            log.warning("%s: what was left of another try does not fit this one and is removed", what)
        if before != work.plan:
            work.start_over()
        try:
            yield work
        except UserError as error:
            if error.exit_code == ExitCode.BAD_INPUT:
                shutil.rmtree(path, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno is None:
                raise
            raise UserError(
                f"{what} cannot be written",
                evidence=str(error),
                fix="once that is mended, the same command goes on where it stopped",
                exit_code=ExitCode.FAILED,
            ) from error
        clear(path)


def published_before(path: Path, plan: dict[str, Any]) -> str | None:
    """The proof of a result that a process with this plan was publishing when it ended."""
    if read_object(path / PLAN) != json.loads(json.dumps(plan)):
        return None
    try:
        return (path / PUBLISHING).read_text()
    except OSError:
        return None


def clear(path: Path) -> None:
    """Remove a work folder; what says that the work is done goes last."""
    for child in path.iterdir() if path.is_dir() else ():
        if child.name not in KEPT_LONGEST:
            shutil.rmtree(child, ignore_errors=True) if child.is_dir() else child.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def clear_remains(path: Path) -> None:
    """Remove what a process killed while it cleared its work folder has left."""
    if path.is_dir() and not {child.name for child in path.iterdir()} - KEPT_LONGEST:
        with locked(path / LOCK, patience_s=0) as unused:  # else its owner has only just begun
            if unused:
                shutil.rmtree(path, ignore_errors=True)


def read_object(path: Path) -> dict[str, Any] | None:
    try:
        return parse_record(path.read_bytes())
    except OSError:
        return None
