"""One optimizer step's arithmetic: the loss is a sum over tokens divided by the tokens of the whole global batch.

Because the division is global, the result does not depend on ranks, micro-batches or padding.

Direct preference optimization divides by pairs of answers instead. The loss of a pair is
-log sigmoid(beta · ((c - r) - (c₀ - r₀))), where c and r are the log-probabilities of the chosen and the rejected
answer, and c₀ and r₀ those of the reference (Rafailov et al. 2023, arXiv:2305.18290). A row holds pairs of answers as
documents of their own, chosen before rejected; M rows, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from windlass.plan.layout import Layout
from windlass.trainer.batches import MicroBatch, StepBatch
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.attention import wants_documents
from windlass.trainer.model.lora import lora_layers
from windlass.trainer.model.structure import IGNORED


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


def return_log_probabilities(model: nn.Module) -> None:
    """Replace the model's forward: tokens and labels in, the log-probability of every label that counts out, else 0."""
    whole_forward = model.forward

    @functools.wraps(whole_forward)
    def forward(tokens_mt: Tensor, labels_mt: Tensor, positions_mt: Tensor, documents: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens_mt, "use_cache": False, "position_ids": positions_mt}
        if wants_documents(model):
            inputs["documents"] = documents
        logits_nv = whole_forward(**inputs).logits.flatten(0, 1).float()
        losses_n = F.cross_entropy(logits_nv, labels_mt.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses_n.view_as(labels_mt)

    model.forward = forward


class PreferenceStepper(Stepper):
    """Computes the loss of pairs. Without a second model the reference is the model with its adapter switched off."""

    def __init__(
        self, model: nn.Module, layout: Layout, ranks: Ranks, *, beta: float, reference: nn.Module | None
    ) -> None:
        super().__init__(model, layout, ranks)
        self.beta = beta
        self.reference = reference

    def token_loss(self, batch: MicroBatch, scale: float = 1.0) -> Tensor:
        margins, counts = self._margins(batch)
        return (dpo_losses(margins, self.beta) * counts).sum() * scale

    def measure(self, batch: MicroBatch) -> list[float]:
        """The summed loss of a micro-batch's pairs, and how many of them the model ranks as it should."""
        with torch.no_grad():
            margins, counts = self._margins(batch)
            return [float((dpo_losses(margins, self.beta) * counts).sum()), float(((margins > 0) & counts).sum())]

    def _margins(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(c - r) - (c₀ - r₀) of every pair that a row has room for, and whether there is one."""
        assert batch.positions_mt is not None
        with torch.no_grad():
            if self.reference is not None:
                reference_mt = self._log_probabilities(self.reference, batch)
            else:
                with without_adapter(self.model):
                    reference_mt = self._log_probabilities(self.caller, batch)
        relative_mt = self._log_probabilities(self.caller, batch) - reference_mt
        return pair_margins(relative_mt, batch.labels_mt, batch.positions_mt)

    def _log_probabilities(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.autocast):
            values: Tensor = model(batch.tokens_mt, batch.labels_mt, batch.positions_mt, batch.documents)
        return values


def pair_margins(values_mt: Tensor, labels_mt: Tensor, positions_mt: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values over the documents of each row, chosen less rejected of each pair; and which pairs there are."""
    rows, length = values_mt.shape
    document_mt = (positions_mt == 0).cumsum(dim=1) - 1
    room = length + length % 2
    zeros = torch.zeros((rows, room), dtype=values_mt.dtype, device=values_mt.device)
    sums = zeros.scatter_add(1, document_mt, values_mt).view(rows, -1, 2)
    counting_mt = (labels_mt != IGNORED).to(values_mt.dtype)
    counts = zeros.scatter_add(1, document_mt, counting_mt).view(rows, -1, 2)
    return sums[..., 0] - sums[..., 1], (counts > 0).all(dim=-1)


def dpo_losses(margins: Tensor, beta: float) -> Tensor:
    return -F.logsigmoid(beta * margins)


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapter."""
    layers = lora_layers(model).values()
    scales = [layer.lora_scale for layer in layers]
    was_training = model.training
    try:
        for layer in layers:
            layer.lora_scale = 0.0
        model.eval()
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.lora_scale = scale
        model.train(was_training)
