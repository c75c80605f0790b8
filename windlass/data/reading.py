"""Cut text sources into pieces that processes can read independently, and read the documents of a piece."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from windlass.data.hub import HubFiles
from windlass.data.inputs import InputFile, open_input, size_of, version_of
from windlass.data.records import columns, example_text, is_selector
from windlass.data.sources import FileSource, HubSource, file_format
from windlass.errors import UserError

UNIT_BYTES = 8 << 20  # text that a process takes on at once


@dataclass(frozen=True)
class FilePiece:
    """Part of a file: the lines that begin in a byte range, a range of row groups, or all of it."""

    path: str
    text_field: str
    begin: int
    end: int
    size: int  # bytes on disk, for progress
    version: str | None = None  # of a file in an object store


@dataclass(frozen=True)
class HubPiece:
    """One file of a `datasets` source."""

    source: HubSource
    file: int
    size: int = 1  # files, for progress


Piece = FilePiece | HubPiece
Unit = tuple[Piece, ...]  # what a process tokenizes at once; the order of units is the order of the output


def units_of(sources: Sequence[FileSource | HubSource]) -> list[Unit]:
    """The sources as units of work, in an order that depends on the sources alone."""
    units: list[Unit] = []
    small: list[FilePiece] = []
    for source in sources:
        for piece in pieces_of(source):
            if isinstance(piece, FilePiece):
                small.append(piece)
                if sum(one.size for one in small) >= UNIT_BYTES:
                    units.append(tuple(small))
                    small = []
            else:
                if small:
                    units.append(tuple(small))
                    small = []
                units.append((piece,))
    return [*units, tuple(small)] if small else units


def pieces_of(source: FileSource | HubSource) -> Iterator[Piece]:
    if isinstance(source, HubSource):
        for number in range(hub_files(source).num_files):
            yield HubPiece(source, number)
        return
    for path in source.files:
        yield from file_pieces(path, source.text_field)


def file_pieces(file: InputFile, text_field: str) -> Iterator[FilePiece]:
    size, path, version = size_of(file), str(file), version_of(file)
    kind = file_format(Path(file.name))
    if kind == "jsonl" and not path.endswith(".gz"):
        for begin in range(0, size, UNIT_BYTES):
            end = min(size, begin + UNIT_BYTES)
            yield FilePiece(path, text_field, begin, end, end - begin, version)
    elif kind == "parquet":
        for begin, end, groups_size in parquet_ranges(path, version):
            yield FilePiece(path, text_field, begin, end, groups_size, version)
    elif size:
        yield FilePiece(path, text_field, 0, size, size, version)


def parquet_ranges(path: str, version: str | None) -> Iterator[tuple[int, int, int]]:
    """Row groups that make a piece: from, to, and their size."""
    metadata = open_parquet(path, version).metadata
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    begin = 0
    for group in range(len(sizes)):
        size = sum(sizes[begin : group + 1])
        if size >= UNIT_BYTES or group + 1 == len(sizes):
            yield begin, group + 1, size
            begin = group + 1


def open_piece(piece: FilePiece) -> BinaryIO:
    """The bytes of a piece's file, decompressed."""
    file = open_input(piece.path, piece.version)
    return cast("BinaryIO", gzip.open(file)) if piece.path.endswith(".gz") else file


def documents(piece: Piece) -> Iterator[str]:
    """The texts of a piece that are not empty, in order."""
    if isinstance(piece, HubPiece):
        texts = hub_files(piece.source).documents(piece.file, 0)
    else:
        match file_format(Path(piece.path)):
            case "jsonl":
                texts = json_texts(piece)
            case "parquet":
                texts = parquet_texts(piece)
            case _:
                if is_selector(piece.text_field):
                    raise UserError(f"{piece.path} is a text; chats and instructions are records of .jsonl or .parquet")
                texts = iter([whole_text(piece)])
    return (text for text in texts if text)


def json_texts(piece: FilePiece) -> Iterator[str]:
    compressed = piece.path.endswith(".gz")
    with open_piece(piece) as file:
        place = 0
        if piece.begin:
            # A line belongs to the piece in which it begins.
            file.seek(piece.begin - 1)
            place = piece.begin - 1 + len(file.readline())
        number = 0
        try:
            for number, line in enumerate(file):
                if not compressed and place >= piece.end:
                    return
                place += len(line)
                if not line.isspace():
                    yield text_of(line, piece, number)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise UserError(f"{piece.path} cannot be read", evidence=f"after line {number + 1}: {error}") from None


