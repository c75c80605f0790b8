"""What is in shards or text files, here or in an object store: counts, document lengths and a few samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.build.cache import open_shards
from windlass.data.build.tokenizing import Progress
from windlass.data.sequences.mixing import Mixture
from windlass.data.sequences.opening import open_sequences
from windlass.data.sequences.packing import PackedRows
from windlass.data.sequences.windows import Windows
from windlass.data.shards.folder import LOSS_BIT, TokenShards
from windlass.data.sources.files import size_of
from windlass.data.sources.reading import Skipped, documents, units_of
from windlass.data.sources.records import selector
from windlass.data.sources.source import (
    FileSource,
    HubSource,
    PythonSource,
    ShardSource,
    StoreShardSource,
    parts_of,
    source_named,
)
from windlass.data.tokenizers.chat import encoder
from windlass.data.tokenizers.tokenizer import SHARD_TOKENIZER, Tokenizer, load_tokenizer
from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.data import DataSection

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
        smallest, median, ninetieth, largest = (int(length) for length in np.quantile(lengths, [0, 0.5, 0.9, 1]))
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


def inspect(path: str, *, samples: int, data: DataSection, tokenizer: str | None = None) -> Inspection:
    """What is at a path; chats and instructions, where `data` says so, are shown as a tokenizer makes them."""
    source = source_named(path, text_field=selector(data), skip_bad=data.bad_records == "skip")
    if isinstance(source, HubSource):
        raise UserError(
            f"{path} is a stream with no known end", fix=f"windlass data fetch {source.path} --samples 1000 -o FOLDER"
        )
    if isinstance(source, PythonSource):
        raise UserError(f"{path} is code, which is not run here", fix="windlass data inspect RUN.yaml --sequence ID")
    if not isinstance(source, FileSource):
        return inspect_shards(source, samples)
    if data.format == "text":
        return inspect_files(source, path, samples, show=shortened)
    if not tokenizer:
        raise UserError(
            f"--format {data.format} needs a tokenizer, whose template it is shown in", fix="--tokenizer NAME"
        )
    example = encoder(load_tokenizer(tokenizer), data)

    def rendered(text: str) -> str:
        tokens = np.array(example.encode_documents([text])[0], dtype=np.int64)
        return marked_text(example, tokens & ~LOSS_BIT, tokens >= LOSS_BIT)

    return inspect_files(source, path, samples, show=rendered)


def inspect_shards(source: ShardSource | StoreShardSource, samples: int) -> Inspection:
    """Of shards here every checksum is compared on the way; of those in a store the checksums of what is shown."""
    shards = open_shards(source, tokenizer="")
    index = shards.index
    if shards.remote is None:
        num_bytes, checksums = sum(size for _, size in shards.verify()), "all fit"
    else:
        num_bytes, checksums = index.num_tokens * index.itemsize, "compared when blocks are read"
    tokenizer = load_tokenizer(str(shards.folder / SHARD_TOKENIZER))
    if not index.loss_bit and tokenizer.fingerprint != index.tokenizer.fingerprint:
        raise UserError(f"{shards.folder / SHARD_TOKENIZER} is not the tokenizer that made the shards")
    return Inspection(
        path=source.url if isinstance(source, StoreShardSource) else str(source.folder),
        kind="token shards",
        num_documents=index.num_documents,
        num_tokens=index.num_tokens,
        lengths=Lengths.of(shards.document_lengths(), "tokens"),
        samples=[document_text(shards, tokenizer, number) for number in spread(index.num_documents, samples)],
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


def document_text(shards: TokenShards, tokenizer: Tokenizer, number: int) -> str:
    """A document of shards; of an example all of it, with what is trained on between marks."""
    tokens, _, trained = shards.read_marked(*shards.document_span(number))
    return shortened(tokenizer.decode(tokens[:1000])) if trained is None else marked_text(tokenizer, tokens, trained)


def marked_text(tokenizer: Tokenizer, tokens: NDArray[np.int64], trained: NDArray[np.bool_]) -> str:
    """Tokens as text, those that are trained on between ⟦ and ⟧."""
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts = []
    for begin, end in pairwise(edges):
        text = tokenizer.decode(tokens[begin:end])
        parts.append(f"⟦{text}⟧" if end > begin and trained[begin] else text)
    return "".join(parts)


@dataclass(frozen=True)
class SequenceText:
    """What a training sequence is made of."""

    id: str
    source: str
    num_tokens: int
    num_trained: int
    documents: list[tuple[int, str]]  # the number of each document of the source, and its text as far as it is here


def inspect_sequence(run: Run, name: str, *, tokenizer: str, progress: Progress | None = None) -> SequenceText:
    """The text of a sequence by the id that errors and logs name it with: window:12, row:3, 1/window:12."""
    kind, _, rest = name.rpartition("/")[2].partition(":")
    if kind == "lane":
        raise UserError(
            f"{name} is of a stream, whose sequences cannot be found by their number",
            fix="windlass data tokenize …    makes shards of it, whose sequences can",
        )
    opened = open_sequences(run, "train", tokenizer=tokenizer, progress=progress)
    number = name.partition("/")[0] if "/" in name else "0"
    parts = opened.parts if isinstance(opened, Mixture) else [opened]
    part = parts[int(number)] if number.isdigit() and int(number) < len(parts) else None
    expected = "row" if isinstance(part, PackedRows) else "window"
    if not isinstance(part, Windows) or kind != expected or not rest.isdigit():
        raise UserError(f"{name!r} names no sequence of this run", fix=f"--sequence {expected}:0")
    count = (
        len(part.packing.rows) if isinstance(part, PackedRows) else (part.shards.num_tokens - 1) // part.sequence_length
    )
    if int(rest) >= count:
        raise UserError(f"there is no {name}", evidence=f"{part.name} holds {count:,}, counted from 0")
    return _sequence_text(part, int(rest), name, tokenizer)


def _sequence_text(part: Windows, number: int, name: str, tokenizer: str) -> SequenceText:
    shards, sequence = part.shards, part.sequence(number)
    folder = shards.folder / SHARD_TOKENIZER
    loaded = load_tokenizer(str(folder) if folder.is_dir() else tokenizer)
    ends = np.cumsum(shards.document_lengths())
    documents = []
    spans = part.spans(number)
    for begin, end in spans:
        here = begin
        while here < end:
            document = int(np.searchsorted(ends, here, side="right"))
            stop = min(end, int(ends[document]))
            tokens, _, trained = shards.read_marked(here, stop)
            text = loaded.decode(tokens) if trained is None else marked_text(loaded, tokens, trained)
            documents.append((document, text))
            here = stop
    trained = sequence.loss
    num_tokens = sum(end - begin for begin, end in spans)
    return SequenceText(
        name, part.name, num_tokens, num_tokens - 1 if trained is None else int(trained[1:].sum()), documents
    )


def inspect_files(source: FileSource, path: str, samples: int, *, show: Callable[[str], str]) -> Inspection:
    lengths: list[int] = []
    first: list[str] = []
    skipped = Skipped()
    for unit in units_of([source]):
        for piece in unit:
            for text in documents(piece, skipped):
                lengths.append(len(text))
                if len(first) < samples:
                    first.append(show(text))
    return Inspection(
        path=path,
        kind="text files",
        num_documents=len(lengths),
        num_tokens=None,
        lengths=Lengths.of(np.array(lengths, dtype=np.int64), "characters"),
        samples=first,
        facts={
            "files": len(source.files),
            "bytes": sum(map(size_of, source.files)),
            **({"not read": ", ".join(source.ignored)} if source.ignored else {}),
            **({"left out: bad records": skipped.count} if skipped.count else {}),
        },
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
        SourceUse(data.source, share, available, count, count / available if available else None)
        for data, share, available, count in zip(parts_of(run.data), shares, parts, counts, strict=True)
    ]


def spread(count: int, samples: int) -> list[int]:
    """A few numbers out of [0, count), far apart."""
    return [place * count // samples for place in range(samples)] if count > samples else list(range(count))


def shortened(text: str) -> str:
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"
