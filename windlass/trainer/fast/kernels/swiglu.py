"""`silu(gate) * up` for a gate and an up that lie side by side, and its backward pass: every number is read once.

What torch.compile makes of the backward pass takes twice as long: it reads everything for each of the two halves it
writes. The forward pass is here for results that are columns of something wider.
"""

from __future__ import annotations

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
