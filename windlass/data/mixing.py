"""Several sources as one: whose turn it is follows from step and position, and each source counts its own sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windlass.data.sequences import Batch, Sequence
from windlass.data.shares import Shares
from windlass.data.stream import Exchange, Stream
from windlass.data.windows import Lookahead, Windows
from windlass.spec.data import DataSection

Part = Windows | Stream


def parts_of(data: DataSection) -> list[DataSection]:
    """The sections of the mixed sources, each as if it were the only one; of a single source, its own."""
    return [
        data.model_copy(
            update={
                "source": one.source,
                "sources": (),
                "config": one.config,
                "split": one.split or data.split,
                "revision": one.revision,
                "files": one.files,
                "text_field": one.text_field or data.text_field,
            }
        )
        for one in data.sources
    ] or [data]


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
        return [one for one in lane if self.turns.owner(step, one, global_batch) == self.source]

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
                part.deal(SharedDealing(self.turns, number))

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
            self._want_ahead(step, global_batch, positions)
        owners = {one: self.turns.owner(step, one, global_batch) for one in positions}
        found: dict[int, Sequence] = {}
        state: dict[str, Any] = {}
        epoch = 0.0
        for number, part in enumerate(self.parts):
            mine = [one for one in positions if owners[one] == number]
            if isinstance(part, Stream):  # in every step, also where it has no turn: its lanes' places are saved
                batch = part.batch(step, global_batch, positions)
                sequences, seen = batch.sequences, batch.epoch
                state[f"lanes of source {number}"] = (batch.state or {}).get("lanes", {})
            else:
                sequences = [part.at(self._own_index(number, step, one, global_batch)) for one in mine]
                seen = self.shares.before(number, (step + 1) * global_batch) / part.num_sequences
            for one, sequence in zip(mine, sequences, strict=True):
                found[one] = replace(sequence, id=f"{number}/{sequence.id}")
            epoch += self.shares.fractions[number] * seen
        return Batch([found[one] for one in positions], state or None, epoch)

    def _own_index(self, number: int, step: int, position: int, global_batch: int) -> int:
        return self.shares.before(number, self.turns.index(step, position, global_batch))

    def _want_ahead(self, step: int, global_batch: int, positions: list[int]) -> None:
        for later in self._ahead.steps(step, len(positions)):
            for one in positions:
                number = self.turns.owner(later, one, global_batch)
                part = self.parts[number]
                if isinstance(part, Windows) and part.shards.comes_from_afar:
                    part.want(self._own_index(number, later, one, global_batch))

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
