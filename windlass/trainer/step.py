"""One optimizer step's arithmetic: the loss is a sum over tokens divided by the tokens of the whole global batch.

Because the division is global, the result does not depend on ranks, micro-batches or padding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from windlass.plan.layout import Layout
from windlass.trainer.batches import MicroBatch, StepBatch
from windlass.trainer.distributed.ranks import Ranks


class Stepper:
    """Runs micro-batches through a model and leaves the global gradient in its parameters."""

    def __init__(self, model: nn.Module, layout: Layout, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks
        self.caller: nn.Module = model
        if layout.sharding == "ddp":
            # Frozen weights in 4 bits are buffers: nothing changes them, so nothing is gained by sending them around.
            frozen = not all(parameter.requires_grad for parameter in model.parameters())
            self.caller = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=not frozen)
        # FSDP2 casts by its own policy, bf16 copies need no cast; fp32 weights compute in bf16 through autocast.
        trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        fp32_weights = not isinstance(model, FSDPModule) and trained.dtype == torch.float32
        self.autocast = layout.precision == "bf16" and fp32_weights

    def token_loss(self, batch: MicroBatch, scale: float = 1.0) -> Tensor:
        """`scale` times the summed cross-entropy of a micro-batch, in fp32."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.caller(
                batch.tokens_mt, batch.labels_mt, batch.positions_mt, scale, documents=batch.documents
            )
        return loss

    def measure(self, batch: MicroBatch) -> list[float]:
        """The summed cross-entropy of a micro-batch, and how many of its labels are the likeliest token."""
        with torch.no_grad(), torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.autocast):
            both: Tensor = self.caller(
                batch.tokens_mt, batch.labels_mt, batch.positions_mt, 1.0, True, documents=batch.documents
            )
        return [float(value) for value in both]

    def backward(self, batch: StepBatch, total_labels: float, *, poisoned: bool = False) -> Tensor:
        """Accumulate the gradient of all micro-batches; each one's share of the step's loss, on the device."""
        # Ranks' gradients are averaged, so each is scaled up by their number to make it a sum.
        scale = self.ranks.loss_ranks / total_labels
        if poisoned:
            scale = math.nan
        losses = []
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            with self._synchronizing(last):
                loss = self.token_loss(micro_batch, scale)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses) / self.ranks.loss_ranks

    @contextlib.contextmanager
    def _synchronizing(self, last: bool) -> Iterator[None]:
        """Exchange gradients in the last micro-batch only, as far as memory allows.

        Sharded gradients are scattered after every micro-batch: kept whole until the last one they would take four
        bytes per parameter on every rank. What copies across groups have in common waits for the last.
        """
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(last)
            self.model.set_is_last_backward(last)
        if isinstance(self.caller, DistributedDataParallel) and not last:
            with self.caller.no_sync():
                yield
        else:
            yield


def sum_over_ranks(losses: Tensor, ranks: Ranks) -> Tensor:
    """The step's loss from the shares of all micro-batches and ranks, left on the device."""
    total = losses.double().sum()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    return total / ranks.tensor  # the ranks of a tensor group all have the loss of their tokens
