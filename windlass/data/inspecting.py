"""What is in shards or text files, here or in an object store: counts, document lengths and a few samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.cache import open_shards
from windlass.data.inputs import size_of
from windlass.data.mixing import Mixture, parts_of
from windlass.data.reading import documents, units_of
from windlass.data.sequences import Progress, open_sequences
from windlass.data.sources import FileSource, HubSource, ShardSource, StoreShardSource, source_named
from windlass.data.tokenizer import SHARD_TOKENIZER, load_tokenizer
from windlass.errors import UserError
from windlass.spec import Run

SAMPLE_CHARACTERS = 400
BARS = 12  # of a histogram, at most


@dataclass(frozen=True)
class Bar:
    """Documents whose length is from `low` up to, and not, `high`."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Lengths:
    """How long documents are, in `unit`."""

    unit: str
    mean: float
    smallest: int
    median: int
    ninetieth: int
    largest: int
    histogram: list[Bar]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], unit: str) -> Lengths:
        if not len(lengths):
            return cls(unit, 0.0, 0, 0, 0, 0, [])
        smallest, median, ninetieth, largest = (int(one) for one in np.quantile(lengths, [0, 0.5, 0.9, 1]))
        return cls(unit, float(lengths.mean()), smallest, median, ninetieth, largest, histogram(lengths))


def histogram(lengths: NDArray[np.int64]) -> list[Bar]:
    """Lengths by powers of two; the shortest ones together where those would be many bars."""
    top = int(lengths.max()).bit_length()
    bottom = max(int(lengths.min()).bit_length() - 1, top - BARS, 0)
    edges = [0 if bottom == max(0, top - BARS) else 2**bottom, *(2**power for power in range(bottom + 1, top + 1))]
    counts, _ = np.histogram(lengths, bins=[*edges[:-1], edges[-1]])
    return [Bar(low, high, int(count)) for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)]


@dataclass(frozen=True)
class Inspection:
    path: str
    kind: str
    num_documents: int
    num_tokens: int | None
    lengths: Lengths
    samples: list[str]
    facts: dict[str, Any]


def inspect(path: str, *, samples: int, text_field: str) -> Inspection:
    source = source_named(path, text_field=text_field)
    if isinstance(source, HubSource):
        raise UserError(
            f"{path} is a stream with no known end", fix=f"windlass data fetch {source.path} --samples 1000 -o FOLDER"
        )
    return inspect_files(source, path, samples) if isinstance(source, FileSource) else inspect_shards(source, samples)


def inspect_shards(source: ShardSource | StoreShardSource, samples: int) -> Inspection:
    """Of shards here every checksum is compared on the way; of those in a store the checksums of what is shown."""
    shards = open_shards(source, tokenizer="")
    index = shards.index
    if shards.remote is None:
        num_bytes, checksums = sum(size for _, size in shards.verify()), "all fit"
    else:
        num_bytes, checksums = index.num_tokens * index.itemsize, "compared when blocks are read"
    tokenizer = load_tokenizer(str(shards.folder / SHARD_TOKENIZER))
    if tokenizer.fingerprint != index.tokenizer.fingerprint:
        raise UserError(f"{shards.folder / SHARD_TOKENIZER} is not the tokenizer that made the shards")
    return Inspection(
        path=source.url if isinstance(source, StoreShardSource) else str(source.folder),
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
            **{f"left out: {reason}": count for reason, count in index.left_out.items()},
            "checksums": checksums,
        },
    )


def inspect_files(source: FileSource, path: str, samples: int) -> Inspection:
    lengths: list[int] = []
    first: list[str] = []
    for unit in units_of([source]):
        for piece in unit:
            for text in documents(piece):
                lengths.append(len(text))
                if len(first) < samples:
                    first.append(shortened(text))
    return Inspection(
        path=path,
        kind="text files",
        num_documents=len(lengths),
        num_tokens=None,
        lengths=Lengths.of(np.array(lengths, dtype=np.int64), "characters"),
        samples=first,
        facts={"files": len(source.files), "bytes": sum(map(size_of, source.files))},
    )


@dataclass(frozen=True)
class SourceUse:
    """What a run takes from one of its sources."""

    source: str
    share: float
    num_sequences: int | None  # None: a stream
    sequences_read: int  # by the whole run
    epochs: float | None


def inspect_run(run: Run, *, tokenizer: str, progress: Progress | None = None) -> list[SourceUse]:
    """How often a resolved run reads each of its sources, exactly."""
    opened = open_sequences(run, "train", tokenizer=tokenizer, progress=progress)
    total = run.train.steps * run.train.global_batch
    if isinstance(opened, Mixture):
        parts = [part.num_sequences for part in opened.parts]
        shares, counts = opened.shares.fractions, opened.counts(total)
    else:
        assert opened is not None
        parts, shares, counts = [opened.num_sequences], [1.0], [total]
    return [
        SourceUse(data.source, share, there, count, count / there if there else None)
        for data, share, there, count in zip(parts_of(run.data), shares, parts, counts, strict=True)
    ]


def spread(count: int, samples: int) -> list[int]:
    """A few numbers out of [0, count), far apart."""
    return [place * count // samples for place in range(samples)] if count > samples else list(range(count))


def shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"
