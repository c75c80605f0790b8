"""Matrix products of the blocks in fp8, opt-in: one scale per tensor, all three products of a linear layer.

Weights and activations are e4m3, gradients e5m2. Scales are taken from the tensors themselves in the same step, so
there is no history to save. Masters, norms, attention, the head and everything between stay what they are. In lean
blocks, layers that read the same input are one product with one scale.
Shapes: N tokens, I inputs, O outputs of all parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.checks import FP8_SMALLEST as SMALLEST
from windlass.plan.layout import Layout
from windlass.trainer.model.structure import blocks, projections

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # what the hardware asks of every dimension


def scale_of(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    """The factor that brings the parts of one tensor back from fp8."""
    largest = functools.reduce(torch.maximum, [part.abs().amax() for part in parts])
    return (largest.float() / torch.finfo(dtype).max).clamp(min=1e-12)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * scale.reciprocal()).clamp(-largest, largest).to(dtype)


@torch.library.custom_op("windlass::in_both_layouts", mutates_args=(), device_types="cuda")
def in_both_layouts(x_nd: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8, by rows and by columns, as the products of the two passes want it."""
    from windlass.trainer.fast.kernels import quantize as kernel

    return kernel.in_both_layouts(x_nd.contiguous(), scale, dtype)


@in_both_layouts.register_kernel("cpu")
def _(x_nd: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x8 = scaled(x_nd, scale, dtype)
    return x8, x8.t().contiguous()


@in_both_layouts.register_fake
def _(x_nd: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = x_nd.shape
    return x_nd.new_empty(rows, width, dtype=dtype), x_nd.new_empty(width, rows, dtype=dtype)


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`a @ b` brought back to its true size. The hardware wants `a` by rows and `b` by columns."""
    if a.is_cuda:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    assert (a.stride(1), b.stride(0)) == (1, 1), (a.stride(), b.stride())
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to(dtype)


class Float8Product(torch.autograd.Function):
    """`x W'` for a weight, or for several below each other."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, *weights: Tensor) -> Tensor:
        x_scale, w_scale = scale_of(FORWARD, x_ni), scale_of(FORWARD, *weights)
        x8_ni, x8_in = in_both_layouts(x_ni, x_scale, FORWARD)
        w8_oi = torch.cat([scaled(weight, w_scale, FORWARD) for weight in weights])
        # The weights, which are held anyway: fp8 copies of every layer would be a second model until backward.
        ctx.save_for_backward(x8_in, x_scale, w_scale, *weights)
        ctx.dtype = x_ni.dtype
        return scaled_product(x8_ni, w8_oi.t(), x_scale, w_scale, x_ni.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        (grad_no,) = grad_outputs
        x8_in, x_scale, w_scale, *weights = ctx.saved_tensors
        g_scale = scale_of(BACKWARD, grad_no)
        g8_no, g8_on = in_both_layouts(grad_no, g_scale, BACKWARD)
        w8_io = torch.cat([scaled(weight, w_scale, FORWARD).t() for weight in weights], dim=1).contiguous()
        grad_x_ni = scaled_product(g8_no, w8_io.t(), g_scale, w_scale, ctx.dtype, fast=False)
        grad_w_oi = scaled_product(g8_on, x8_in.t(), g_scale, x_scale, ctx.dtype, fast=False)
        return grad_x_ni, *torch.split(grad_w_oi, [weight.shape[0] for weight in weights])


class Float8Linear(nn.Linear):
    """A linear layer whose class says that it computes in fp8: one compiled block then serves all layers."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Float8Product.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return out.reshape(*x.shape[:-1], -1)


def fits(layers: Sequence[Any]) -> bool:
    """Whether layers that read the same input gain by one product in fp8."""
    if not all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
        return False
    inputs, outputs = layers[0].in_features, [layer.out_features for layer in layers]
    wide: bool = min(inputs, sum(outputs)) >= SMALLEST
    return wide and all(size % MULTIPLE == 0 for size in (inputs, *outputs))


def use_fp8(model: nn.Module, layout: Layout, device: torch.device) -> int:
    """Let the blocks' large linear layers compute in fp8; how many there are."""
    if layout.precision != "bf16":
        raise UserError("train.fp8 needs train.precision=bf16", fix="train.precision=bf16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"train.fp8 needs a GPU with fp8 units, not {torch.cuda.get_device_name(device)}",
            fix="train.fp8=false",
        )
    chosen = [
        layer
        for block in blocks(model).values()
        for layers in (projections(block) if layout.lean else [[module] for module in block.modules()])
        if fits(layers)
        for layer in layers
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