def text_of(line: bytes, piece: FilePiece, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        where = f"{piece.path}:{line_number(piece, number)}"
        if number == 0 and piece.begin == 0 and line.strip() in (b"[", b"{"):
            raise UserError(
                f"{piece.path} is one JSON value over several lines; one JSON object per line is expected",
                fix=f"jq -c '.[]' {piece.path} > {Path(piece.path).with_suffix('.jsonl')}",
            ) from None
        raise UserError(f"{where} is not valid JSON", evidence=f"{error}: {preview(line)}") from None
    if is_selector(piece.text_field):
        try:
            return example_text(record, piece.text_field, piece.path)
        except UserError:  # the line is counted only once there is an error to report: the same again, with it
            return example_text(record, piece.text_field, f"{piece.path}:{line_number(piece, number)}")
    if isinstance(record, dict) and isinstance(record.get(piece.text_field), str):
        return str(record[piece.text_field])
    where = f"{piece.path}:{line_number(piece, number)}"
    if isinstance(record, dict) and piece.text_field in record:
        if record[piece.text_field] is None:
            return ""
        raise UserError(f"{where}: the field {piece.text_field!r} is no text", evidence=preview(line))
    raise missing_field(where, piece.text_field, record)


def missing_field(where: str, field: str, record: Any) -> UserError:
    if not isinstance(record, dict):
        return UserError(f"{where} is {type(record).__name__}, not a JSON object with the field {field!r}")
    texts = [name for name, value in record.items() if isinstance(value, str)]
    return UserError(
        f"{where} has no field {field!r}",
        evidence=f"fields there: {', '.join(map(str, record)) or 'none'}",
        fix=f"data.text_field={texts[0]} (tokenize: --text-field {texts[0]})" if texts else None,
    )


def preview(line: bytes) -> str:
    return line[:80].decode("utf-8", "replace").strip()


def line_number(piece: FilePiece, number: int) -> int:
    """The line's number in its file; counted only once there is an error to report."""
    if not piece.begin:
        return number + 1
    with open_input(piece.path, piece.version) as file:
        before = sum(
            block.count(b"\n") for block in iter(lambda: file.read(min(1 << 20, piece.begin - file.tell())), b"")
        )
        file.seek(piece.begin - 1)
        starts_a_line = file.read(1) == b"\n"
    return before + number + (1 if starts_a_line else 2)


def whole_text(piece: FilePiece) -> str:
    """A text file is one document."""
    try:
        with open_piece(piece) as file:
            return file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{piece.path} is not UTF-8 text", evidence=str(error)) from None
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise UserError(f"{piece.path} cannot be read", evidence=str(error)) from None


def parquet_texts(piece: FilePiece) -> Iterator[str]:
    file = open_parquet(piece.path, piece.version)
    if is_selector(piece.text_field):
        yield from parquet_examples(file, piece)
        return
    if piece.text_field not in file.schema_arrow.names:
        raise missing_field(piece.path, piece.text_field, dict.fromkeys(file.schema_arrow.names, ""))
    for group in range(piece.begin, piece.end):
        for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[piece.text_field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise UserError(
                        f"the column {piece.text_field!r} of {piece.path} is no text", evidence=str(text)[:80]
                    )
                yield text or ""


def parquet_examples(file: Any, piece: FilePiece) -> Iterator[str]:
    there = list(file.schema_arrow.names)
    wanted = [name for name in columns(piece.text_field, there) if name in there]
    for group in range(piece.begin, piece.end):
        for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted):
            for number, row in enumerate(batch.to_pylist()):
                yield example_text(row, piece.text_field, f"{piece.path}, row group {group}, row {number}")


def open_parquet(path: str, version: str | None = None) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("parquet files need pyarrow", fix="pip install 'windlass[train]'") from None
    try:
        return pyarrow.parquet.ParquetFile(open_input(path, version))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a parquet file", evidence=str(error).splitlines()[0]) from None


@lru_cache(maxsize=8)
def hub_files(source: HubSource) -> HubFiles:
    return HubFiles(source)
