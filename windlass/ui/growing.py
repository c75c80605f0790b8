"""Read JSONL files that grow, a piece at a time: from where the last look ended, in bounded memory and time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

BLOCK_BYTES = 256 * 1024
MOST_LINE_BYTES = 1024 * 1024  # a longer line is nothing that windlass writes: it is passed over
HEAD_BYTES = 256  # by which a file is known again

Record = dict[str, Any]


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading. A link could lead out of the run folder, and a pipe would be waited for: no file."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} is no plain file")
    return file


class GrowingRecords:
    """The records of one JSONL file; each is read once, when its line is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.at_end = False
        self.was_replaced = False  # by another file, or cut short: what was read before is no longer in it
        self._inode: int | None = None
        self._head = b""  # the first bytes of what was read
        self._skipping = False  # in the middle of a line that is too long

    def read(self, *, until: float) -> Iterator[Record]:
        """New records, for as long as `time.monotonic()` is below `until`; at least one block is read."""
        self.was_replaced = False
        try:
            file = open_plain(self.path)
        except OSError:  # not there yet, or its folder is being deleted: what was read stays
            self.at_end = True
            return
        with file:
            about = os.fstat(file.fileno())
            head = file.read(HEAD_BYTES)
            is_other = about.st_ino != self._inode or about.st_size < self.offset or not head.startswith(self._head)
            if self._inode is not None and is_other:
                self.offset, self.was_replaced, self._skipping = 0, True, False
            self._inode, self._head = about.st_ino, head
            file.seek(self.offset)
            rest = b""
            self.at_end = False
            while not self.at_end:
                block = file.read(BLOCK_BYTES)
                self.at_end = len(block) < BLOCK_BYTES
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    if self._skipping:
                        self._skipping = False
                    elif len(line) <= MOST_LINE_BYTES and (record := parse(line)) is not None:
                        yield record
                if len(rest) > MOST_LINE_BYTES:
                    self.offset, rest, self._skipping = self.offset + len(rest), b"", True
                if time.monotonic() > until:
                    return


def parse(line: bytes) -> Record | None:
    """The object of a line; None for a line torn by a crash. Three times as fast as `json.loads`."""
    try:
        value = from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
