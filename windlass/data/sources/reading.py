"""Cut text sources into pieces that processes can read independently, and read the documents of a piece."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from windlass.common.hub import first_line
from windlass.data.sources.files import InputFile, open_input, size_of, version_of
from windlass.data.sources.hub import HubFiles
from windlass.data.sources.records import BadRecordError, columns, example_text, is_selector, require_unicode
from windlass.data.sources.source import FileSource, HubSource, compression, file_format
from windlass.errors import UserError

UNIT_BYTES = 8 << 20  # text that a process takes on at once
SKIPPED_SHOWN = 3  # records left out that are named


@dataclass(frozen=True)
class FilePiece:
    """Part of a file: the lines that begin in a byte range, a range of row groups, or all of it."""

    path: str
    text_field: str
    begin: int
    end: int
    size: int  # bytes on disk, for progress
    version: str | None = None  # of a file in an object store
    skip_bad: bool = False  # leave out records that cannot be read


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
                if sum(piece.size for piece in small) >= UNIT_BYTES:
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
        yield from file_pieces(path, source.text_field, skip_bad=source.skip_bad)


def file_pieces(file: InputFile, text_field: str, *, skip_bad: bool = False) -> Iterator[FilePiece]:
    size, path, version = size_of(file), str(file), version_of(file)
    kind = file_format(Path(file.name))
    ranges: Iterable[tuple[int, int, int]] = [(0, size, size)] if size else []
    if kind == "jsonl" and not compression(path):  # a quoted field of .csv may hold line ends, so that is read whole
        ends = [min(size, begin + UNIT_BYTES) for begin in range(0, size, UNIT_BYTES)]
        ranges = [(begin, end, end - begin) for begin, end in zip(range(0, size, UNIT_BYTES), ends, strict=True)]
    elif kind == "parquet":
        ranges = parquet_ranges(path, version)
    for begin, end, length in ranges:
        yield FilePiece(path, text_field, begin, end, length, version, skip_bad)


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
    match compression(piece.path):
        case ".gz":
            return cast("BinaryIO", gzip.open(file))
        case ".bz2":
            return cast("BinaryIO", bz2.open(file))
        case ".xz":
            return cast("BinaryIO", lzma.open(file))
        case ".zst":
            pyarrow = import_pyarrow(".zst files")
            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
            return cast("BinaryIO", io.BufferedReader(stream))
        case _:
            return file


class Skipped:
    """How many records were left out because they cannot be read, and why the first ones were."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: list[str] = []

    def add(self, error: UserError) -> None:
        self.count += 1
        if len(self.reasons) < SKIPPED_SHOWN:
            self.reasons.append(error.what)


def documents(piece: Piece, skipped: Skipped | None = None) -> Iterator[str]:
    """The texts of a piece that are not empty, in order."""
    skipped = skipped or Skipped()
    if isinstance(piece, HubPiece):
        texts = hub_files(piece.source).documents(piece.file, 0, skipped.add)
    else:
        match file_format(Path(piece.path)):
            case "jsonl":
                texts = json_texts(piece, skipped)
            case "csv":
                texts = csv_texts(piece, skipped)
            case "parquet":
                texts = parquet_texts(piece, skipped)
            case _:
                if is_selector(piece.text_field):
                    raise UserError(
                        f"{piece.path} is a text; chats and instructions are records of .jsonl, .csv or .parquet"
                    )
                texts = iter([read_record(piece, skipped, whole_text, piece)])
    return (text for text in texts if text)


def read_record(piece: FilePiece, skipped: Skipped, read: Callable[..., str], *record: Any) -> str:
    """The text that `read` makes of a record; "" where it cannot be read and such records are left out."""
    try:
        return read(*record)
    except BadRecordError as error:
        if not piece.skip_bad:
            raise
        skipped.add(error)
        return ""


UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UNREADABLE = (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error)  # what the decompressors raise


def json_texts(piece: FilePiece, skipped: Skipped) -> Iterator[str]:
    compressed = compression(piece.path)
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
                    yield read_record(piece, skipped, text_of, line, piece, number)
        except UNREADABLE as error:
            raise UserError(f"{piece.path} cannot be read", evidence=f"after line {number + 1}: {error}") from None


