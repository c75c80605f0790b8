"""Matrix products of the blocks in fp8, opt-in: one scale per tensor, all three products of a linear layer.

Weights and activations are e4m3, gradients e5m2. Scales are taken from the tensors themselves in the same step, so
there is no history to save. Masters, norms, attention, the head and everything between stay what they are.
Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.spec import Run
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.structure import blocks

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1024  # narrower products (keys, values) gain less than their quantisation costs
MULTIPLE = 16  # what the hardware asks of every dimension


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, and the factor that brings it back."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return scaled(x, scale, dtype), scale


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`a @ b` brought back to its true size. The hardware wants `a` by rows and `b` by columns."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to(dtype)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, weight_oi: Tensor) -> Tensor:
        x8, x_scale = quantize(x_ni, FORWARD)
        w8, w_scale = quantize(weight_oi, FORWARD)
        # The weight itself, which is held anyway: its fp8 copy of every layer would be a second model until backward.
        ctx.save_for_backward(x8, x_scale, weight_oi, w_scale)
        ctx.dtype = x_ni.dtype
        return scaled_product(x8, w8.t(), x_scale, w_scale, x_ni.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (grad_no,) = grad_outputs
        x8, x_scale, weight_oi, w_scale = ctx.saved_tensors
        w8 = scaled(weight_oi, w_scale, FORWARD)
        g8, g_scale = quantize(grad_no, BACKWARD)
        by_columns_w8, by_columns_x8 = w8.t().contiguous().t(), x8.t().contiguous().t()
        grad_x_ni = scaled_product(g8, by_columns_w8, g_scale, w_scale, ctx.dtype, fast=False)
        grad_w_oi = scaled_product(g8.t().contiguous(), by_columns_x8, g_scale, x_scale, ctx.dtype, fast=False)
        return grad_x_ni, grad_w_oi


class Float8Linear(nn.Linear):
    """A linear layer whose class says that it computes in fp8: one compiled block then serves all layers."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Float8Product.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return out.reshape(*x.shape[:-1], -1)


def fits(linear: nn.Linear) -> bool:
    sizes = (linear.in_features, linear.out_features)
    return linear.bias is None and min(sizes) >= SMALLEST and all(size % MULTIPLE == 0 for size in sizes)


def use_fp8(model: nn.Module, run: Run, ranks: Ranks) -> int:
    """Let the blocks' large linear layers compute in fp8; how many there are."""
    if run.train.precision != "bf16":
        raise UserError("train.fp8 needs train.precision=bf16", fix="train.precision=bf16")
    if ranks.device.type == "cuda" and torch.cuda.get_device_capability(ranks.device) < (8, 9):
        raise UserError(
            f"train.fp8 needs a GPU with fp8 units, not {torch.cuda.get_device_name(ranks.device)}",
            fix="train.fp8=false",
        )
    chosen = [
        module
        for block in blocks(model).values()
        for module in block.modules()
        if type(module) is nn.Linear and fits(module)
    ]
    if not chosen:
        raise UserError(
            "train.fp8 has nothing to do: no linear layer of the blocks is large enough",
            evidence=f"both sides must be at least {SMALLEST} and multiples of {MULTIPLE}",
            fix="train.fp8=false",
        )
    for linear in chosen:
        linear.__class__ = Float8Linear
    return len(chosen)
