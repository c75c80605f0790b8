"""Read files that grow: whole lines only, from where the last look ended or from the end backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windlass.common.files import parse_record

FIRST_BLOCK = 16 * 1024
LARGEST_LOOK_BACK = 4 * 1024 * 1024  # for a step: between two of them there are a few lines at most
READ_BYTES = 1024 * 1024


def newest_steps(path: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` step records of metrics.jsonl, or as many as there are, oldest first."""
    for lines, whole_file, size in _ends_of(path):
        steps = []
        for line in reversed(lines):
            record = parse_record(line)
            if record is not None and record.get("kind") == "step":
                steps.append(record)
                if len(steps) == count:
                    break
        if len(steps) == count or whole_file or size >= LARGEST_LOOK_BACK or (steps and size >= 4 * FIRST_BLOCK):
            return steps[::-1]
    return []


def records_since(path: Path, begins: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The last records of a JSONL file, from the newest one for which `begins` is true; all where none is."""
    for lines, whole_file, _ in _ends_of(path):
        newest = []
        for line in reversed(lines):
            record = parse_record(line)
            if record is not None:
                newest.append(record)
                if begins(record):
                    return newest[::-1]
        if whole_file:
            return newest[::-1]
    return []


def _ends_of(path: Path) -> Iterator[tuple[list[bytes], bool, int]]:
    """Ever larger ends of a file: their lines, whether that is all of it, and their size."""
    try:
        with path.open("rb") as file:
            total = file.seek(0, 2)
            size = FIRST_BLOCK
            while True:
                begin = max(0, total - size)
                file.seek(begin)
                lines = file.read(total - begin).split(b"\n")
                yield (lines[1:] if begin else lines), begin == 0, size
                if begin == 0:
                    return
                size *= 4
    except (FileNotFoundError, NotADirectoryError):
        return


class Tail:
    """New lines of one file; it may not exist yet."""

    def __init__(self, path: Path, *, offset: int = 0, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else offset

    def lines(self, *, rest: bool = False, limit: int | None = None) -> list[str]:
        """Lines completed since the last call; with `rest`, an unfinished last one too.

        With `limit` about so many bytes at a time; what is left comes with the next call.
        """
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self.offset:  # cut off by a log rotation: what it has now is new
                    self.offset = 0
                file.seek(self.offset)
                data = file.read(-1 if limit is None else limit)
                while limit is not None and b"\n" not in data and (more := file.read(limit)):
                    data += more
                at_end = self.offset + len(data) >= size
        except FileNotFoundError:
            return []
        if not rest or not at_end:
            data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data.decode(errors="replace").splitlines()

    def records(self) -> list[dict[str, Any]]:
        """New JSON objects; a line torn by a crash is passed over."""
        return [record for line in self.lines() if (record := parse_record(line)) is not None]
