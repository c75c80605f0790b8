"""Sequences out of token shards: fixed windows, read in an order that is a pure function of seed, step and position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

from windlass.data.sequences.order import permutation
from windlass.data.sequences.sequences import Batch, Sequence
from windlass.data.shards.folder import TokenShards
from windlass.errors import UserError

SEQUENCES_AHEAD = 64  # of one reader
MOST_AHEAD = 1 << 14


class Lookahead:
    """What a reader has asked for beyond the step it is at."""

    def __init__(self) -> None:
        self.windows: dict[int, int] = {}  # by index: so that the order is worked out once
        self._end = 0

    def steps(self, step: int, num_positions: int) -> range:
        """The steps to ask for now: some sequences ahead, at least two steps, those asked for before left out."""
        end = step + 1 + max(2, -(-SEQUENCES_AHEAD // max(1, num_positions)))
        begin = self._end if step < self._end <= end else step + 1
        self._end = end
        return range(begin, end)


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """The sequences [first, first + num_sequences) of something that has them by number.

    Without a seed they come in order. Which is read when follows from seed, step and position alone, so that a resume
    needs nothing but the step and the order is the same on any number of ranks.
    """

    name: str
    sequence_length: int
    first: int = 0
    num_sequences: int
    seed: int | None = None

    def sequence(self, number: int) -> Sequence:
        raise NotImplementedError

    def number_at(self, index: int) -> int:
        """The sequence read at `index` of the endless row of epochs."""
        epoch, place = divmod(index, self.num_sequences)
        if self.seed is not None:
            place = permutation(self.num_sequences, self.seed, epoch)[place]
        return self.first + place

    def at(self, index: int) -> Sequence:
        return self.sequence(self.number_at(index))

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        begin = step * global_batch
        return Batch(
            sequences=[self.at(begin + position) for position in positions],
            state=None,
            epoch=(begin + global_batch) / self.num_sequences,
        )

    def split(self, holdout: float) -> tuple[Self, Self]:
        """The sequences to train on, and the last ones, kept out of training, which come in order."""
        held_out = math.ceil(holdout * self.num_sequences)
        training = self.num_sequences - held_out
        if holdout and training < 1:
            raise all_held_out(self.name, self.num_sequences, self.sequence_length, holdout)
        later = replace(self, first=self.first + training, num_sequences=held_out, seed=None)
        return replace(self, num_sequences=training), later

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Nothing to do: the order follows from the step."""


@dataclass(frozen=True)
class Windows(Numbered):
    """Windows of a token stream, each overlapping the next by one token: so every token but the last few is a target
    exactly once.
    """

    shards: TokenShards
    _ahead: Lookahead = field(default_factory=Lookahead, init=False, compare=False, repr=False)

    @classmethod
    def whole(cls, shards: TokenShards, name: str, sequence_length: int) -> Windows:
        count = max(0, shards.num_tokens - 1) // sequence_length
        if count < 1:
            raise too_little(name, shards.num_tokens, sequence_length)
        return cls(shards, name=name, sequence_length=sequence_length, num_sequences=count)

    @property
    def vocab_size(self) -> int:
        return self.shards.vocab_size

    @property
    def tokenizer(self) -> tuple[str, str]:
        """Name and fingerprint of the one that made the tokens."""
        return self.shards.index.tokenizer.name, self.shards.index.tokenizer.fingerprint

    @property
    def description(self) -> str:
        count = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences:,} sequences"
        tokens = f"{self.num_sequences * self.sequence_length:,} tokens"
        return f"{self.name}, {tokens}, {count} of {self.sequence_length:,}{self.left_out}"

    @property
    def left_out(self) -> str:
        """What of the source is not here, in words."""
        return "".join(f", {count:,} {reason} left out" for reason, count in self.shards.index.left_out.items())

    def shuffled(self, seed: int) -> Self:
        return replace(self, seed=seed)

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        if self.shards.worth_prefetching:
            for later in self._ahead.steps(step, len(positions)):
                for position in positions:
                    self.prefetch(later * global_batch + position)
        return super().batch(step, global_batch, positions)

    def at(self, index: int) -> Sequence:
        window = self._ahead.windows.pop(index, None)
        return self.sequence(self.number_at(index) if window is None else window)

    def prefetch(self, index: int) -> None:
        """Fetch the tokens of a sequence in the background: it will be read soon."""
        windows = self._ahead.windows
        if len(windows) > MOST_AHEAD:  # left over from places that were jumped away from
            windows.clear()
        window = windows[index] = self.number_at(index)
        for begin, end in self.spans(window):
            self.shards.prefetch(begin, end)

    def spans(self, window: int) -> list[tuple[int, int]]:
        """The tokens a window is made of."""
        begin = window * self.sequence_length
        return [(begin, begin + self.sequence_length + 1)]

    def sequence(self, window: int) -> Sequence:
        begin = window * self.sequence_length
        tokens, starts = self.shards.read(begin, begin + self.sequence_length + 1)
        return Sequence(f"window:{window}", tokens, starts)


def too_little(name: str, num_tokens: int, sequence_length: int) -> UserError:
    return UserError(
        f"{name} holds {num_tokens:,} tokens, fewer than one sequence of {sequence_length:,} needs",
        evidence=f"{sequence_length + 1:,} tokens make one sequence and its last target",
        fix=f"data.sequence_length={max(2, num_tokens - 1)} or more text",
    )


def all_held_out(name: str, num_sequences: int, sequence_length: int, holdout: float) -> UserError:
    return UserError(
        f"data.holdout={holdout} leaves nothing to train on",
        evidence=f"{name} holds {num_sequences} sequence of {sequence_length:,} tokens",
        fix="data.holdout=0, a shorter data.sequence_length or more text",
    )
