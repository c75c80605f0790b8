"""Which documents were there before: a table of their digests, 32 bytes each, that grows as it fills."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST_SLOTS = 1 << 10
FULLEST = 0.5  # share of the slots in use

Pairs = NDArray[Any]  # (n, 2) uint64: a digest each


class SeenDigests:
    """A set of 128-bit digests in two flat arrays: open addressing, whole batches at a time."""

    def __init__(self) -> None:
        self._count = 0
        self._table = np.zeros((FEWEST_SLOTS, 2), dtype=np.uint64)

    def __len__(self) -> int:
        return self._count

    def add(self, digests: Pairs) -> NDArray[np.bool_]:
        """Put digests in, in order; True for each that was not there before it came."""
        if self._count + len(digests) > FULLEST * len(self._table):
            self._grow(self._count + len(digests))
        new = self._insert(nonzero(digests))
        self._count += int(new.sum())
        return new

    def _grow(self, count: int) -> None:
        slots = len(self._table)
        while count > FULLEST * slots:
            slots *= 2
        held = self._table[self._table.any(axis=1)]
        self._table = np.zeros((slots, 2), dtype=np.uint64)
        self._insert(held)

    def _insert(self, digests: Pairs) -> NDArray[np.bool_]:
        table, mask = self._table, np.uint64(len(self._table) - 1)
        new = np.zeros(len(digests), dtype=np.bool_)
        waiting = np.arange(len(digests))
        slots = digests[:, 0] & mask
        while len(waiting):
            empty = ~table[slots].any(axis=1)
            # Of those that want the same empty slot the first one gets it; `unique` gives first places.
            _, firsts = np.unique(slots[empty], return_index=True)
            placed = np.flatnonzero(empty)[firsts]
            table[slots[placed]] = digests[waiting[placed]]
            new[waiting[placed]] = True
            # All others, those that wanted the same slot too, look at what is there now.
            left = np.ones(len(waiting), dtype=np.bool_)
            left[placed] = False
            same = (table[slots] == digests[waiting]).all(axis=1)
            left &= ~same
            slots = (slots[left] + np.uint64(1)) & mask
            waiting = waiting[left]
        return new


def nonzero(digests: Pairs) -> Pairs:
    """Zeros mark an empty slot, so the digest of zeros becomes another."""
    zero = ~digests.any(axis=1)
    if not zero.any():
        return digests
    digests = digests.copy()
    digests[zero] = 1
    return digests
