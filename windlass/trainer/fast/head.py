"""The language-model head and its loss in one: logits exist a block at a time, gradients are made on the way forward.

Shapes: N tokens, D model width, V vocabulary.

Let a model return its summed loss instead of its logits, through the fused head where the family's head is plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.memory import LOGITS_PER_BLOCK, rows_per_block
from windlass.trainer.fast.attention import wants_documents
from windlass.trainer.model.new_tokens import RowsHead
from windlass.trainer.model.structure import IGNORED


class LinearCrossEntropy(torch.autograd.Function):
    """`scale` times the summed cross-entropy of `hidden @ weight.T`, without a second copy of the logits.

    The gradient is complete after the forward pass, scale included, so this must be what `backward()` is called on:
    a factor put on it afterwards would be lost.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, labels_n: Tensor, scale: float, logits_per_block: int
    ) -> Tensor:
        num_tokens = hidden_nd.shape[0]
        rows = rows_per_block(weight_vd.shape[0], num_tokens, logits_per_block)
        grad_hidden_nd = torch.empty_like(hidden_nd)
        grad_weight_vd: Tensor | None = None
        loss = torch.zeros((), dtype=torch.promote_types(hidden_nd.dtype, torch.float32), device=hidden_nd.device)
        for start in range(0, num_tokens, rows):
            hidden = hidden_nd[start : start + rows]
            grad_logits = hidden @ weight_vd.T
            loss += cross_entropy_in_place(grad_logits, labels_n[start : start + rows], scale).sum()
            torch.mm(grad_logits, weight_vd, out=grad_hidden_nd[start : start + rows])
            if not ctx.needs_input_grad[1]:
                pass  # a frozen head
            elif grad_weight_vd is None:
                grad_weight_vd = grad_logits.T @ hidden
            else:
                grad_weight_vd.addmm_(grad_logits.T, hidden)
            del grad_logits
        ctx.save_for_backward(grad_hidden_nd, grad_weight_vd)
        return loss

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_nd, grad_weight_vd = ctx.saved_tensors
        return grad_hidden_nd, grad_weight_vd, None, None, None


def cross_entropy_in_place(logits_nv: Tensor, labels_n: Tensor, scale: float) -> Tensor:
    """The scaled loss of each row; `logits_nv` becomes its gradient."""
    if logits_nv.is_cuda:
        from windlass.trainer.fast.kernels import cross_entropy

        return cross_entropy.cross_entropy_in_place(logits_nv, labels_n, IGNORED, scale)
    wide = torch.promote_types(logits_nv.dtype, torch.float32)
    counting_n = labels_n != IGNORED
    safe_n = labels_n.where(counting_n, 0)
    factor_n = counting_n.to(wide) * scale
    log_probabilities_nv = F.log_softmax(logits_nv.to(wide), dim=-1)
    losses_n = -log_probabilities_nv.gather(1, safe_n[:, None]).squeeze(1)
    gradient_nv = log_probabilities_nv.exp_()
    gradient_nv[torch.arange(len(safe_n)), safe_n] -= 1.0
    logits_nv.copy_(gradient_nv.mul_(factor_n[:, None]))
    return losses_n * factor_n


def num_right(logits_nv: Tensor, labels_n: Tensor) -> Tensor:
    """How many labels are the likeliest token; ignored ones never are."""
    return (logits_nv.argmax(dim=-1) == labels_n).sum()


def measure_blocks(hidden_nd: Tensor, weight_vd: Tensor, labels_n: Tensor) -> Tensor:
    """(summed cross-entropy, number of right labels), logits a block at a time."""
    rows = rows_per_block(weight_vd.shape[0], hidden_nd.shape[0])
    total = torch.zeros(2, dtype=torch.promote_types(hidden_nd.dtype, torch.float32), device=hidden_nd.device)
    for start in range(0, hidden_nd.shape[0], rows):
        logits_nv, labels = hidden_nd[start : start + rows] @ weight_vd.T, labels_n[start : start + rows]
        right = num_right(logits_nv, labels)
        total += torch.stack([cross_entropy_in_place(logits_nv, labels, 1.0).sum(), right.to(total.dtype)])
    return total


def linear_cross_entropy(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    labels_n: Tensor,
    *,
    scale: float = 1.0,
    logits_per_block: int = LOGITS_PER_BLOCK,
) -> Tensor:
    """`scale` times the cross-entropy summed over the tokens whose label counts, in fp32."""
    if torch.is_grad_enabled():
        loss: Tensor = LinearCrossEntropy.apply(hidden_nd, weight_vd, labels_n, scale, logits_per_block)
        return loss
    rows = rows_per_block(weight_vd.shape[0], hidden_nd.shape[0], logits_per_block)
    parts = [
        cross_entropy_in_place(hidden_nd[start : start + rows] @ weight_vd.T, labels_n[start : start + rows], scale)
        for start in range(0, hidden_nd.shape[0], rows)
    ]
    return torch.cat(parts).sum()


Loss = Callable[[Tensor, Tensor], Tensor]


def return_loss(model: nn.Module, *, fused: bool, own: Loss | None = None) -> None:
    """Replace the model's forward: tokens and labels in, `scale` times their summed cross-entropy out, in fp32.

    `own`: another loss than cross-entropy, of logits and labels.
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
        if own is not None:
            loss = summed(own(logits_nv.view(*labels_mt.shape, -1), labels_mt), labels_mt)
        else:
            loss = F.cross_entropy(logits_nv.float(), labels_mt.flatten(), ignore_index=IGNORED, reduction="sum")
        if measuring:
            return torch.stack([loss, num_right(logits_nv, labels_mt.flatten()).to(loss.dtype)])
        return loss * scale

    model.forward = forward


def summed(loss: Tensor, labels_mt: Tensor) -> Tensor:
    """A loss for each label, summed over those that count; or their sum as it is."""
    if loss.ndim == 0:
        return loss.float()
    if loss.shape != labels_mt.shape:
        raise UserError(
            f"train.loss returned a tensor of the shape {tuple(loss.shape)}",
            cause=f"a loss for each label, {tuple(labels_mt.shape)}, or their sum is expected",
        )
    return loss.float().where(labels_mt != IGNORED, 0.0).sum()


def _loss_of_head(head: nn.Linear, hidden_nd: Tensor, labels_n: Tensor, scale: float, measuring: bool) -> Tensor:
    """The head's own forward: it is called as a module, so that its weight is whole where it is sharded."""
    weight_vd: Tensor = head.whole_weight() if isinstance(head, RowsHead) else head.weight
    if torch.is_autocast_enabled(hidden_nd.device.type):
        dtype = torch.get_autocast_dtype(hidden_nd.device.type)
        hidden_nd, weight_vd = hidden_nd.to(dtype), weight_vd.to(dtype)
    if measuring:
        return measure_blocks(hidden_nd, weight_vd, labels_n)
    return linear_cross_entropy(hidden_nd, weight_vd, labels_n, scale=scale)
