"""The backward pass of splitting a joined product into q, k and v and rotating q and k: one pass, one output."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _turn_back(  # type: ignore[no-untyped-def]
    gradient,
    out,
    cos_low,
    sin_low,
    cos_high,
    sin_high,
    num_heads,
    half,
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
):
    heads, places = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    low = heads * 2 * half + places
    inside = (heads < num_heads) & (places < half)
    a = tl.load(gradient + low, mask=inside).to(tl.float32)
    b = tl.load(gradient + low + half, mask=inside).to(tl.float32)
    tl.store(out + low, a * cos_low + b * sin_high, mask=inside)
    tl.store(out + low + half, b * cos_high - a * sin_low, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_backward_kernel(  # type: ignore[no-untyped-def]
    grad_q,
    grad_k,
    grad_v,
    cos,
    sin,
    out,
    num_angles,
    num_heads,
    num_groups,
    half,
    HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
):
    """One program per token. A token's angles are those of its place, or its own where places restart."""
    token = tl.program_id(0).to(tl.int64)
    size = 2 * half
    places = tl.arange(0, HALF)
    angle = (token % num_angles) * size + places
    known = places < half
    cos_low = tl.load(cos + angle, mask=known).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=known).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + half, mask=known).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + half, mask=known).to(tl.float32)[None, :]
    out += token * (num_heads + 2 * num_groups) * size
    grad_q += token * num_heads * size
    _turn_back(grad_q, out, cos_low, sin_low, cos_high, sin_high, num_heads, half, HEADS, HALF)
    out += num_heads * size
    grad_k += token * num_groups * size
    _turn_back(grad_k, out, cos_low, sin_low, cos_high, sin_high, num_groups, half, GROUPS, HALF)
    out += num_groups * size
    values = tl.arange(0, GROUPS * HALF * 2)
    inside = values < num_groups * size
    tl.store(out + values, tl.load(grad_v + token * num_groups * size + values, mask=inside), mask=inside)


def rotate_backward(grad_q_bthd: Tensor, grad_k_btgd: Tensor, grad_v_btgd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joined heads, [B, T, H + 2 G, D]."""
    batch, length, heads, size = grad_q_bthd.shape
    groups = grad_k_btgd.shape[2]
    out = grad_q_bthd.new_empty(batch, length, heads + 2 * groups, size)
    _rotate_backward_kernel[(batch * length,)](
        grad_q_bthd,
        grad_k_btgd,
        grad_v_btgd,
        cos,
        sin,
        out,
        cos.numel() // size,
        heads,
        groups,
        size // 2,
        HEADS=triton.next_power_of_2(heads),
        GROUPS=triton.next_power_of_2(groups),
        HALF=triton.next_power_of_2(size // 2),
        num_warps=4,
    )
    return out
