"""One AdamW step of a tensor in one pass: clip, decay, moments, the fp32 master and the bf16 copy it computes with."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    master,
    first,
    second,
    scalars,
    decay,
    beta1,
    beta2,
    epsilon,
    size,
    BLOCK: tl.constexpr,  # noqa: N803
    COPY: tl.constexpr,  # noqa: N803  the weight is not the master itself
):
    """`scalars` lives on the device: gradient scale, learning rate, the two bias corrections, 1 if the step counts."""
    if tl.load(scalars + 4) == 0.0:  # the gradient was not finite: leave everything as it is
        return
    scale, rate = tl.load(scalars), tl.load(scalars + 1)
    correction1, correction2 = tl.load(scalars + 2), tl.load(scalars + 3)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    g = tl.load(gradient + offsets, mask=inside).to(tl.float32) * scale
    p = tl.load(master + offsets, mask=inside)
    m = tl.load(first + offsets, mask=inside)
    v = tl.load(second + offsets, mask=inside)
    p = p * (1.0 - rate * decay)
    m = m + (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    p = p - rate * (m / correction1) / (tl.sqrt(v / correction2) + epsilon)
    tl.store(master + offsets, p, mask=inside)
    tl.store(first + offsets, m, mask=inside)
    tl.store(second + offsets, v, mask=inside)
    if COPY:
        tl.store(weight + offsets, p, mask=inside)


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: Tensor,
    *,
    decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    size, is_copy = master.numel(), weight.data_ptr() != master.data_ptr()
    tensors, settings = (weight, gradient, master, first, second, scalars), (decay, beta1, beta2, epsilon)
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](*tensors, *settings, size, BLOCK=BLOCK, COPY=is_copy, num_warps=4)
