"""Fetch records of a dataset into JSON lines: part by part, resumable at any moment, always the same bytes.

Or straight to token shards: the text is then kept in the cache until they are there.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any

from windlass.common.files import cache_root, name_digest, sha256_of, write_atomically
from windlass.data.build.destinations import PARTS, SHARDS, Destination, FolderDestination, destination
from windlass.data.build.progress import PROGRESS, Work, clear, clear_remains, published_before, read_object, work_in
from windlass.data.build.tokenizing import Progress, tokenize
from windlass.data.shards.folder import Index
from windlass.data.sources.hub import HubFiles, pinned
from windlass.data.sources.source import FileSource, HubSource, compression, file_format
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import UserError

PART_BYTES = 64 << 20


@dataclass(frozen=True)
class Wanted:
    """How much of a dataset, and how it is written."""

    samples: int | None = None
    num_bytes: int | None = None  # of JSON lines, before they are compressed
    fields: tuple[str, ...] = ()  # of a record; none: all
    compress: bool = False
    part_bytes: int = PART_BYTES

    @property
    def suffix(self) -> str:
        return ".jsonl.gz" if self.compress else ".jsonl"


@dataclass(frozen=True)
class PartFacts:
    """A part that is complete."""

    name: str
    records: int
    raw_bytes: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Reached:
    """How far a fetch has come: what is in complete parts, and the record that comes next."""

    file: int = 0
    record: int = 0
    parts: tuple[PartFacts, ...] = ()
    complete: bool = False  # nothing comes next

    @property
    def records(self) -> int:
        return sum(part.records for part in self.parts)

    @property
    def raw_bytes(self) -> int:
        return sum(part.raw_bytes for part in self.parts)

    @classmethod
    def from_progress(cls, value: dict[str, Any] | None) -> Reached:
        if not value:
            return cls()
        return cls(
            value["file"], value["record"], tuple(PartFacts(**part) for part in value["parts"]), value["complete"]
        )


def fetch_destination(out: str) -> Destination:
    """The place that `-o` names: a folder of parts, or a single file."""
    if file_format(Path(out)) and compression(out) not in (None, ".gz"):
        raise UserError(f"{out} cannot be written", cause="files are written plain or as .gz", fix="-o FILE.jsonl.gz")
    return destination(out, PARTS, one_file=file_format(Path(out)) == "jsonl")


def fetch(
    source: HubSource,
    out: Destination,
    wanted: Wanted,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Reached:
    """Write the first records of a dataset to `out`, which is there once it is complete."""
    clear_remains(out.work)
    if not out.work.exists():
        out.require_free(overwrite)
    source = pinned(source)
    plan = {"version": 1, "source": asdict(source), "wanted": asdict(wanted), "out": out.name}
    proof = published_before(out.work, plan)
    if proof is not None and out.published() == proof:
        reached = Reached.from_progress(read_object(out.work / PROGRESS))
        clear(out.work)  # all that a killed process had left to do
        return reached
    out.require_free(overwrite)
    with work_in(out.work, plan, what=out.name) as work:
        reached = kept(work, out)
        if not reached.parts:
            out.begin()
        folder = work.path / "parts"
        folder.mkdir(exist_ok=True)
        report = progress or (lambda done, total: None)
        following = () if reached.complete else parts(HubFiles(source), wanted, work, reached, report)
        for reached in following:
            part = reached.parts[-1]
            out.take(folder / part.name, part.name, part.sha256)
            work.save(asdict(reached))
            out.forget(folder / part.name)
        if not reached.records:
            raise UserError(f"{source.name} holds no records", cause="every file of it is empty")
        manifest = {
            "dataset": source.path,
            "revision": source.revision,
            "config": source.config,
            "split": source.split,
            "records": reached.records,
            "parts": [asdict(part) for part in reached.parts],
        }
        text = json.dumps(manifest, indent=1) + "\n"
        if out.one_file:
            whole = work.path / "whole"
            put_together(folder, reached.parts, whole)
            work.publishing(sha256_of(whole))
            out.publish(whole, overwrite)
        else:
            remove_others(folder, reached.parts)
            write_atomically(folder / PARTS.marker, text)
            work.publishing(text)
            out.publish(folder, overwrite)
    return reached


def fetch_shards(
    source: HubSource,
    out: str,
    wanted: Wanted,
    tokenizer: str,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Both halves are resumable: the text that was fetched is found again, and so are the units that were tokenized."""
    destination(out, SHARDS).require_free(overwrite)
    loaded = load_tokenizer(tokenizer)
    loaded.require_eos()
    wanted = replace(wanted, fields=(source.text_field,), compress=False)
    text = cache_root() / "fetched" / name_digest(f"{out} {asdict(source)} {asdict(wanted)}")
    if not (text / PARTS.marker).exists():
        fetch(source, FolderDestination(text, PARTS), wanted, progress=progress)
    parts = tuple(sorted(text.glob("part-*.jsonl")))
    files = FileSource(parts, source.text_field, source.name)
    index = tokenize([files], out, loaded, workers=workers, overwrite=overwrite, progress=progress)
    shutil.rmtree(text)
    return index


