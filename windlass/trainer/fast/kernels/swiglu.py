"""`silu(gate) * up`, and its backward pass: every number is read once.

The first kernels are for a gate and an up that lie side by side, the last ones for two tensors and fp8.

What torch.compile makes of the backward pass takes twice as long: it reads everything for each of the two halves it
writes. The forward pass is here for results that are columns of something wider.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_kernel(gate_up, out, width, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    here = row * 2 * width + columns
    gate = tl.load(gate_up + here, mask=inside).to(tl.float32)
    up = tl.load(gate_up + here + width, mask=inside).to(tl.float32)
    tl.store(out + row * out_stride + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate_up_nf: Tensor, out_nf: Tensor) -> None:
    rows, width = out_nf.shape
    _swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up_nf, out_nf, width, out_nf.stride(0), BLOCK=BLOCK, num_warps=4
    )


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    gradient,
    gate_up,
    grad_gate_up,
    width,
    grad_stride,
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    here = row * 2 * width + columns
    grads = tl.load(gradient + row * grad_stride + columns, mask=inside).to(tl.float32)
    gate = tl.load(gate_up + here, mask=inside).to(tl.float32)
    up = tl.load(gate_up + here + width, mask=inside).to(tl.float32)
    open_ = tl.sigmoid(gate)
    tl.store(grad_gate_up + here, grads * up * open_ * (1.0 + gate * (1.0 - open_)), mask=inside)
    tl.store(grad_gate_up + here + width, grads * gate * open_, mask=inside)


def swiglu_backward(grad_nf: Tensor, gate_up_nf: Tensor) -> Tensor:
    grad_gate_up_nf = torch.empty_like(gate_up_nf)
    rows, width = grad_nf.shape
    _swiglu_backward_kernel[(rows, triton.cdiv(width, BLOCK))](
        grad_nf, gate_up_nf, grad_gate_up_nf, width, grad_nf.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return grad_gate_up_nf


# For fp8: the largest magnitude is found on the way, one for each program.

PROGRAMS_PER_PROCESSOR = 8
FLAT = 2048  # numbers of a turn


@triton.jit  # type: ignore[untyped-decorator]
def _largest_kernel(gate, up, largest, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    found = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.range(0, tl.cdiv(size - first * BLOCK, step * BLOCK), num_stages=3):
        at = (first + turn * step) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.abs(g * tl.sigmoid(g) * u))
    tl.store(largest + first, tl.max(found, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_kernel(gate, up, scale, out, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u / tl.load(scale)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_largest_kernel(  # type: ignore[no-untyped-def]
    gradient,
    gate,
    up,
    grad_gate,
    grad_up,
    largest,
    size,
    BLOCK: tl.constexpr,  # noqa: N803
):
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    of_gate, of_up = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.range(0, tl.cdiv(size - first * BLOCK, step * BLOCK), num_stages=3):
        at = (first + turn * step) * BLOCK + tl.arange(0, BLOCK)
        d = tl.load(gradient + at, mask=at < size, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(g)
        to_gate, to_up = d * u * open_ * (1.0 + g * (1.0 - open_)), d * g * open_
        tl.store(grad_gate + at, to_gate, mask=at < size)
        tl.store(grad_up + at, to_up, mask=at < size)
        of_gate, of_up = tl.maximum(of_gate, tl.abs(to_gate)), tl.maximum(of_up, tl.abs(to_up))
    tl.store(largest + 2 * first, tl.max(of_gate, axis=0))
    tl.store(largest + 2 * first + 1, tl.max(of_up, axis=0))


def largest(gate: Tensor, up: Tensor) -> Tensor:
    """The largest magnitude of `silu(gate) * up`."""
    parts = torch.empty(_programs(gate), device=gate.device)
    _largest_kernel[(parts.numel(),)](gate, up, parts, gate.numel(), BLOCK=FLAT, num_warps=8)
    return parts.amax()


def quantize(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up / scale` in an fp8 type."""
    out = torch.empty_like(gate, dtype=dtype)
    size, limit = gate.numel(), torch.finfo(dtype).max
    _quantize_kernel[(triton.cdiv(size, FLAT),)](gate, up, scale, out, size, LARGEST=limit, BLOCK=FLAT, num_warps=8)
    return out


def backward_largest(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and the largest magnitude of each."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    parts = torch.empty(_programs(gate), 2, device=gate.device)
    _backward_largest_kernel[(parts.shape[0],)](
        gradient, gate, up, grad_gate, grad_up, parts, gate.numel(), BLOCK=FLAT, num_warps=8
    )
    return grad_gate, grad_up, parts.amax(dim=0)


def _programs(like: Tensor) -> int:
    return min(triton.cdiv(like.numel(), FLAT), PROGRAMS_PER_PROCESSOR * _processors(like.device))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
