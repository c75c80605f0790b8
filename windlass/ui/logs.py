"""The logs of a run's ranks and launchers as one, in the order of their times; a rank, a search, always bounded."""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.runfolder import RunFolder
from windlass.targets.launch.logs import RANK_LINE
from windlass.ui.growing import open_plain

NAME = re.compile(r"(?:rank-0*(\d+)|[A-Za-z0-9._-]+)\.(?:log|out)")
STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
LEVEL = re.compile(r"\b(ERROR|CRITICAL|FATAL|WARNING|Traceback)\b")
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
MOST_LINES = 1000
MOST_LINE_BYTES = 2000  # that are shown, and searched
MOST_BYTES = 64 * 1024 * 1024  # that one answer looks at, of all files together
TAIL_BYTES = 128 * 1024  # of a file, where nothing is searched for
FEWEST_LINES = 20  # of a file, where it has so many
SEARCH_SECONDS = 3.0


@dataclass(frozen=True)
class LogFile:
    path: Path
    source: str  # `rank 3`, or a launcher's name
    rank: int | None


def files_of(folder: RunFolder) -> list[LogFile]:
    """The logs that lie in the run folder itself: a link that leads out of it is not followed."""
    inside = folder.logs.resolve()
    files = []
    for path in sorted(folder.logs.glob("*")):
        match = NAME.fullmatch(path.name)
        if match and path.is_file() and path.resolve().parent == inside and folder.path.resolve() in inside.parents:
            rank = int(match[1]) if match[1] else None
            files.append(LogFile(path, path.stem if rank is None else f"rank {rank}", rank))
    return sorted(files, key=lambda file: file.rank is None)  # launchers tell of the end of what ranks have said


def size_of(folder: RunFolder) -> int:
    """Changes whenever something was written to a log."""
    return sum(map(_size, folder.logs.glob("*")))


def read_logs(
    folder: RunFolder, *, source: str | None = None, search: str = "", most_lines: int = MOST_LINES
) -> dict[str, Any]:
    """The newest lines of all files or of one source; with `search` the newest that hold these words."""
    files = files_of(folder)
    chosen = [file for file in files if source in (None, "", file.source)]
    with_copies = all(file.rank is None for file in chosen)
    share = max(4096, MOST_BYTES // max(1, len(chosen)))
    until = time.monotonic() + SEARCH_SECONDS
    streams = []
    is_cut = False
    for file in chosen:
        size = _size(file.path)
        window = min(share, size) if search else min(share, TAIL_BYTES)
        lines = _newest(file, size - window, search.casefold(), most_lines, until, with_copies=with_copies)
        while not search and len(lines) < FEWEST_LINES and window < min(share, size):  # huge lines
            window = min(share, 8 * window)
            lines = _newest(file, size - window, search.casefold(), most_lines, until, with_copies=with_copies)
        is_cut = is_cut or window < size or time.monotonic() > until
        streams.append(lines)
    merged = deque(heapq.merge(*streams, key=lambda line: line[0]), maxlen=most_lines)
    return {
        "lines": [{"source": origin, "text": text, "tone": _tone(text)} for _, origin, text in merged],
        "sources": [file.source for file in files],
        "cut": is_cut or sum(map(len, streams)) > len(merged),
    }


def _newest(
    file: LogFile, begin: int, wanted: str, most_lines: int, until: float, *, with_copies: bool
) -> deque[tuple[str, str, str]]:
    """The last lines with these words, each with the time that it, or the line before it, begins with."""
    lines: deque[tuple[str, str, str]] = deque(maxlen=most_lines)
    stamp = ""
    for text in _lines(file.path, max(0, begin)):
        if time.monotonic() > until:
            break
        stamp = max(stamp, text[:19].replace(" ", "T")) if STAMP.match(text) else stamp  # clocks may jump back
        is_copy = file.rank is None and not with_copies and RANK_LINE.match(text)
        if not is_copy and (not wanted or wanted in text.casefold()):
            lines.append((stamp, file.source, text))
    return lines


def _lines(path: Path, begin: int) -> Iterator[str]:
    """Lines from a byte on; of one that is too long the beginning. What is read at once is bounded."""
    try:
        with open_plain(path) as file:
            file.seek(begin)
            if begin:
                file.readline(MOST_BYTES)
            while line := file.readline(MOST_LINE_BYTES):
                text, length = line, len(line)
                while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                    length += len(line)
                decoded = ESCAPES.sub("", text.decode("utf-8", "replace").rstrip("\r\n"))
                yield decoded if length == len(text) else f"{decoded} … ({length:,} bytes in this line)"
    except OSError:
        return


def _tone(text: str) -> str:
    level = LEVEL.search(text[:200])
    if level is None:
        return ""
    return "warn" if level[1] == "WARNING" else "bad"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
