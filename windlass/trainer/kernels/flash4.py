"""Causal attention by the flash-attn-4 package, as operators that torch.compile passes over.

Shapes: B sequences, T tokens, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from windlass.data.cache import cache_root


@functools.cache
def package() -> Any:
    """The package's own functions. What it compiles is kept, so that a second start takes no time for it."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash-attn-4"))
    from flash_attn.cute import interface

    return interface


@torch.library.custom_op("windlass::flash4", mutates_args=(), device_types="cuda")
def flash4(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention's output like `q_bthd`, and the logarithm of each row's sum of exponentials [B, H, T]."""
    out_bthd = torch.empty(q_bthd.shape, dtype=q_bthd.dtype, device=q_bthd.device)
    found = package()._flash_attn_fwd(
        q_bthd, k_btgd, v_btgd, softmax_scale=scale, causal=True, return_lse=True, out=out_bthd
    )
    return out_bthd, found[1]


@torch.library.custom_op("windlass::flash4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    grad_bthd: Tensor,
    q_bthd: Tensor,
    k_btgd: Tensor,
    v_btgd: Tensor,
    out_bthd: Tensor,
    log_sum_bht: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q_bthd, k_btgd, v_btgd)]
    package()._flash_attn_bwd(
        q_bthd,
        k_btgd,
        v_btgd,
        out_bthd,
        grad_bthd.contiguous(),
        log_sum_bht,
        softmax_scale=scale,
        causal=True,
        dq=grads[0],
        dk=grads[1],
        dv=grads[2],
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grads[0], grads[1], grads[2]


@flash4.register_fake
def _(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, length, heads, _size = q_bthd.shape
    return q_bthd.new_empty(q_bthd.shape), q_bthd.new_empty((batch, heads, length), dtype=torch.float32)


@flash4_backward.register_fake
def _(
    grad_bthd: Tensor,
    q_bthd: Tensor,
    k_btgd: Tensor,
    v_btgd: Tensor,
    out_bthd: Tensor,
    log_sum_bht: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_bthd.new_empty(q_bthd.shape), k_btgd.new_empty(k_btgd.shape), v_btgd.new_empty(v_btgd.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_bthd, k_btgd, v_btgd, ctx.scale = inputs
    ctx.save_for_backward(q_bthd, k_btgd, v_btgd, *output)


def _backward(ctx: Any, grad_bthd: Tensor, _grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    return *flash4_backward(grad_bthd, *ctx.saved_tensors, ctx.scale), None


flash4.register_autograd(_backward, setup_context=_save)


# The plain twins: what the operators compute, in torch, on the CPU.


def _weights(q_bthd: Tensor, k_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scores before the softmax [B, H, T, T] in fp32 or wider, and keys repeated for the query heads."""
    wide = torch.promote_types(q_bthd.dtype, torch.float32)
    k_bhtd = k_btgd.to(wide).transpose(1, 2).repeat_interleave(q_bthd.shape[2] // k_btgd.shape[2], dim=1)
    scores = q_bthd.to(wide).transpose(1, 2) @ k_bhtd.transpose(-1, -2) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf")), k_bhtd


@flash4.register_kernel("cpu")
def _(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores, _ = _weights(q_bthd, k_btgd, scale)
    v_bhtd = v_btgd.to(scores.dtype).transpose(1, 2).repeat_interleave(q_bthd.shape[2] // v_btgd.shape[2], dim=1)
    out_bthd = (scores.softmax(-1) @ v_bhtd).transpose(1, 2).contiguous()
    return out_bthd.to(q_bthd.dtype), scores.logsumexp(-1).float()


@flash4_backward.register_kernel("cpu")
def _(
    grad_bthd: Tensor,
    q_bthd: Tensor,
    k_btgd: Tensor,
    v_btgd: Tensor,
    out_bthd: Tensor,
    log_sum_bht: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, k_bhtd = _weights(q_bthd, k_btgd, scale)
    batch, length, heads, size = q_bthd.shape
    groups = k_btgd.shape[2]
    weights = (scores - log_sum_bht.to(scores.dtype)[..., None]).exp()
    grad_bhtd = grad_bthd.to(scores.dtype).transpose(1, 2)
    v_bhtd = v_btgd.to(scores.dtype).transpose(1, 2).repeat_interleave(heads // groups, dim=1)
    kept = (grad_bhtd * out_bthd.to(scores.dtype).transpose(1, 2)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_bhtd @ v_bhtd.transpose(-1, -2) - kept) * scale

    def summed(grad_bhtd: Tensor) -> Tensor:
        """Over the query heads that share a key head."""
        grouped = grad_bhtd.reshape(batch, groups, heads // groups, length, size).sum(2)
        return grouped.transpose(1, 2).contiguous()

    grad_q = (grad_scores @ k_bhtd).transpose(1, 2).contiguous()
    grad_k = summed(grad_scores.transpose(-1, -2) @ q_bthd.to(scores.dtype).transpose(1, 2))
    grad_v = summed(weights.transpose(-1, -2) @ grad_bhtd)
    return grad_q.to(q_bthd.dtype), grad_k.to(k_btgd.dtype), grad_v.to(v_btgd.dtype)
