"""A shuffled order as a pure function: the permutation that a seed and an epoch name, in constant memory."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

ROUNDS = 12
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of [0, size): a keyed Feistel network on the next power of two, walked until it lands inside.

    Integer arithmetic only, so that it is the same on every machine, and any index is found without the others.
    """

    def __init__(self, size: int, *, seed: int, epoch: int, purpose: str = "windows") -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self.size = size
        bits = (size - 1).bit_length()
        self._low_bits = bits - bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits // 2)) - 1
        name = f"windlass order {purpose} {seed} {epoch} {size}".encode()
        keys = b"".join(hashlib.blake2b(name, salt=bytes([half])).digest() for half in range(ROUNDS // 8 + 1))
        self._keys = struct.unpack(f"<{ROUNDS}Q", keys[: 8 * ROUNDS])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in [0, {self.size})")
        # The network permutes [0, 2^bits). Following it from a point inside [0, size) until it is inside again
        # is a bijection of [0, size), and takes fewer than two walks on average.
        value = self._network(index)
        while value >= self.size:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        low, high = value & self._low_mask, value >> self._low_bits
        keys = iter(self._keys)
        for key in keys:
            low ^= mix(high ^ key) & self._low_mask
            high ^= mix(low ^ next(keys)) & self._high_mask
        return high << self._low_bits | low


@lru_cache(maxsize=128)
def permutation(size: int, seed: int, epoch: int, purpose: str = "windows") -> Permutation:
    """The same again for a run that reads on in one epoch: its keys are worked out once."""
    return Permutation(size, seed=seed, epoch=epoch, purpose=purpose)


def mix(value: int) -> int:
    """Spread every bit of a 64-bit number over all of them."""
    value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 & MASK
    value = (value ^ value >> 29) * 0x9E3779B97F4A7C15 & MASK
    return value ^ value >> 32
