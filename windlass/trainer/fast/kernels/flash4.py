"""Causal attention by the flash-attn-4 package, as operators that torch.compile passes over.

Two of them: over whole sequences, and over documents that lie packed one after another and do not see each other.
Shapes: B sequences, T tokens, N tokens of all sequences, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import torch
from torch import Tensor

from windlass.common.files import cache_root


@functools.cache
def package() -> Any:
    """The package's own functions. What it compiles is kept, so that a second start takes no time for it."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash-attn-4"))
    from flash_attn.cute import interface

    return interface


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, **documents: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    results = package()._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=True, return_lse=True, out=out, **documents
    )
    return out, results[1]


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float, **documents: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    deterministic = torch.are_deterministic_algorithms_enabled()
    options = {"softmax_scale": scale, "causal": True, "deterministic": deterministic, **documents}
    package()._flash_attn_bwd(q, k, v, out, grad.contiguous(), log_sum, dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


def _within(bounds: Tensor, longest: int) -> dict[str, Any]:
    """How the package is told of documents."""
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


@torch.library.custom_op("windlass::flash4", mutates_args=(), device_types="cuda")
def flash4(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention's output like `q_bthd`, and the logarithm of each row's sum of exponentials [B, H, T]."""
    return _forward(q_bthd, k_btgd, v_btgd, scale)


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
    return _gradients(grad_bthd, q_bthd, k_btgd, v_btgd, out_bthd, log_sum_bht, scale)


@flash4.register_fake
def _(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, length, heads, _size = q_bthd.shape
    return q_bthd.new_empty(q_bthd.shape), q_bthd.new_empty((batch, heads, length), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_bthd, k_btgd, v_btgd, ctx.scale = inputs
    ctx.save_for_backward(q_bthd, k_btgd, v_btgd, *output)


def _backward(ctx: Any, grad_bthd: Tensor, _grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    return *flash4_backward(grad_bthd, *ctx.saved_tensors, ctx.scale), None


flash4.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("windlass::flash4_documents", mutates_args=(), device_types="cuda")
def flash4_documents(
    q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The same within documents: `bounds` (int32) holds where each begins, and N; none is longer than `longest`.

    Where a document ends is known to the kernel alone: there is no mask, and no work on pairs of documents.
    """
    return _forward(q_nhd, k_ngd, v_ngd, scale, **_within(bounds, longest))


@torch.library.custom_op("windlass::flash4_documents_backward", mutates_args=(), device_types="cuda")
def flash4_documents_backward(
    grad_nhd: Tensor,
    q_nhd: Tensor,
    k_ngd: Tensor,
    v_ngd: Tensor,
    bounds: Tensor,
    out_nhd: Tensor,
    log_sum_hn: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    within = _within(bounds, longest)
    return _gradients(grad_nhd, q_nhd, k_ngd, v_ngd, out_nhd, log_sum_hn, scale, **within)


@flash4_documents.register_fake
def _(q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = q_nhd.shape
    return q_nhd.new_empty(q_nhd.shape), q_nhd.new_empty((heads, tokens), dtype=torch.float32)


@flash4_backward.register_fake
@flash4_documents_backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_documents(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _documents_backward(ctx: Any, grad_nhd: Tensor, _grad_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    return *flash4_documents_backward(grad_nhd, *ctx.saved_tensors, ctx.longest, ctx.scale), None, None, None


flash4_documents.register_autograd(_documents_backward, setup_context=_save_documents)


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
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_bthd, q_bthd, k_btgd, v_btgd, out_bthd, log_sum_bht, scale = inputs
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


def _apart(bounds: Tensor) -> list[slice]:
    """The tokens of each document."""
    ends = bounds.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


@flash4_documents.register_kernel("cpu")
def _(q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    parts = [flash4(*(tensor[at][None] for tensor in (q_nhd, k_ngd, v_ngd)), scale) for at in _apart(bounds)]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([log_sum[0] for _, log_sum in parts], dim=1)


@flash4_documents_backward.register_kernel("cpu")
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_nhd, q_nhd, k_ngd, v_ngd, bounds, out_nhd, log_sum_hn, _longest, scale = inputs
    parts = [
        flash4_backward(
            *(tensor[at][None] for tensor in (grad_nhd, q_nhd, k_ngd, v_ngd, out_nhd)), log_sum_hn[:, at][None], scale
        )
        for at in _apart(bounds)
    ]
    grad_q, grad_k, grad_v = (torch.cat([part[which][0] for part in parts]) for which in range(3))
    return grad_q, grad_k, grad_v