def csv_texts(piece: FilePiece, skipped: Skipped) -> Iterator[str]:
    """Rows of a table whose first row names its columns."""
    csv.field_size_limit(1 << 30)
    tabs = piece.path.lower().removesuffix(compression(piece.path) or "").endswith(".tsv")
    with open_piece(piece) as file:
        # Bytes that are no UTF-8 come through as halves of pairs, so that the record they are in is named.
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(lines, delimiter="\t" if tabs else ",", strict=True)
        begin = 2
        try:
            rows.fieldnames = column_names(piece, list(rows.fieldnames or ()))
            for row in rows:
                yield read_record(piece, skipped, csv_text, row, piece, f"{piece.path}:{begin}")
                begin = rows.line_num + 1
        except csv.Error as error:
            raise UserError(f"{piece.path}:{begin} is not valid CSV", evidence=str(error)) from None
        except UNREADABLE as error:
            raise UserError(f"{piece.path} cannot be read", evidence=f"after line {begin}: {error}") from None


def column_names(piece: FilePiece, names: list[str]) -> list[str]:
    """The first line of a table, without the blanks that some programs put around names."""
    if names and names[0].startswith(("\udcff\udcfe", "\udcfe\udcff")):
        raise utf16(piece)
    other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if other:
        convert = f"import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={other!r}))"
        raise UserError(
            f"{piece.path} is not separated by commas",
            evidence=f"its columns are separated by {other!r}: {names[0][:80]}",
            fix=f'python -c "{convert}" < {piece.path} > NEW.csv',
        )
    return [name.strip() for name in names]


def utf16(piece: FilePiece) -> UserError:
    new = f"NEW{Path(piece.path).suffix}"
    return UserError(
        f"{piece.path} is UTF-16 text, and UTF-8 is expected",
        cause="Windows programs call it Unicode",
        fix=f"iconv -f utf-16 -t utf-8 {piece.path} > {new}",
    )


def csv_text(row: dict[str | None, Any], piece: FilePiece, where: str) -> str:
    if None in row or None in row.values():
        num_fields = sum(len(value) if key is None else value is not None for key, value in row.items())
        num_columns = sum(key is not None for key in row)
        raise BadRecordError(f"{where} has {num_fields} fields, the first line {num_columns}")
    if is_selector(piece.text_field):
        return example_text(row, piece.text_field, where)
    if piece.text_field not in row:
        raise missing_field(where, piece.text_field, row)
    return require_unicode(str(row[piece.text_field]), where)


def text_of(line: bytes, piece: FilePiece, number: int) -> str:
    if line.startswith(UTF16_MARKS):  # the first line of a file, or of a file that was put behind another
        raise utf16(piece)
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRecordError(
            f"{piece.path}:{line_number(piece, number)} is not UTF-8 text",
            evidence=f"{error}: {preview(line)}",
            fix=f"iconv -f cp1252 -t utf-8 {piece.path} > NEW.jsonl",
        ) from None
    except (ValueError, RecursionError) as error:
        where = f"{piece.path}:{line_number(piece, number)}"
        if number == 0 and piece.begin == 0 and line.strip() in (b"[", b"{"):
            raise one_value(
                piece, f"{piece.path} is one JSON value over several lines", items=line.strip() == b"["
            ) from None
        raise BadRecordError(f"{where} is not valid JSON", evidence=f"{error}: {preview(line)}") from None
    if number == 0 and piece.begin == 0 and isinstance(record, list) and record and isinstance(record[0], dict):
        raise one_value(piece, f"{piece.path}:1 is one JSON value, a list of records", items=True)
    try:
        return record_text(record, piece.text_field, piece.path, line)
    except UserError:  # the line is counted only once there is an error to report: the same again, with it
        return record_text(record, piece.text_field, f"{piece.path}:{line_number(piece, number)}", line)


def one_value(piece: FilePiece, what: str, *, items: bool) -> UserError:
    """A file that holds a list, or an object in many lines; the new file is never the one that is read."""
    old = Path(piece.path)
    new = old.with_name(f"{old.stem}.lines.jsonl")
    return UserError(
        f"{what}; one JSON object per line is expected",
        fix=f"jq -c '{'.[]' if items else '.'}' {old} > {new}",
    )


