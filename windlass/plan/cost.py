"""Hours and dollars of a run, from the time of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.catalog.instances import Price
from windlass.plan.layout import Layout
from windlass.plan.shape import BYTES_PER_PARAMETER_SAVED, ModelShape
from windlass.plan.speed import HOST_LINK_GB_S, Hardware, SpeedEstimate
from windlass.spec import Run

STORAGE_GB_S = 1.0  # a node's writes to shared storage, where the run waits for them
FORWARD_SHARE = 1 / 3  # of a step's time per token: validation goes forward only


@dataclass(frozen=True)
class CostEstimate:
    training_s: float
    checkpoint_s: float  # training waits for copies, or for whole writes
    validation_s: float
    node_hours: float
    on_demand: Price | None
    spot: Price | None

    @property
    def seconds(self) -> float:
        return self.training_s + self.checkpoint_s + self.validation_s

    @property
    def usd(self) -> float | None:
        """None where no price is known."""
        return None if self.on_demand is None else self.node_hours * self.on_demand.usd_per_hour

    @property
    def spot_usd(self) -> float | None:
        return None if self.spot is None else self.node_hours * self.spot.usd_per_hour


def estimate_cost(
    run: Run, shape: ModelShape, layout: Layout, speed: SpeedEstimate, hardware: Hardware
) -> CostEstimate:
    training = run.train.steps * speed.step_s
    checkpoints = num_saves(run) * save_s(run, shape, layout, hardware)
    validation = num_validations(run) * run.train.validation_sequences * layout.length * FORWARD_SHARE
    validation_s = validation / speed.tokens_per_s
    instance = hardware.instance
    return CostEstimate(
        training_s=training,
        checkpoint_s=checkpoints,
        validation_s=validation_s,
        node_hours=hardware.nodes * (training + checkpoints + validation_s) / 3600,
        on_demand=instance.on_demand if instance else None,
        spot=instance.spot if instance else None,
    )


def num_saves(run: Run) -> int:
    return (run.train.steps - 1) // run.checkpoint.every + run.checkpoint.at_end


def save_s(run: Run, shape: ModelShape, layout: Layout, hardware: Hardware) -> float:
    """How long one save stalls training: the copy to host memory or, in the foreground, the write too."""
    whole = BYTES_PER_PARAMETER_SAVED * shape.parameters / 1e9
    copy = 0.0 if layout.cpu_offload else whole / (layout.shards * layout.tensor) / HOST_LINK_GB_S
    return copy if run.checkpoint.background else copy + whole / hardware.nodes / STORAGE_GB_S


def num_validations(run: Run) -> int:
    if not (run.data.validation_source or run.data.holdout):
        return 0
    every = run.train.validate_every
    return 1 + ((run.train.steps - 1) // every if every else 0)
