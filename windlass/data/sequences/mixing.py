"""Which of several sources each sequence comes from: after any number of sequences, every source has its share.

Several sources as one: whose turn it is follows from step and position, and each source counts its own sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from windlass.data.sequences.sequences import Batch, Sequence
from windlass.data.sequences.stream import Exchange, Stream
from windlass.data.sequences.windows import Lookahead, Windows

LONGEST_CYCLE = 20_000


class Shares:
    """A cycle of sources in which each keeps its share at every point.

    After n sequences a source with share w has had ⌊n·w⌋ or ⌈n·w⌉ of them. Such a cycle always exists; it is found by
    Tijdeman's rule: of the sources that may come next without running ahead, the one that would fall behind first.
    """

    def __init__(self, weights: Several[float]) -> None:
        self.counts = whole_counts(weights)
        self.cycle = sum(self.counts)
        self._owners = np.array(dealt(self.counts), dtype=np.int16)
        every = self._owners[None, :] == np.arange(len(self.counts))[:, None]
        before = np.concatenate([np.zeros((len(self.counts), 1), dtype=np.int64), every.cumsum(axis=1)], axis=1)
        self._owners_list: list[int] = self._owners.tolist()
        self._before: list[list[int]] = before.tolist()

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def fractions(self) -> list[float]:
        return [count / self.cycle for count in self.counts]

    def owner(self, index: int) -> int:
        """The source of sequence number `index`."""
        return self._owners_list[index % self.cycle]

    def before(self, source: int, index: int) -> int:
        """How many of the first `index` sequences are the source's."""
        cycles, rest = divmod(index, self.cycle)
        return cycles * self.counts[source] + self._before[source][rest]

    def owners(self, indexes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int, ...], np.dtype]:
        """The sources of many sequences at once."""
        return self._owners[indexes % self.cycle]


