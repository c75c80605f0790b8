"""Which of several sources each sequence comes from: after any number of sequences, every source has its share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LONGEST_CYCLE = 20_000


class Shares:
    """A cycle of sources in which each keeps its share at every point.

    After n sequences a source with share w has had ⌊n·w⌋ or ⌈n·w⌉ of them. Such a cycle always exists; it is found by
    Tijdeman's rule: of the sources that may come next without running ahead, the one that would fall behind first.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = whole_counts(weights)
        self.cycle = sum(self.counts)
        self._owners = np.array(dealt(self.counts), dtype=np.int16)
        every = self._owners[None, :] == np.arange(len(self.counts))[:, None]
        self._before = np.concatenate([np.zeros((len(self.counts), 1), dtype=np.int64), every.cumsum(axis=1)], axis=1)
        self._owners_list: list[int] = self._owners.tolist()
        self._before_lists: list[list[int]] = self._before.tolist()

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
        return cycles * self.counts[source] + self._before_lists[source][rest]

    def owners(self, indexes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int, ...], np.dtype]:
        """The sources of many sequences at once."""
        return self._owners[indexes % self.cycle]


def whole_counts(weights: Sequence[float]) -> list[int]:
    """The weights as sequences of a cycle: exactly, or to one in LONGEST_CYCLE where that would take longer."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    counts = [int(one * scale) for one in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts]
    if sum(counts) <= LONGEST_CYCLE:
        return counts
    total = sum(exact)
    wanted = [one / total * LONGEST_CYCLE for one in exact]
    rounded = [int(one) for one in wanted]
    by_rest = sorted(range(len(exact)), key=lambda k: (rounded[k] - wanted[k], k))
    for place in by_rest[: LONGEST_CYCLE - sum(rounded)]:
        rounded[place] += 1
    return rounded


def dealt(counts: Sequence[int]) -> list[int]:
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
