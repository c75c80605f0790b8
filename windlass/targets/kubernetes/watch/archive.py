"""What the pods of a job said, kept in the run folder: nothing lost, nothing twice, also when the keeper is killed.

A pod's log is read from where the last look ended: its cursor. Lines are appended to the files first, the cursors are
written down after that. Whoever finds lines in a file that no cursor speaks of was preceded by one that was killed in
between; those lines come again, and are recognised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from windlass.common.files import parse_record, write_atomically
from windlass.common.locks import locked
from windlass.runfolder import RunFolder

CURSOR_FILE = "cursors.json"
LOCK_FILE = "archive.lock"
RANK_LINE = re.compile(r"\[rank ([0-9]{1,6})\] ?(.*)", re.DOTALL)
RECORD_LINE = re.compile(
    r"windlass-record (metrics|history|error|node) (?:([0-9a-f]{1,64})@([0-9]{1,18})|-) (\{.*\})", re.DOTALL
)
MOST_HANDLES = 32  # files that are open at a time: 128 log streams need handles too, and macOS allows 256
Filler = Callable[[str, int, int], bytes]  # kind, first byte, byte after the last one
Moment = str  # RFC 3339 with nanoseconds, always UTC, so that the later of two is the greater string


@dataclass
class Cursor:
    """How far a container's log was read: the time of the last line, and how many lines bear it."""

    time: Moment = ""
    lines: int = 0  # of that very time: several can have been written in one nanosecond
    restart: int = 0  # of the container the log belongs to
    done: bool = False  # it was read to its end, and nothing more can come

    def second(self) -> str | None:
        """The second that the next look starts from: the API takes no smaller unit."""
        return f"{self.time[:19]}Z" if self.time else None


@dataclass
class Skipper:
    """Passes over the lines that a cursor has seen."""

    cursor: Cursor
    seen: int = 0  # lines of the cursor's very time that have come by

    def is_new(self, time: Moment) -> bool:
        return time > self.cursor.time or (time == self.cursor.time and self.seen >= self.cursor.lines)

    def move(self, time: Moment) -> None:
        """Behind a line of this time; to be called once the line is written down."""
        if time > self.cursor.time:
            self.cursor.time, self.cursor.lines, self.seen = time, 1, 1
        elif time == self.cursor.time:
            self.seen += 1
            self.cursor.lines = max(self.cursor.lines, self.seen)


@dataclass
class _File:
    """One file, and the lines at its end that a killed keeper left without a cursor."""

    path: Path
    unclaimed: deque[bytes]
    in_order: bool  # a log has one writer; between the records of a pod stand some of this machine's own
    known: int  # bytes that the cursors speak of
    handle: BinaryIO | None = None

    def claims(self, line: bytes) -> bool:
        """Whether the line is there already."""
        if self.in_order:
            if self.unclaimed and self.unclaimed[0] == line:
                self.known += len(self.unclaimed.popleft())
                return True
            self.unclaimed.clear()
            return False
        try:
            self.unclaimed.remove(line)
        except ValueError:
            return False
        return True

    def size(self) -> int:
        """How much of it need not be looked at again."""
        if not self.unclaimed and self.path.exists():
            self.known = self.path.stat().st_size
        return self.known

    def append(self, line: bytes) -> None:
        """The whole line, or nothing of it and an OSError."""
        if self.handle is None:
            self.handle = self.path.open("ab", buffering=0)  # unbuffered: whoever follows the file sees the line
        begin, written = os.fstat(self.handle.fileno()).st_size, 0
        try:
            written = self.handle.write(line) or 0
            if written < len(line):  # a disk that is nearly full takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            if written and os.fstat(self.handle.fileno()).st_size == begin + written:  # nobody else has appended
                self.handle.truncate(begin)
            raise

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
            self.handle = None


