"""Let a model return its summed loss instead of its logits, through the fused head where the family's head is plain."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.layout import PLAIN_HEADS
from windlass.spec import Run
from windlass.trainer.attention import wants_documents
from windlass.trainer.head import IGNORED, linear_cross_entropy, measure_blocks, num_right
from windlass.trainer.new_tokens import RowsHead
from windlass.trainer.ranks import Ranks


def use_fused_head(config: Any, run: Run, ranks: Ranks) -> bool:
    """Asked for by name, or by default on GPUs; on CPUs torch's own cross-entropy is the faster one."""
    if run.train.fused_head is None:
        return ranks.device.type == "cuda" and config.model_type in PLAIN_HEADS
    if run.train.fused_head and config.model_type not in PLAIN_HEADS:
        raise UserError(
            f"train.fused_head is not known to be right for {config.model_type} models",
            evidence=f"it is for {', '.join(sorted(PLAIN_HEADS))}",
            fix="train.fused_head=false",
        )
    return run.train.fused_head


def return_loss(model: nn.Module, *, fused: bool) -> None:
    """Replace the model's forward: tokens and labels in, `scale` times their summed cross-entropy out, in fp32.

    Where it is `measuring`, the sum itself and the number of labels that are the likeliest token.
    The replacement runs inside the model's own call, where sharded weights are whole.
    """
    backbone: nn.Module = model.get_decoder()  # type: ignore[operator]
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    whole_forward = model.forward
    if fused:
        head.forward = functools.partial(_loss_of_head, head)  # type: ignore[method-assign]

    @functools.wraps(whole_forward)
    def forward(
        tokens_mt: Tensor,
        labels_mt: Tensor,
        positions_mt: Tensor | None,
        scale: float,
        measuring: bool = False,
        documents: Tensor | None = None,
    ) -> Tensor:
        # Positions that restart make transformers keep documents apart; none at all mean plain causal attention.
        inputs: dict[str, Any] = {"input_ids": tokens_mt, "use_cache": False}
        if positions_mt is not None:
            inputs["position_ids"] = positions_mt
        if documents is not None and wants_documents(model):
            inputs["documents"] = documents  # transformers hands what it does not know on to attention
        if fused:
            hidden_nd = backbone(**inputs).last_hidden_state.flatten(0, 1)
            loss: Tensor = head(hidden_nd, labels_mt.flatten(), scale, measuring)
            return loss
        logits_nv = whole_forward(**inputs).logits.flatten(0, 1)
        loss = F.cross_entropy(logits_nv.float(), labels_mt.flatten(), ignore_index=IGNORED, reduction="sum")
        if measuring:
            return torch.stack([loss, num_right(logits_nv, labels_mt.flatten()).to(loss.dtype)])
        return loss * scale

    model.forward = forward


def _loss_of_head(head: nn.Linear, hidden_nd: Tensor, labels_n: Tensor, scale: float, measuring: bool) -> Tensor:
    """The head's own forward: it is called as a module, so that its weight is whole where it is sharded."""
    weight_vd: Tensor = head.whole_weight() if isinstance(head, RowsHead) else head.weight
    if torch.is_autocast_enabled(hidden_nd.device.type):
        dtype = torch.get_autocast_dtype(hidden_nd.device.type)
        hidden_nd, weight_vd = hidden_nd.to(dtype), weight_vd.to(dtype)
    if measuring:
        return measure_blocks(hidden_nd, weight_vd, labels_n)
    return linear_cross_entropy(hidden_nd, weight_vd, labels_n, scale=scale)
