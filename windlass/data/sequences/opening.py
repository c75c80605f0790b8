"""Open what a run reads: its sequences, of one source or of a mixture, and the tokenizer of its data."""

from __future__ import annotations

import logging
from pathlib import Path

from windlass.data.build.cache import open_shards
from windlass.data.build.tokenizing import Progress
from windlass.data.sequences.mixing import LONGEST_CYCLE, Mixture, whole_counts
from windlass.data.sequences.own import open_own
from windlass.data.sequences.packing import PackedRows
from windlass.data.sequences.sequences import Part, Sequences, check_format, check_stream
from windlass.data.sequences.stream import Stream, open_stream
from windlass.data.sequences.windows import Windows
from windlass.data.shards.folder import TokenShards
from windlass.data.sources.source import HubSource, PythonSource, ShardSource, StoreShardSource, parse_source, parts_of
from windlass.data.tokenizers.chat import encoder
from windlass.data.tokenizers.tokenizer import SHARD_TOKENIZER, Tokenizer, from_folder, load_tokenizer
from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.data import DataSection

log = logging.getLogger(__name__)


def open_sequences(run: Run, part: Part, *, tokenizer: str, progress: Progress | None = None) -> Sequences | None:
    """The run's training or validation sequences; None where the run has no validation data.

    Text is tokenized once per host into the cache, and `progress` called meanwhile; every rank may call this at once.
    """
    data = run.data
    if data.sequence_length is None:
        raise ValueError("data.sequence_length must be resolved before sequences are opened")
    if part == "validation" and not data.validation_source and not data.holdout:
        return None
    own_validation = part == "validation" and data.validation_source is not None
    if data.sources and not own_validation:
        return open_mixture(run, part, tokenizer=tokenizer, progress=progress)
    source = parse_source(data, "validation" if own_validation else "train")
    if isinstance(source, HubSource):
        check_stream(data, training=not own_validation)
        return open_stream(
            source,
            load_tokenizer(tokenizer).with_added(data.special_tokens),
            sequence_length=data.sequence_length,
            seed=run.train.seed if data.shuffle and part == "train" else None,
            shuffle_window=data.shuffle_window,
        )
    if isinstance(source, PythonSource):
        items = open_own(source.path, run, part if own_validation else "train", tokenizer=tokenizer)
        return items if own_validation else items.split(data.holdout)[part == "validation"]
    shards = open_shards(
        source,
        tokenizer=tokenizer,
        progress=progress,
        cache_gib=data.cache_gib,
        load=lambda name: encoder(load_tokenizer(name), data),
    )
    made_by = shards.index.tokenizer.name
    name = data.tokenizer or tokenizer  # `tokenizer` may be the folder that it was fetched into
    if isinstance(source, ShardSource | StoreShardSource) and made_by != name:
        log.warning("%s was made with the tokenizer %s; the run's is %s", source.name, made_by, name)
    check_format(shards, source.name, data)
    windows = windows_of(shards, source.name, data, data.sequence_length)
    if own_validation:
        return windows
    training, held_out = windows.split(data.holdout)
    if part == "validation":
        return held_out
    return training.shuffled(run.train.seed) if data.shuffle else training


def windows_of(shards: TokenShards, name: str, data: DataSection, sequence_length: int) -> Windows:
    """Shards of examples as packed rows, others as windows."""
    if shards.index.loss_bit:
        # half of a pair is none
        return PackedRows.packed(
            shards, name, sequence_length, "drop" if data.format == "preference" else data.too_long
        )
    return Windows.whole(shards, name, sequence_length)


def open_mixture(run: Run, part: Part, *, tokenizer: str, progress: Progress | None) -> Mixture:
    check_weights(run.data)
    mixed: list[Windows | Stream] = []
    for data in parts_of(run.data):
        source = run.model_copy(update={"data": data})
        sequences = open_sequences(source, part, tokenizer=tokenizer, progress=progress)
        if not isinstance(sequences, Windows | Stream):
            raise UserError(
                f"{data.source} cannot be mixed with other sources", evidence=f"data.format is {data.format}"
            )
        mixed.append(sequences)
    check_tokenizers(mixed, run.data)
    return Mixture(mixed, [source.weight for source in run.data.sources])


def check_weights(data: DataSection) -> None:
    counts = whole_counts([mixed.weight for mixed in data.sources])
    for mixed, count in zip(data.sources, counts, strict=True):
        if not count:
            raise UserError(
                f"the weight {mixed.weight:g} of {mixed.source} is too small beside the others",
                evidence=f"it would have less than one sequence in {LONGEST_CYCLE:,}",
                fix=f"leave {mixed.source} out, or give it a larger weight",
            )


def check_tokenizers(parts: list[Windows | Stream], data: DataSection) -> None:
    """Ids of one tokenizer mean nothing beside those of another."""
    made_by = {source.source: part.tokenizer for source, part in zip(data.sources, parts, strict=True)}
    if len({fingerprint for _, fingerprint in made_by.values()}) > 1:
        raise UserError(
            "the sources of this run were made with different tokenizers",
            evidence="\n".join(f"{source}: {name} ({print_[:12]})" for source, (name, print_) in made_by.items()),
            fix="windlass data tokenize … --tokenizer NAME    with one NAME for all",
        )


def tokenizer_of(data: DataSection, place: str | None = None) -> Tokenizer:
    """The tokenizer of a resolved run's training data; shards bring their own, so that no hub is asked for it.

    `place` is the folder that a hub's tokenizer is in on this machine.
    """
    assert data.tokenizer
    own = own_tokenizer(data)
    if own is not None:
        return from_folder(own, data.tokenizer).with_added(data.special_tokens)
    return load_tokenizer(place or data.tokenizer).with_added(data.special_tokens)


def own_tokenizer(data: DataSection) -> Path | None:
    """The tokenizer beside the shards that a run reads, if it reads any."""
    for part in parts_of(data):
        source = parse_source(part, "train")
        if isinstance(source, ShardSource | StoreShardSource):
            folder = open_shards(source, tokenizer="", cache_gib=data.cache_gib).folder / SHARD_TOKENIZER
            if folder.is_dir():
                return folder
    return None