def put_together(parts: Path, facts: Sequence[PartFacts], whole: Path) -> None:
    """All parts as one file."""
    with whole.open("wb") as out:
        for part in facts:
            with (parts / part.name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)


def remove_others(parts: Path, facts: Sequence[PartFacts]) -> None:
    """Remove a part that was begun when a process died, and that no later one needed."""
    names = {part.name for part in facts}
    for path in parts.iterdir():
        if path.name not in names:
            path.unlink()


def kept(work: Work, out: Destination) -> Reached:
    """What an earlier process finished, if all of it is still as it was."""
    try:
        reached = Reached.from_progress(work.progress())
    except (KeyError, TypeError, AttributeError):  # the file was damaged
        work.start_over()
        return Reached()
    for part in reached.parts:
        if not out.intact(work.path / "parts" / part.name, part.name, part.sha256):
            work.start_over()
            return Reached()
    return reached


def parts(files: HubFiles, wanted: Wanted, work: Work, reached: Reached, report: Progress) -> Iterator[Reached]:
    """Write part after part; each state that is given out can be gone on from."""
    part: _OpenPart | None = None
    totals = [reached.records, reached.raw_bytes]
    report_to(report, wanted, totals)
    for file, record, row in rows(files, reached):
        line = as_line(row, wanted.fields, f"record {record:,} of file {file:,} of {files.name}")
        if full(wanted, totals, len(line)):
            break
        if part is None:
            part = _OpenPart(work.path / "parts", len(reached.parts), wanted)
        part.write(line)
        totals = [totals[0] + 1, totals[1] + len(line)]
        report_to(report, wanted, totals)
        if part.raw_bytes >= wanted.part_bytes:
            reached = Reached(file, record + 1, (*reached.parts, part.close()))
            part = None
            yield reached
    if part is not None:
        yield replace(reached, parts=(*reached.parts, part.close()), complete=True)


def rows(files: HubFiles, reached: Reached) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every record from a place on: its file, its number there, and itself."""
    skip = reached.record
    for file in range(reached.file, files.num_files):
        for record, row in enumerate(files.records(file, skip), start=skip):
            yield file, record, row
        skip = 0


def full(wanted: Wanted, totals: list[int], following: int) -> bool:
    records, num_bytes = totals
    if wanted.samples is not None and records >= wanted.samples:
        return True
    return wanted.num_bytes is not None and records > 0 and num_bytes + following > wanted.num_bytes


def report_to(report: Progress, wanted: Wanted, totals: list[int]) -> None:
    if wanted.samples is not None:
        report(totals[0], wanted.samples)
    elif wanted.num_bytes is not None:
        report(totals[1], wanted.num_bytes)


class _OpenPart:
    def __init__(self, folder: Path, number: int, wanted: Wanted) -> None:
        self.path = folder / f"part-{number:05d}{wanted.suffix}"
        self.records = self.raw_bytes = 0
        self._file = self.path.open("wb")
        self._out: BufferedWriter | gzip.GzipFile = self._file
        if wanted.compress:  # without a time and a name in it, so that the same records are the same bytes
            self._out = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0)

    def write(self, line: bytes) -> None:
        self._out.write(line)
        self.records += 1
        self.raw_bytes += len(line)

    def close(self) -> PartFacts:
        self._out.close()
        self._file.close()
        size = self.path.stat().st_size
        return PartFacts(self.path.name, self.records, self.raw_bytes, size, sha256_of(self.path))


def as_line(row: dict[str, Any], fields: tuple[str, ...], where: str) -> bytes:
    if fields:
        missing = [field for field in fields if field not in row]
        if missing:
            raise UserError(
                f"{where} has no field {missing[0]!r}",
                evidence=f"fields there: {', '.join(map(str, row))}",
                fix=f"--field {next(iter(row), '…')}",
            )
        row = {field: row[field] for field in fields}
    try:
        return (json.dumps(row, ensure_ascii=False, default=plain) + "\n").encode("utf-8", "surrogatepass")
    except TypeError as error:
        raise UserError(
            f"{where} cannot be written as JSON",
            evidence=str(error),
            fix="--field NAME    for each field that is text or numbers",
        ) from None


def plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a field holds {type(value).__name__}")