@dataclass
class Archive:
    """The files of one run folder that the words of its pods go to. Open it with `opened`: one keeper at a time."""

    folder: RunFolder
    cursors: dict[str, Cursor] = field(default_factory=dict)  # by pod uid
    offsets: dict[str, int] = field(default_factory=dict)  # by record file of the cluster: what is had of it
    sizes: dict[str, int] = field(default_factory=dict)  # of the files when the cursors were written down
    fill: Filler | None = None  # reads a part of a record file where the run keeps it
    _files: dict[str, _File] = field(default_factory=dict)
    _open: deque[_File] = field(default_factory=deque)  # files with a handle, the one that was opened first first
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _dirty: bool = False
    _closed: bool = False

    def cursor(self, pod_uid: str) -> Cursor:
        with self._lock:
            return self.cursors.setdefault(pod_uid, Cursor())

    def take(self, skipper: Skipper, time: Moment, text: str, node_rank: int | None) -> None:
        """Keep one line of a pod, and move its cursor with it."""
        with self._lock:
            if self._closed:  # by whom this thread outlived: the next who keeps the archive reads the line again
                return
            if skipper.is_new(time):
                self._dirty = True
                self._write(text, node_rank)
            skipper.move(time)  # after the write: a line that cannot be written comes again

    def _write(self, text: str, node_rank: int | None) -> None:
        record, rank = RECORD_LINE.fullmatch(text), RANK_LINE.fullmatch(text)
        if record:
            self._take_record(*record.groups())
        elif rank:
            self._append(f"logs/{self.folder.rank_log(int(rank[1])).name}", rank[2])
        else:
            self._append(f"logs/{launcher_log(node_rank)}", text)

    def commit(self) -> None:
        """Write down how far everything was read."""
        with self._lock:
            if not self._dirty or self._closed:
                return
            for file in self._files.values():
                self.sizes[str(file.path.relative_to(self.folder.path))] = file.size()
            state = {
                "cursors": {uid: vars(cursor) for uid, cursor in self.cursors.items()},
                "offsets": self.offsets,
                "sizes": self.sizes,
            }
            write_atomically(self.folder.logs / CURSOR_FILE, json.dumps(state))
            self._dirty = False

    def mark_done(self, pod_uid: str) -> None:
        with self._lock:
            self.cursors.setdefault(pod_uid, Cursor()).done = True
            self._dirty = True

    def note_restart(self, pod_uid: str, restart: int) -> None:
        with self._lock:
            self.cursors.setdefault(pod_uid, Cursor()).restart = restart
            self._dirty = True

    def close(self) -> None:
        with self._lock:
            try:
                self.commit()
            finally:
                self._closed = True
                for file in self._files.values():
                    file.close()
                self._files.clear()
                self._open.clear()

    def _take_record(self, kind: str, origin: str | None, offset: str | None, text: str) -> None:
        if origin is not None and offset is not None:
            key, begin, known = f"{kind} {origin}", int(offset), self.offsets.get(f"{kind} {origin}", 0)
            if begin < known:
                return  # a pod that took another's place says it again
            if begin > known and self.fill is not None:
                for line in self.fill(kind, known, begin).splitlines(keepends=True):
                    if line.startswith(b"{"):
                        self._append(f"{kind}.jsonl", line.decode(errors="replace").rstrip("\r\n"))
                    self.offsets[key] = known = known + len(line)
        match kind:
            case "metrics" | "history":
                self._append(f"{kind}.jsonl", text)
            case "error":
                self._write_error(text)
            case "node":
                self._append("logs/nodes.jsonl", text)
        if origin is not None and offset is not None:
            self.offsets[key] = begin + len(_bytes(text)) + 1

    def _write_error(self, text: str) -> None:
        rank = (parse_record(text) or {}).get("rank")  # of a record that is torn, or not of ours: none
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 10**6:
            write_atomically(self.folder.rank_error(rank), text + "\n")

    def _append(self, name: str, text: str) -> None:
        line = _bytes(text) + b"\n"
        file = self._file(name)
        if file.claims(line):
            return
        if file.handle is None:
            while len(self._open) >= MOST_HANDLES:
                self._open.popleft().close()
            self._open.append(file)
        file.append(line)

    def _file(self, name: str) -> _File:
        if name not in self._files:
            path = self.folder.path / name
            size = self.sizes.get(name, 0)
            self._files[name] = _File(path, _unclaimed(path, size), name.endswith(".log"), size)
        return self._files[name]


def _bytes(text: str) -> bytes:
    """What a pod wrote, byte by byte: not all of it need be UTF-8."""
    return text.encode("utf-8", errors="surrogateescape")


def launcher_log(node_rank: int | None) -> str:
    return f"launcher-{node_rank}.log" if node_rank is not None else "launcher.log"


@contextlib.contextmanager
def opened(folder: RunFolder, fill: Filler | None = None) -> Iterator[Archive | None]:
    """The archive of a run folder, or None while another process keeps it.

    `fill` is asked for records that were said by pods which are gone, while nobody listened.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    with locked(folder.logs / LOCK_FILE, patience_s=0) as held:
        if not held:
            yield None
            return
        archive = _load(folder)
        archive.fill = fill
        try:
            yield archive
        finally:
            archive.close()


def _load(folder: RunFolder) -> Archive:
    try:
        state = json.loads((folder.logs / CURSOR_FILE).read_text())
        cursors = {uid: Cursor(**value) for uid, value in state["cursors"].items()}
        return Archive(folder, cursors, dict(state["offsets"]), dict(state["sizes"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        archive = Archive(folder, _dirty=True)
        for path in (folder.metrics, folder.history, *folder.logs.glob("*.log"), *folder.logs.glob("*.jsonl")):
            if path.is_file():  # of an earlier submission, or of another target
                archive.sizes[str(path.relative_to(folder.path))] = path.stat().st_size
        archive.commit()
        return archive


def _unclaimed(path: Path, size: int) -> deque[bytes]:
    """The whole lines behind `size`; a line that was torn by a kill is cut off, for it comes again."""
    try:
        with path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(min(size, end))
            tail = file.read()
            whole, newline, torn = tail.rpartition(b"\n")
            if torn:
                file.truncate(end - len(torn))
            return deque(part + b"\n" for part in whole.split(b"\n")) if newline else deque()
    except FileNotFoundError:
        return deque()
