"""Sequences out of token shards: fixed windows, read in an order that is a pure function of seed, step and position."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from windlass.data.order import Permutation
from windlass.data.sequences import Batch, Sequence
from windlass.data.shards import TokenShards
from windlass.errors import UserError


@dataclass(frozen=True)
class Windows:
    """The windows [first, first + num_sequences) of a token stream, each overlapping the next by one token.

    So every token but the last few is a target exactly once. Without a seed they come in order.
    """

    shards: TokenShards
    name: str
    sequence_length: int
    first: int
    num_sequences: int
    seed: int | None = None

    @classmethod
    def whole(cls, shards: TokenShards, name: str, sequence_length: int) -> Windows:
        count = max(0, shards.num_tokens - 1) // sequence_length
        if count < 1:
            raise UserError(
                f"{name} holds {shards.num_tokens:,} tokens, fewer than one sequence of {sequence_length:,} needs",
                evidence=f"{sequence_length + 1:,} tokens make one sequence and its last target",
                fix=f"data.sequence_length={max(2, shards.num_tokens - 1)} or more text",
            )
        return cls(shards, name, sequence_length, first=0, num_sequences=count)

    @property
    def vocab_size(self) -> int:
        return self.shards.vocab_size

    @property
    def description(self) -> str:
        count = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences:,} sequences"
        return f"{self.name}, {self.num_sequences * self.sequence_length:,} tokens, {count} of {self.sequence_length:,}"

    def split(self, holdout: float) -> tuple[Windows, Windows]:
        """The windows to train on, and the last ones, kept out of training."""
        held_out = math.ceil(holdout * self.num_sequences)
        training = self.num_sequences - held_out
        if holdout and training < 1:
            raise UserError(
                f"data.holdout={holdout} leaves nothing to train on",
                evidence=f"{self.name} holds {self.num_sequences} sequence of {self.sequence_length:,} tokens",
                fix="data.holdout=0, a shorter data.sequence_length or more text",
            )
        return (
            replace(self, num_sequences=training),
            replace(self, first=self.first + training, num_sequences=held_out),
        )

    def shuffled(self, seed: int) -> Windows:
        return replace(self, seed=seed)

    def window(self, index: int) -> int:
        """The window read at `index` of the endless sequence of epochs."""
        epoch, place = divmod(index, self.num_sequences)
        if self.seed is not None:
            place = permutation(self.num_sequences, self.seed, epoch)[place]
        return self.first + place

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        begin = step * global_batch
        return Batch(
            sequences=[self.sequence(self.window(begin + position)) for position in positions],
            state=None,
            epoch=(begin + global_batch) / self.num_sequences,
        )

    def sequence(self, window: int) -> Sequence:
        begin = window * self.sequence_length
        tokens, starts = self.shards.read(begin, begin + self.sequence_length + 1)
        return Sequence(f"window:{window}", tokens, starts)

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Nothing to do: the order follows from the step."""


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed=seed, epoch=epoch)
