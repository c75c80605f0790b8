"""One optimizer step's arithmetic: the loss is a sum over tokens divided by the tokens of the whole global batch.

Because the division is global, the result does not depend on ranks, micro-batches or padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from windlass.plan.resolution import effective_sharding
from windlass.spec import Run
from windlass.trainer.batches import IGNORED, MicroBatch, StepBatch
from windlass.trainer.ranks import Ranks


class Stepper:
    """Runs micro-batches through a model and leaves the global gradient in its parameters."""

    def __init__(self, model: nn.Module, run: Run, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks
        self.sharding = effective_sharding(run, ranks.world_size)
        self.caller: nn.Module = model
        if self.sharding == "ddp":
            self.caller = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # FSDP2 casts by its own policy; without it bf16 comes from autocast over fp32 weights.
        self.autocast = run.train.precision == "bf16" and self.sharding in ("ddp", "none")

    def token_loss(self, batch: MicroBatch) -> Tensor:
        """Summed cross-entropy of a micro-batch, in fp32."""
        inputs: dict[str, Any] = {"input_ids": batch.tokens_mt, "use_cache": False}
        if batch.positions_mt is not None:
            inputs["position_ids"] = batch.positions_mt  # restarts make transformers mask other documents
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.autocast):
            logits_mtv = self.caller(**inputs).logits
        return F.cross_entropy(
            logits_mtv.flatten(0, 1).float(), batch.labels_mt.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def backward(self, batch: StepBatch, total_labels: float, *, poisoned: bool = False) -> list[Tensor]:
        """Accumulate the gradient of all micro-batches; their summed losses, for this rank."""
        # Ranks' gradients are averaged, so each is scaled up by their number to make it a sum.
        scale = self.ranks.world_size / total_labels
        losses = []
        for index, micro_batch in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            with self._synchronizing(last):
                loss = self.token_loss(micro_batch)
                if poisoned:
                    loss = loss * float("nan")
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    @contextlib.contextmanager
    def _synchronizing(self, last: bool) -> Iterator[None]:
        """Exchange gradients in the last micro-batch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        if isinstance(self.caller, DistributedDataParallel) and not last:
            with self.caller.no_sync():
                yield
        else:
            yield
