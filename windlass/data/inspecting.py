"""What is in a folder of shards or in text files: counts, document lengths and a few samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.reading import documents, units_of
from windlass.data.shards import TokenShards
from windlass.data.sources import FileSource, ShardSource, local_source
from windlass.data.tokenizer import SHARD_TOKENIZER, load_tokenizer
from windlass.errors import UserError

SAMPLE_CHARACTERS = 400


@dataclass(frozen=True)
class Lengths:
    """How long documents are, in `unit`."""

    unit: str
    mean: float
    smallest: int
    median: int
    ninetieth: int
    largest: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64], unit: str) -> Lengths:
        if not len(lengths):
            return cls(unit, 0.0, 0, 0, 0, 0)
        smallest, median, ninetieth, largest = (int(one) for one in np.quantile(lengths, [0, 0.5, 0.9, 1]))
        return cls(unit, float(lengths.mean()), smallest, median, ninetieth, largest)


@dataclass(frozen=True)
class Inspection:
    path: str
    kind: str
    num_documents: int
    num_tokens: int | None
    lengths: Lengths
    samples: list[str]
    facts: dict[str, Any]


def inspect(path: Path, *, samples: int, text_field: str) -> Inspection:
    source = local_source(str(path), text_field)
    return inspect_shards(source, samples) if isinstance(source, ShardSource) else inspect_files(source, path, samples)


def inspect_shards(source: ShardSource, samples: int) -> Inspection:
    """Every checksum is compared on the way."""
    shards = TokenShards.open(source.folder)
    num_bytes = sum(size for _, size in shards.verify())
    index = shards.index
    tokenizer = load_tokenizer(str(source.folder / SHARD_TOKENIZER))
    if tokenizer.fingerprint != index.tokenizer.fingerprint:
        raise UserError(f"{source.folder / SHARD_TOKENIZER} is not the tokenizer that made the shards")
    return Inspection(
        path=str(source.folder),
        kind="token shards",
        num_documents=index.num_documents,
        num_tokens=index.num_tokens,
        lengths=Lengths.of(shards.document_lengths(), "tokens"),
        samples=[
            shortened(tokenizer.decode(shards.document(one)[:1000])) for one in spread(index.num_documents, samples)
        ],
        facts={
            "shards": len(index.shards),
            "bytes": num_bytes,
            "dtype": index.dtype,
            "tokenizer": index.tokenizer.name,
            "vocab_size": index.tokenizer.vocab_size,
            "eos_id": index.tokenizer.eos_id,
            "checksums": "all fit",
        },
    )


def inspect_files(source: FileSource, path: Path, samples: int) -> Inspection:
    lengths: list[int] = []
    first: list[str] = []
    for unit in units_of([source]):
        for piece in unit:
            for text in documents(piece):
                lengths.append(len(text))
                if len(first) < samples:
                    first.append(shortened(text))
    return Inspection(
        path=str(path),
        kind="text files",
        num_documents=len(lengths),
        num_tokens=None,
        lengths=Lengths.of(np.array(lengths, dtype=np.int64), "characters"),
        samples=first,
        facts={"files": len(source.files), "bytes": sum(file.stat().st_size for file in source.files)},
    )


def spread(count: int, samples: int) -> list[int]:
    """A few numbers out of [0, count), far apart."""
    return [place * count // samples for place in range(samples)] if count > samples else list(range(count))


def shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"
