"""The permutation is one, for any size, and looks shuffled."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.data.sequences.order import Permutation


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**40))
def test_it_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(order[i] for i in range(size)) == list(range(size))


@given(index=st.integers(0, 10**15 - 1), other=st.integers(0, 10**15 - 1))
def test_huge_sizes_take_no_memory_and_stay_injective(index: int, other: int) -> None:
    order = Permutation(10**15, seed=3, epoch=1)
    assert 0 <= order[index] < 10**15
    assert (order[index] == order[other]) == (index == other)


def test_it_never_changes() -> None:
    """A run resumed by a later version must read on in the same order."""
    order = Permutation(10, seed=7, epoch=2)
    assert [order[i] for i in range(10)] == FROZEN


FROZEN = [6, 2, 8, 1, 5, 3, 7, 9, 0, 4]


def test_seeds_epochs_sizes_and_purposes_differ() -> None:
    def order(size: int = 1000, seed: int = 0, epoch: int = 0, purpose: str = "windows") -> list[int]:
        permutation = Permutation(size, seed=seed, epoch=epoch, purpose=purpose)
        return [permutation[i] for i in range(100)]

    orders = [order(), order(seed=1), order(epoch=1), order(size=1001), order(purpose="files")]
    assert len({tuple(one) for one in orders}) == len(orders)


def test_it_is_well_mixed() -> None:
    size = 4096
    order = Permutation(size, seed=0, epoch=0)
    values = [order[i] for i in range(size)]
    assert abs(statistics.correlation(range(size), values)) < 0.05
    steps = [abs(b - a) for a, b in pairwise(values)]
    assert abs(statistics.mean(steps) / size - 1 / 3) < 0.02  # of two independent uniform numbers
    assert sum(value == i for i, value in enumerate(values)) < 8  # a random one has about one fixed point


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_sizes_reach_every_order(size: int) -> None:
    seen = {tuple(Permutation(size, seed=seed, epoch=0)[i] for i in range(size)) for seed in range(2500)}
    assert len(seen) == {2: 2, 3: 6, 4: 24, 5: 120}[size]


def test_out_of_range() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, seed=0, epoch=0)
    with pytest.raises(IndexError):
        Permutation(4, seed=0, epoch=0)[4]
