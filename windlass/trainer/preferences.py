"""Direct preference optimization: prefer chosen answers to rejected ones, held near a reference.

The loss of a pair is -log sigmoid(beta · ((c - r) - (c₀ - r₀))), where c and r are the log-probabilities of the chosen
and the rejected answer, and c₀ and r₀ those of the reference (Rafailov et al. 2023, arXiv:2305.18290). A row holds
pairs of answers as documents of their own, chosen before rejected; M rows, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.plan.layout import Layout
from windlass.trainer.batches import MicroBatch
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.attention import wants_documents
from windlass.trainer.fast.head import IGNORED
from windlass.trainer.model.lora import lora_layers
from windlass.trainer.step import Stepper


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
