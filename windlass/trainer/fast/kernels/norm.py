"""RMS norm of rows, and its backward pass in one: both gradients, and the residual stream's added, from one read."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_PROCESSOR = 4  # each adds up the weight's gradient over its own rows


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    epsilon,
    width,
    out_stride,
    BLOCK: tl.constexpr,  # noqa: N803
):
    number = tl.program_id(0).to(tl.int64)
    row = number * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    tl.store(out + number * out_stride + columns, values * inverse * scales, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    gradient,
    added,
    x,
    weight,
    grad_x,
    parts,
    epsilon,
    num_rows,
    width,
    grad_stride,
    BLOCK: tl.constexpr,  # noqa: N803
):
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.range(0, tl.cdiv(num_rows - first, step), num_stages=3):
        number = first + turn * step
        row = number * width
        values = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(gradient + number * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        others = tl.load(added + row + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
        normed = values * inverse
        scaled = grads * scales
        along = tl.sum(scaled * normed, axis=0) / width
        tl.store(grad_x + row + columns, others + (scaled - normed * along) * inverse, mask=inside)
        part += grads * normed
    tl.store(parts + first * width + columns, part, mask=inside)


def norm(x_nd: Tensor, weight_d: Tensor, epsilon: float, *, out_nd: Tensor | None = None) -> Tensor:
    """`out_nd` may be columns of something wider."""
    out_nd = torch.empty_like(x_nd) if out_nd is None else out_nd
    rows, width = x_nd.shape
    _norm_kernel[(rows,)](x_nd, weight_d, out_nd, epsilon, width, out_nd.stride(0), **_shape(width))
    return out_nd


def norm_backward(
    grad_nd: Tensor, added_nd: Tensor, x_nd: Tensor, weight_d: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The gradient of `x_nd`, to which `added_nd` is added, and that of the weight.

    `grad_nd` may be columns of something wider.
    """
    rows, width = x_nd.shape
    programs = min(rows, PROGRAMS_PER_PROCESSOR * _processors(x_nd.device))
    grad_x_nd = torch.empty_like(x_nd)
    parts_pd = torch.empty(programs, width, dtype=torch.float32, device=x_nd.device)
    _norm_backward_kernel[(programs,)](
        grad_nd, added_nd, x_nd, weight_d, grad_x_nd, parts_pd, epsilon, rows, width, grad_nd.stride(0), **_shape(width)
    )
    return grad_x_nd, parts_pd.sum(dim=0).to(weight_d.dtype)


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 4), 16)}


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
