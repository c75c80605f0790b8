"""The learning rate of every step, by hand and by property."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.plan.resolution import learning_rate
from windlass.spec.training import TrainSection

SHAPES = ["cosine", "linear", "constant", "wsd"]


def rates(**fields: Any) -> list[float]:
    train = TrainSection(**{"learning_rate": 1.0, "min_learning_rate": 0.0, "warmup_steps": 0, **fields})
    return [learning_rate(step, train) for step in range(train.steps)]


def test_cosine() -> None:
    assert rates(steps=4) == pytest.approx([0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    warm = rates(steps=6, warmup_steps=2, min_learning_rate=0.2)
    assert warm == pytest.approx([0.5, 1.0, 0.882843, 0.6, 0.317157, 0.2], abs=1e-6)


def test_linear() -> None:
    assert rates(steps=4, schedule="linear") == pytest.approx([0.75, 0.5, 0.25, 0.0])
    warm = rates(steps=6, schedule="linear", warmup_steps=2, min_learning_rate=0.2)
    assert warm == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_constant() -> None:
    assert rates(steps=5, schedule="constant", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0])


def test_wsd() -> None:
    assert rates(steps=10, schedule="wsd", decay_fraction=0.4) == pytest.approx([1.0] * 6 + [0.75, 0.5, 0.25, 0.0])
    assert rates(steps=4, schedule="wsd", decay_fraction=0.0) == [1.0] * 4
    assert rates(steps=4, schedule="wsd", decay_fraction=1.0) == pytest.approx([0.75, 0.5, 0.25, 0.0])


@given(
    schedule=st.sampled_from(SHAPES),
    steps=st.integers(1, 200),
    data=st.data(),
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0.0, 1.0),
    decay=st.floats(0.0, 1.0),
)
def test_properties(schedule: str, steps: int, data: st.DataObject, peak: float, share: float, decay: float) -> None:
    warmup = data.draw(st.integers(0, steps))
    floor = peak * share
    values = rates(
        steps=steps,
        schedule=schedule,
        learning_rate=peak,
        min_learning_rate=floor,
        warmup_steps=warmup,
        decay_fraction=decay,
    )
    assert values[:warmup] == pytest.approx([peak * (step + 1) / warmup for step in range(warmup)])
    after = values[warmup:]
    assert all(floor * (1 - 1e-9) <= value <= peak * (1 + 1e-9) for value in after)
    assert all(now >= then - 1e-12 for now, then in itertools.pairwise(after)), "it never rises again"
    if after and schedule in ("cosine", "linear"):
        assert after[-1] == pytest.approx(floor)
