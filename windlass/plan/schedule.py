"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from windlass.spec.training import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """The rate of the optimizer step that follows `step` finished ones. The run's defaults are already resolved."""
    peak, last = train.learning_rate, train.steps
    floor = peak / 10 if train.min_learning_rate is None else train.min_learning_rate
    warmup = train.warmup_steps or 0
    if step < warmup:
        return peak * (step + 1) / warmup
    if train.schedule == "constant":
        return peak
    begin = warmup
    if train.schedule == "wsd":
        begin = max(warmup, last - math.ceil(last * train.decay_fraction))
    if step < begin:
        return peak
    progress = min(1.0, (step - begin + 1) / max(1, last - begin))
    if train.schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * (1 - progress)
