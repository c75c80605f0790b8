"""Make the shipped corpus from Debian's r-cran-janeaustenr: one JSON line per chapter of Pride and Prejudice and Emma.

apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb unpacked && pip install rdata
python tools/make_austen_corpus.py unpacked/usr/lib/R/site-library/janeaustenr/data
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "windlass" / "data" / "assets" / "austen.jsonl.gz"
BOOKS = {"prideprejudice": "Pride and Prejudice", "emma": "Emma"}
HEADING = re.compile(r"^chapter\s+([0-9]+|[ivxlc]+)\.?$", re.IGNORECASE)
VOLUME = re.compile(r"^volume\s+[ivxlc]+\.?$", re.IGNORECASE)


def parse(serialized: bytes) -> Any:
    import rdata

    return rdata.conversion.convert(rdata.parser.parse_data(serialized))


def unpack(record: bytes) -> bytes:
    """One value of a lazy-load database: its length, then the data."""
    (size,) = struct.unpack(">I", record[:4])
    data = zlib.decompress(record[4:])
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes where {size} were announced")
    return data


def books(folder: Path) -> Iterator[tuple[str, list[str]]]:
    index = parse(gzip.decompress((folder / "Rdata.rdx").read_bytes()))
    database = (folder / "Rdata.rdb").read_bytes()
    for name, title in BOOKS.items():
        offset, length = (int(number) for number in index["variables"][name])
        yield title, [str(line) for line in parse(unpack(database[offset : offset + length]))]


def chapters(lines: list[str]) -> Iterator[str]:
    """The chapters' text, a line per paragraph; what stands before the first chapter is left out."""
    paragraphs: list[str] | None = None
    words: list[str] = []
    for line in [*lines, "", "Chapter 0"]:
        line = line.strip()
        if HEADING.match(line):
            if paragraphs:
                yield "\n".join(paragraphs) + "\n"
            paragraphs, words = [], []
        elif paragraphs is None or VOLUME.match(line):
            continue
        elif line:
            words.append(line)
        elif words:
            paragraphs.append(" ".join(words))
            words = []


def main() -> None:
    records = [
        {"text": text, "book": title, "chapter": number}
        for title, lines in books(Path(sys.argv[1]))
        for number, text in enumerate(chapters(lines), start=1)
    ]
    plain = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    OUT.write_bytes(gzip.compress(plain, 9, mtime=0))
    print(f"{OUT}: {len(records)} chapters, {len(plain):,} bytes of JSON, {OUT.stat().st_size:,} compressed")


if __name__ == "__main__":
    main()
