"""Steps whose numbers are still on the device: written down together, with one wait for the GPU, when they settle."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.errors import ExitCode, UserError
from windlass.trainer.batches import StepBatch
from windlass.trainer.ranks import Ranks
from windlass.trainer.reporting import Reporter, StepMetrics, memory_gib
from windlass.trainer.saving import Progress


@dataclass
class OpenStep:
    before: Progress  # where the run stood before this step
    after: Progress
    batch: StepBatch
    losses: Tensor  # the share of each micro-batch of this rank in the step's loss
    loss: Tensor
    grad_norm: Tensor
    total_labels: float
    rate: float
    checkpoint_s: float = 0.0  # training stood still for a save before this step


class NotFiniteError(UserError):
    """A loss or gradient was not finite; `good` is where the run stood before that step, and the weights still are."""

    good: Progress


class Ledger:
    """On a CPU every step settles at once; on a GPU at log lines, saves and validations."""

    def __init__(self, reporter: Reporter, ranks: Ranks, *, steps: int, flops_per_token: float, peak: float | None):
        self.reporter, self.ranks, self.steps = reporter, ranks, steps
        self.flops_per_token, self.peak = flops_per_token, peak
        self.last_loss = math.nan
        self._open: list[OpenStep] = []
        self._stall = 0.0
        self._clock = time.perf_counter()

    def add(self, step: OpenStep) -> None:
        step.checkpoint_s, self._stall = self._stall, 0.0
        self._open.append(step)

    def due(self, step: int, log_every: int) -> bool:
        return self.ranks.device.type == "cpu" or step % log_every == 0 or step in (1, self.steps)

    def restart_clock(self) -> None:
        """What happened since the last settling is not training time."""
        self._clock = time.perf_counter()

    def add_stall(self, seconds: float) -> None:
        """Time that a save took from training; it is part of the next step's."""
        self._stall += seconds

    def settle(self) -> None:
        """Wait for the device and report all open steps; NotFiniteError for the first one that went wrong."""
        if not self._open:
            return
        numbers = torch.stack([torch.stack([one.loss, one.grad_norm.double()]) for one in self._open]).tolist()
        now = time.perf_counter()
        step_s = (now - self._clock) / len(self._open)
        self._clock = now
        steps, self._open = self._open, []
        for one, (loss, grad_norm) in zip(steps, numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise self._not_finite(one, loss, grad_norm)
            self.last_loss = loss
            self._report(one, loss, grad_norm, step_s)

    def _report(self, one: OpenStep, loss: float, grad_norm: float, step_s: float) -> None:
        speed = one.total_labels / step_s
        world_size = self.ranks.world_size
        self.reporter.step(
            StepMetrics(
                step=one.after.step,
                steps=self.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=one.rate,
                tokens=one.after.tokens,
                tokens_per_s=round(speed, 1),
                tokens_per_s_per_gpu=round(speed / world_size, 1),
                mfu=round(speed * self.flops_per_token / (self.peak * world_size), 4) if self.peak else None,
                step_s=round(step_s, 6),
                data_s=round(one.batch.wait_s, 6),
                checkpoint_s=round(one.checkpoint_s, 6),
                memory_gib=memory_gib(self.ranks.device),
                epoch=round(one.batch.epoch, 4),
                attempt=self.reporter.attempt,
                time=round(time.time(), 3),
            )
        )

    def _not_finite(self, one: OpenStep, loss: float, grad_norm: float) -> NotFiniteError:
        """Name the step, the rank and the sequences whose loss is not finite."""
        mine = [
            f"rank {self.ranks.rank}, micro-batch {index}: {', '.join(micro_batch.ids)}"
            for index, (value, micro_batch) in enumerate(zip(one.losses.tolist(), one.batch.micro_batches, strict=True))
            if not math.isfinite(value)
        ]
        culprits = [line for part in self.ranks.gather(mine) for line in part]
        error = NotFiniteError(
            f"step {one.after.step} was stopped before its optimizer step: loss {loss}, gradient norm {grad_norm}",
            evidence="\n".join(culprits) or "every rank's loss is finite; the gradient overflowed in the backward pass",
            cause="a bad sequence, or a learning rate that is too high",
            fix="windlass data inspect RUN.yaml --sequence ID    shows the text of one; or lower train.learning_rate",
            exit_code=ExitCode.FAILED,
        )
        error.good = one.before
        return error


def sum_over_ranks(losses: Tensor, ranks: Ranks) -> Tensor:
    """The step's loss from the shares of all micro-batches and ranks, left on the device."""
    total = losses.double().sum()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    return total
