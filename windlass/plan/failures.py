"""What failures will cost a run, and how often each tier of checkpoints should be saved. Pure.

Rates and times are those of the simulator (windlass/goodput/model.py); docs/goodput.md says where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.goodput.model import LLAMA3, LLAMA3_RATE, Expected, Failures, Tier, best_interval, expected, seconds
from windlass.plan.cost import STORAGE_GB_S, save_s
from windlass.plan.hardware import Hardware
from windlass.plan.layout import Layout
from windlass.plan.shape import BYTES_PER_PARAMETER_SAVED, ModelShape
from windlass.plan.speed import SpeedEstimate
from windlass.spec import Run

WORTH_SAYING = 0.5  # failures to expect in the whole run
LOSES_TWO_NODES = 0.05  # of failures: more than a peer's memory makes up for; assumed
IN_PLACE = sum(cause.count for cause in LLAMA3 if not cause.breaks_node) / sum(cause.count for cause in LLAMA3)


@dataclass(frozen=True)
class FailurePlan:
    between_s: float  # two failures
    number: float  # of them, in the whole run
    settings: Mapping[str, int]  # steps between saves, as the run has it
    proposed: Mapping[str, int]
    as_is: Expected
    with_proposal: Expected

    @property
    def is_worth_saying(self) -> bool:
        return self.number >= WORTH_SAYING

    def as_dict(self) -> dict[str, Any]:
        return {
            "hours_between_failures": self.between_s / 3600,
            "failures": self.number,
            "goodput": self.as_is.goodput,
            "losses": dict(self.as_is.losses),
            "proposed": dict(self.proposed),
            "proposed_goodput": self.with_proposal.goodput,
        }


def plan_failures(
    run: Run, shape: ModelShape, layout: Layout, speed: SpeedEstimate, hardware: Hardware, *, run_s: float
) -> FailurePlan:
    between_s = 1 / (LLAMA3_RATE * layout.ranks)
    signs = [(cause.count, cause.sign) for cause in LLAMA3 if cause.sign not in ("notice", "slow", "corruption")]
    detection_s = sum(count * seconds(f"detect {sign}") for count, sign in signs) / sum(cause.count for cause in LLAMA3)
    restart_s = seconds("start") + seconds("join per GPU") * layout.ranks + seconds("swap")
    failures = Failures(between_s, detection_s, restart_s)
    spec = run.checkpoint
    settings = {"every": spec.every, "memory_every": spec.memory_every, "local_every": spec.local_every}
    present = {name: every for name, every in settings.items() if every}
    wanted = set(present) | ({"memory_every"} if hardware.nodes > 1 else set())
    as_is = _tiers(run, shape, layout, hardware, set(present))
    better = _tiers(run, shape, layout, hardware, wanted)
    proposed = {
        tier.name: max(1, round(best_interval(tier, between_s, step_s=speed.step_s) / speed.step_s))
        for tier in better
        if tier.share
    }
    # a copy on a slower tier more often than on a quicker one is of no use
    proposed["every"] = max(proposed.values())
    return FailurePlan(
        between_s=between_s,
        number=run_s / between_s,
        settings=present,
        proposed=proposed,
        as_is=expected(failures, as_is, {name: every * speed.step_s for name, every in present.items()}),
        with_proposal=expected(
            failures,
            [tier for tier in better if tier.name in proposed],
            {name: every * speed.step_s for name, every in proposed.items()},
        ),
    )


def _tiers(run: Run, shape: ModelShape, layout: Layout, hardware: Hardware, names: set[str]) -> list[Tier]:
    """The tiers, each with its share of failures: the nearest that is left counts."""
    state_gb = BYTES_PER_PARAMETER_SAVED * (layout.trained or shape.parameters) / 1e9
    stall_s = save_s(run, shape, layout, hardware) + seconds("save overhead")
    per_gpu_gb = state_gb / (layout.shards * layout.tensor)
    left, tiers = 1.0, []
    if "memory_every" in names:
        share = 1 - LOSES_TWO_NODES if hardware.nodes > 1 else IN_PLACE  # alone it has no peer
        memory_s = per_gpu_gb / seconds("memory GB/s per GPU")
        tiers.append(Tier("memory_every", stall_s, memory_s, memory_s, share))
        left -= share
    if "local_every" in names:
        share = 0.0 if "memory_every" in names else IN_PLACE
        local_s = per_gpu_gb / seconds("local GB/s per GPU")
        tiers.append(Tier("local_every", stall_s, local_s, local_s, share))
        left -= share
    shared_s = state_gb / hardware.nodes / STORAGE_GB_S
    return [*tiers, Tier("every", stall_s, shared_s, shared_s, left)]