def record_text(record: Any, field: str, where: str, line: bytes) -> str:
    if is_selector(field):
        return example_text(record, field, where)
    if not isinstance(record, dict) or field not in record:
        raise missing_field(where, field, record)
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise BadRecordError(f"{where}: the field {field!r} is no text", evidence=preview(line))
    return require_unicode(text, where)


def missing_field(where: str, field: str, record: Any) -> UserError:
    if not isinstance(record, dict):
        return BadRecordError(f"{where} is {type(record).__name__}, not a JSON object with the field {field!r}")
    texts = [name for name, value in record.items() if isinstance(value, str)]
    return BadRecordError(
        f"{where} has no field {field!r}",
        evidence=f"fields there: {', '.join(map(str, record)) or 'none'}",
        fix=f"data.text_field={texts[0]} (or --text-field {texts[0]})" if texts else None,
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
            text = file.read()
            if text.startswith(UTF16_MARKS):
                raise utf16(piece)
            return text.decode("utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise BadRecordError(
            f"{piece.path} is not UTF-8 text",
            evidence=str(error),
            fix=f"iconv -f cp1252 -t utf-8 {piece.path} > NEW.txt    if it is of Windows or Latin-1",
        ) from None
    except UNREADABLE as error:
        raise UserError(f"{piece.path} cannot be read", evidence=str(error)) from None


def parquet_texts(piece: FilePiece, skipped: Skipped) -> Iterator[str]:
    file = open_parquet(piece.path, piece.version)
    schema, field = file.schema_arrow, piece.text_field
    if is_selector(field):
        wanted = [name for name in columns(field) if name in schema.names]
    else:
        wanted = [field]
        if field not in schema.names or not is_text(schema.field(field).type):
            raise no_text_column(piece, schema)
    for group in range(piece.begin, piece.end):
        number = 0
        for batch in parquet_batches(file, group, wanted, piece.path):
            for row in range(batch.num_rows):
                where = f"{piece.path}, row group {group}, row {number}"
                yield read_record(piece, skipped, parquet_text, batch, row, field, where)
                number += 1


def parquet_batches(file: Any, group: int, wanted: list[str], path: str) -> Iterator[Any]:
    try:
        yield from file.iter_batches(batch_size=1024, row_groups=[group], columns=wanted)
    except (OSError, ValueError) as error:  # a damaged page; Arrow's own are ValueErrors
        raise UserError(f"{path} cannot be read", evidence=f"row group {group}: {first_line(error)}") from None


def parquet_text(batch: Any, row: int, field: str, where: str) -> str:
    try:
        record = {name: batch.column(name)[row].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        raise BadRecordError(f"{where} is not UTF-8 text", evidence=str(error)) from None
    if is_selector(field):
        return example_text(record, field, where)
    return require_unicode(record[field] or "", where)


def is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view") or str(kind).startswith("dictionary<values=string")


def no_text_column(piece: FilePiece, schema: Any) -> UserError:
    field = piece.text_field
    columns = {name: schema.field(name).type for name in schema.names}
    texts = [name for name, kind in columns.items() if is_text(kind)]
    return UserError(
        f"the column {field!r} of {piece.path} is no text"
        if field in columns
        else f"{piece.path} has no field {field!r}",
        evidence="fields there: " + ", ".join(f"{name} ({kind})" for name, kind in columns.items())[:400],
        cause=None if texts else "none of the columns is a text; columns inside of structs are not read",
        fix=f"data.text_field={texts[0]} (or --text-field {texts[0]})"
        if texts
        else "write the text as a column of its own, or convert the file to .jsonl",
    )


def open_parquet(path: str, version: str | None = None) -> Any:
    pyarrow = import_pyarrow("parquet files")
    try:
        return pyarrow.parquet.ParquetFile(open_input(path, version))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is not a parquet file", evidence=first_line(error)) from None


def import_pyarrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{what} need pyarrow", fix="pip install 'windlass[train]'") from None
    return pyarrow


@lru_cache(maxsize=8)
def hub_files(source: HubSource) -> HubFiles:
    return HubFiles(source)
