"""What the trainer reads: sequences of token ids, by step and position, from whatever source the run names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from windlass.data.sources.source import HubSource, ShardSource, StoreShardSource, parse_source
from windlass.errors import UserError
from windlass.spec import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from windlass.data.shards.folder import TokenShards
    from windlass.spec.data import DataSection

log = logging.getLogger(__name__)

Part = Literal["train", "validation"]
Progress = Callable[[int, int], None]  # (done, total), in bytes of text


@dataclass(frozen=True)
class Sequence:
    """One training sequence: inputs are tokens[:-1], targets tokens[1:]."""

    id: str  # "window:123", or "lane:5:17:0" (lane, window of the lane, epoch): what was read, for errors and tests
    tokens: NDArray[np.int64]  # length sequence_length + 1
    document_starts: NDArray[np.int64]  # sorted offsets in [0, sequence_length] where a document begins
    loss: NDArray[np.bool_] | None = None  # which tokens are trained on; None: all


@dataclass(frozen=True)
class Batch:
    """The sequences of one step at the positions a reader asked for."""

    sequences: list[Sequence]  # in the order of the positions asked for
    state: dict[str, Any] | None  # where reading goes on after this batch; None: the step alone says it
    epoch: float  # how often the data has been seen once this batch is used


class Sequences(Protocol):
    """A source of sequences that any number of readers share by asking for different positions of each step."""

    @property
    def num_sequences(self) -> int | None:
        """How many there are; None: a stream."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer that made the tokens."""
        ...

    @property
    def description(self) -> str:
        """One line for the plan: "austen, 412,331 tokens, 1,610 sequences of 256"."""
        ...

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        """The sequences at `positions` of the global batch of `step`, which counts from 0."""
        ...

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Go on at `step`; `state` is that of all readers after the step before, their lanes put together."""
        ...


def open_sequences(run: Run, part: Part, *, tokenizer: str, progress: Progress | None = None) -> Sequences | None:
    """The run's training or validation sequences; None where the run has no validation data.

    Text is tokenized once per host into the cache (`progress` hears of it); every rank may call this at the same time.
    """
    data = run.data
    if data.sequence_length is None:
        raise ValueError("data.sequence_length must be resolved before sequences are opened")
    if part == "validation" and not data.validation_source and not data.holdout:
        return None
    own_validation = part == "validation" and data.validation_source is not None
    if data.sources and not own_validation:
        from windlass.data.sequences.opening import open_mixture

        return open_mixture(run, part, tokenizer=tokenizer, progress=progress)
    source = parse_source(data, "validation" if own_validation else "train")
    if isinstance(source, HubSource):
        if data.holdout and not own_validation:
            raise holdout_of_a_stream(data.source)
        if data.format != "text":
            raise examples_of_a_stream(data.source, data.format)
        from windlass.data.sequences.stream import open_stream
        from windlass.data.tokenizers.tokenizer import load_tokenizer

        return open_stream(
            source,
            load_tokenizer(tokenizer).with_added(data.special_tokens),
            sequence_length=data.sequence_length,
            seed=run.train.seed,
            shuffle=data.shuffle and part == "train",
        )

    from windlass.data.build.cache import open_shards
    from windlass.data.sequences.packing import PackedRows
    from windlass.data.sequences.windows import Windows
    from windlass.data.tokenizers.chat import encoder
    from windlass.data.tokenizers.tokenizer import load_tokenizer

    shards = open_shards(
        source,
        tokenizer=tokenizer,
        progress=progress,
        cache_gib=data.cache_gib,
        load=lambda name: encoder(load_tokenizer(name), data),
    )
    made_by = shards.index.tokenizer.name
    if isinstance(source, ShardSource | StoreShardSource) and made_by != tokenizer:
        log.warning("%s was made with the tokenizer %s; the run's is %s", source.name, made_by, tokenizer)
    check_format(shards, source.name, data)
    if shards.index.loss_bit:
        windows: Windows = PackedRows.packed(shards, source.name, data.sequence_length, data.too_long)
    else:
        windows = Windows.whole(shards, source.name, data.sequence_length)
    if own_validation:
        return windows
    training, held_out = windows.split(data.holdout)
    if part == "validation":
        return held_out
    return training.shuffled(run.train.seed) if data.shuffle else training


def check_format(shards: TokenShards, name: str, data: DataSection) -> None:
    """Shards of examples are packed whole and masked; shards of texts are cut into windows."""
    if shards.index.loss_bit != (data.format != "text"):
        held = "examples (chats or instructions)" if shards.index.loss_bit else "plain texts"
        raise UserError(
            f"{name} holds {held}, but data.format is {data.format}",
            fix="data.format=chat    or instruction" if shards.index.loss_bit else "data.format=text",
        )


def examples_of_a_stream(source: str, form: str) -> UserError:
    return UserError(
        f"data.format={form} cannot be read from the stream {source}",
        cause="examples are packed whole, and a stream has no known lengths",
        fix=f"windlass data tokenize {source} --format {form} -o FOLDER, then data.source=FOLDER",
    )


def holdout_of_a_stream(source: str) -> UserError:
    return UserError(
        f"data.holdout cannot be taken from the stream {source}",
        cause="a stream has no known end, so no share of it can be kept apart",
        fix="data.holdout=0 data.validation_source=… (for allenai/c4: data.validation_source=hf:allenai/c4)",
    )
