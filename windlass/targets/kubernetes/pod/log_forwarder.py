"""Forward logs to the pod's standard output: lines of its ranks with their rank, and the run's records, whole lines."""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.common.files import parse_record, write_atomically
from windlass.runfolder import RunFolder
from windlass.targets.launch.tail import Tail

RECORD = "windlass-record"
POLL_SECONDS = 0.2
NOTE_FILE = "emitted.json"  # how far the records of a shared run folder have been printed already


class PodOutput:
    """Standard output, one whole line at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, *lines: str) -> None:
        if not lines:
            return
        text = "".join(f"{line}\n" for line in lines)
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()

    def record(self, kind: str, value: Mapping[str, Any], place: str = "-") -> None:
        self.write(f"{RECORD} {kind} {place} {json.dumps(value, separators=(',', ':'), default=str)}")


class RecordFile:
    """New lines of metrics.jsonl or history.jsonl, each with the byte at which it begins."""

    def __init__(self, path: Path, kind: str, identity: str, offset: int) -> None:
        self.path, self.kind, self.identity, self.offset = path, kind, identity, offset

    def new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        lines = []
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            text = line.decode(errors="replace").strip()
            if parse_record(text) is not None:  # one torn by a kill is left out
                lines.append(f"{RECORD} {self.kind} {self.identity}@{self.offset} {text}")
            self.offset += len(line)
        return lines


class Records:
    """The records of a run folder, from where an earlier pod left off."""

    def __init__(self, folder: RunFolder) -> None:
        self.note = folder.path / NOTE_FILE
        paths = {"metrics": folder.metrics, "history": folder.history}
        try:
            known = json.loads(self.note.read_text())
            identity, offsets = str(known["id"]), {kind: int(known.get(kind, 0)) for kind in paths}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):  # none yet, or not ours
            identity, offsets = secrets.token_hex(4), dict.fromkeys(paths, 0)
        self.files = [RecordFile(path, kind, identity, offsets[kind]) for kind, path in paths.items()]
        self.save_offsets()

    def new_lines(self) -> list[str]:
        return [line for file in self.files for line in file.new_lines()]

    def save_offsets(self) -> None:
        """To be called after printing, so that a line may repeat but is never lost."""
        note = {"id": self.files[0].identity, **{file.kind: file.offset for file in self.files}}
        write_atomically(self.note, json.dumps(note))


class LogForwarder:
    """A thread that prints what is new in the logs of ranks and torchrun and in the records."""

    def __init__(self, output: PodOutput, records: Records | None) -> None:
        self.output, self.records = output, records
        self._tails: dict[Path, tuple[str, Tail]] = {}
        self._folder: Path | None = None
        self._first_rank = 0
        self._busy = threading.Lock()
        self._complained = False  # that something cannot be read: logged once, until it can
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log forwarder", daemon=True)
        self._thread.start()

    def follow(self, folder: Path, launcher: Path, *, first_rank: int) -> None:
        """Follow the files of a new attempt: torchrun's own, and below `folder` those of its ranks."""
        self.flush()
        with self._busy:
            self._tails = {launcher: ("", Tail(launcher))}
            self._folder, self._first_rank = folder, first_rank

    def flush(self, *, rest: bool = True) -> None:
        """Print all there is; with `rest`, lines that are not finished too."""
        with self._busy:
            try:
                self._forward(rest=rest)
                self._complained = False
            except OSError as error:  # a file system that is full, or gone for a while, must not silence the pod
                if not self._complained:
                    self.output.write(f"windlass: what is new cannot be read or noted at the moment: {error}")
                self._complained = True

    def _forward(self, *, rest: bool) -> None:
        if self._folder:
            for path in sorted(self._folder.glob("*/attempt_0/*/std*.log")):
                rank = self._first_rank + int(path.parent.name)
                self._tails.setdefault(path, (f"[rank {rank}] ", Tail(path)))
        for prefix, tail in self._tails.values():
            self.output.write(*(f"{prefix}{line}" for line in _plain(tail.lines(rest=rest), prefix)))
        if self.records:
            lines = self.records.new_lines()
            if lines:
                self.output.write(*lines)
                self.records.save_offsets()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._ending.wait(POLL_SECONDS):
            self.flush(rest=False)


def _plain(lines: Iterable[str], prefix: str) -> Iterable[str]:
    """Lines of torchrun that look like ours are marked: nobody but this module prints records."""
    return lines if prefix else (f" {line}" if line.startswith((RECORD, "[rank ")) else line for line in lines)


def errors_of(folder: RunFolder, attempt: int, ranks: range) -> list[dict[str, Any]]:
    """The error files that this pod's ranks wrote in an attempt."""
    return [error for error in folder.errors(attempt) if isinstance(error.get("rank"), int) and error["rank"] in ranks]
