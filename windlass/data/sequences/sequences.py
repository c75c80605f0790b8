"""What the trainer reads: sequences of token ids, by step and position, from whatever source the run names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from windlass.data.shards.folder import TokenShards
from windlass.errors import UserError
from windlass.spec.data import DataSection

Part = Literal["train", "validation"]


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


def check_format(shards: TokenShards, name: str, data: DataSection) -> None:
    """Shards of examples are packed whole and masked; shards of texts are cut into windows."""
    if shards.index.loss_bit != (data.format != "text"):
        held = "examples (chats or instructions)" if shards.index.loss_bit else "plain texts"
        raise UserError(
            f"{name} holds {held}, but data.format is {data.format}",
            fix="data.format=chat    or instruction" if shards.index.loss_bit else "data.format=text",
        )


def check_stream(data: DataSection, *, training: bool) -> None:
    """What cannot be done with a source that has neither known lengths nor an end."""
    if data.format != "text":
        raise UserError(
            f"data.format={data.format} cannot be read from the stream {data.source}",
            cause="examples are packed whole, and a stream has no known lengths",
            fix=f"windlass data tokenize {data.source} --format {data.format} -o FOLDER, then data.source=FOLDER",
        )
    if training and data.holdout:
        raise UserError(
            f"data.holdout cannot be taken from the stream {data.source}",
            cause="a stream has no known end, so no share of it can be kept apart",
            fix="data.holdout=0 data.validation_source=… (for allenai/c4: data.validation_source=hf:allenai/c4)",
        )
