"""The goodput to expect in closed form, and the best time between two checkpoints of every tier.

First order in (time lost per failure ÷ time between failures), as Young (1974). The simulator of
benchmarks/ is held against it (tests/goodput).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """A place where checkpoints are kept. Shares are of all failures."""

    name: str
    stall_s: float  # for which a save holds training up
    write_s: float  # until a save counts: a failure before that finds the one before
    restore_s: float
    share: float  # of failures after which it is the nearest tier that is still there


@dataclass(frozen=True)
class Failures:
    """How often a job is interrupted, and what each interruption costs beside the steps done again."""

    between_s: float  # mean time between two, of the whole job
    detection_s: float
    restart_s: float  # new nodes, processes, joining, the first step; without reading the checkpoint


@dataclass(frozen=True)
class Expected:
    """Shares of the time paid for."""

    goodput: float
    losses: Mapping[str, float]


def best_interval(tier: Tier, between_s: float, *, step_s: float) -> float:
    """Seconds between two saves that cost least: a save holds training up, a failure repeats half the interval."""
    if tier.share <= 0:
        return math.inf
    young = math.sqrt(2 * tier.stall_s * between_s / tier.share)
    return max(young, tier.write_s, step_s)  # a save begins when the one before is written


def expected(failures: Failures, tiers: Sequence[Tier], intervals: Mapping[str, float]) -> Expected:
    rate = 1 / failures.between_s  # of a second in which the job is up
    saving = sum(tier.stall_s / (intervals[tier.name] + tier.stall_s) for tier in tiers)
    repeated = sum(tier.share * (intervals[tier.name] / 2 + tier.write_s) for tier in tiers) * rate
    restoring = sum(tier.share * tier.restore_s for tier in tiers)
    detection, restart = rate * failures.detection_s, rate * (failures.restart_s + restoring)
    paid = 1 + detection + restart  # for each second in which it is up
    losses = {"saving": saving, "repeated": repeated, "detection": detection, "restart": restart}
    losses = {name: share / paid for name, share in losses.items()}
    return Expected(max(0.0, 1 - sum(losses.values())), losses)