def whole_counts(weights: Several[float]) -> list[int]:
    """The weights as sequences of a cycle: exactly, or to one in LONGEST_CYCLE where that would take longer."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts]
    if sum(counts) <= LONGEST_CYCLE:
        return counts
    total = sum(exact)
    wanted = [weight / total * LONGEST_CYCLE for weight in exact]
    rounded = [int(count) for count in wanted]
    by_rest = sorted(range(len(exact)), key=lambda k: (rounded[k] - wanted[k], k))
    for place in by_rest[: LONGEST_CYCLE - sum(rounded)]:
        rounded[place] += 1
    return rounded


def dealt(counts: Several[int]) -> list[int]:
    """The sources of one cycle, in order. All in whole numbers: the same on every machine."""
    cycle = sum(counts)
    slack = max(1, 2 * len(counts) - 2)
    had = [0] * len(counts)
    order = []
    for number in range(1, cycle + 1):
        behind = [count * number - cycle * got for count, got in zip(counts, had, strict=True)]
        ready = [k for k in range(len(counts)) if slack * behind[k] >= cycle]
        following = min(ready, key=lambda k: (Fraction((slack - 1) * cycle - slack * behind[k], counts[k]), k))
        had[following] += 1
        order.append(following)
    return order


Part = Windows | Stream


@dataclass(frozen=True)
class Turns:
    """Whose turn it is at every position of every step.

    Where there are streams, whose lanes belong to positions, the turns move on by one position each step: so every
    position has every source's share in the long run, and no lane is left unread.
    """

    shares: Shares
    moving: bool

    def index(self, step: int, position: int, global_batch: int) -> int:
        """The number of a sequence among all of the mixture."""
        return step * global_batch + ((position + step) % global_batch if self.moving else position)

    def owner(self, step: int, position: int, global_batch: int) -> int:
        return self.shares.owner(self.index(step, position, global_batch))


@dataclass(frozen=True)
class SharedDealing:
    """Of a lane's positions, those at which it is the source's turn."""

    turns: Turns
    source: int

    def positions(self, step: int, lane: range, global_batch: int) -> list[int]:
        return [position for position in lane if self.turns.owner(step, position, global_batch) == self.source]

    def before(self, step: int, lane: range, global_batch: int) -> int:
        positions = np.array(lane, dtype=np.int64)
        total = 0
        for first in range(0, step, 1 << 14):
            steps = np.arange(first, min(step, first + (1 << 14)), dtype=np.int64)[:, None]
            places = (positions + steps) % global_batch if self.turns.moving else positions
            total += int((self.turns.shares.owners(steps * global_batch + places) == self.source).sum())
        return total


class Mixture:
    """Sequences of several sources by weight; `Windows` are found by number, streams keep their lanes' places."""

    def __init__(self, parts: Several[Part], weights: Several[float]) -> None:
        self.parts = list(parts)
        self.shares = Shares(weights)
        self.turns = Turns(self.shares, moving=any(isinstance(part, Stream) for part in parts))
        self._ahead = Lookahead()
        self._remote = any(isinstance(part, Windows) and part.shards.remote is not None for part in parts)
        for number, part in enumerate(self.parts):
            if isinstance(part, Stream):
                part.dealing = SharedDealing(self.turns, number)

    @property
    def vocab_size(self) -> int:
        return max(part.vocab_size for part in self.parts)

    @property
    def num_sequences(self) -> int | None:
        """As many as can be read before one of the sources begins anew; None: there is a stream."""
        counts = [part.num_sequences for part in self.parts]
        if None in counts:
            return None
        most = min(
            count * self.shares.cycle // share for count, share in zip(counts, self.shares.counts, strict=True) if count
        )
        while any(self.shares.before(k, most) > (count or 0) for k, count in enumerate(counts)):
            most -= 1
        return most

    @property
    def description(self) -> str:
        shares = zip(self.parts, self.shares.fractions, strict=True)
        return " + ".join(f"{share:.4g} of {part.description}" for part, share in shares)

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        if self._remote:
            self._prefetch_ahead(step, global_batch, positions)
        owners = {position: self.turns.owner(step, position, global_batch) for position in positions}
        by_position: dict[int, Sequence] = {}
        state: dict[str, Any] = {}
        epoch = 0.0
        for number, part in enumerate(self.parts):
            mine = [position for position in positions if owners[position] == number]
            if isinstance(part, Stream):  # in every step, also where it has no turn: its lanes' places are saved
                batch = part.batch(step, global_batch, positions)
                sequences, seen = batch.sequences, batch.epoch
                state[f"lanes of source {number}"] = (batch.state or {}).get("lanes", {})
            else:
                sequences = [part.at(self._own_index(number, step, position, global_batch)) for position in mine]
                seen = self.shares.before(number, (step + 1) * global_batch) / part.num_sequences
            for position, sequence in zip(mine, sequences, strict=True):
                by_position[position] = replace(sequence, id=f"{number}/{sequence.id}")
            epoch += self.shares.fractions[number] * seen
        return Batch([by_position[position] for position in positions], state or None, epoch)

    def _own_index(self, number: int, step: int, position: int, global_batch: int) -> int:
        return self.shares.before(number, self.turns.index(step, position, global_batch))

    def _prefetch_ahead(self, step: int, global_batch: int, positions: list[int]) -> None:
        for later in self._ahead.steps(step, len(positions)):
            for position in positions:
                number = self.turns.owner(later, position, global_batch)
                part = self.parts[number]
                if isinstance(part, Windows) and part.shards.worth_prefetching:
                    part.prefetch(self._own_index(number, later, position, global_batch))

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        for number, part in enumerate(self.parts):
            lanes = (state or {}).get(f"lanes of source {number}")
            part.restore(step, {"lanes": lanes} if lanes else None)

    def share(self, exchange: Exchange) -> None:
        """Read only what this reader's positions need of the streams among the sources."""
        for part in self.parts:
            if isinstance(part, Stream):
                part.share(exchange)

    def counts(self, num_sequences: int) -> list[int]:
        """How many of the first so many sequences come from each source."""
        return [self.shares.before(number, num_sequences) for number in range(len(self.parts))]
