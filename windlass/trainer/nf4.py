"""Weights in 4 bits (NF4): sixteen levels fitted to a normal distribution, one scale per 64 weights.

The levels are those published with QLoRA and used by bitsandbytes. Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError

BLOCK = 64
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NF4Weight(nn.Module):
    """One frozen weight matrix: two weights in a byte, and the largest magnitude of every block."""

    packed: Tensor
    scales: Tensor
    levels: Tensor

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: str = "meta") -> None:
        super().__init__()
        if outputs * inputs % BLOCK:
            raise UserError(
                f"a weight of {outputs} × {inputs} cannot be held in 4 bits",
                cause=f"its size is not a multiple of {BLOCK}",
                fix="model.lora.quantize=null",
            )
        self.shape, self.dtype = (outputs, inputs), dtype
        count = outputs * inputs
        # Not saved: a checkpoint holds what is trained, and these come from the model's files every time.
        self.register_buffer("packed", torch.empty(count // 2, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("scales", torch.empty(count // BLOCK, device=device), persistent=False)
        self.register_buffer("levels", torch.empty(len(LEVELS), device=device), persistent=False)

    @torch.no_grad()
    def set(self, weight_oi: Tensor) -> None:
        packed, scales = quantize(weight_oi.to(self.packed.device))
        self.packed.copy_(packed)
        self.scales.copy_(scales)
        self.levels.copy_(torch.tensor(LEVELS))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scales) of a matrix, each weight at its nearest level."""
    blocks = weight.to(torch.float32).reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    levels = torch.tensor(LEVELS, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    whole = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], borders).to(torch.uint8).reshape(-1, 2)
    return whole[:, 0] << 4 | whole[:, 1], scales


def dequantize(packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    whole = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1, BLOCK)
    return (levels[whole.int()] * scales[:, None]).to(dtype).reshape(shape)


class NF4Product(torch.autograd.Function):
    """`x W'` that brings W back in both passes, so that none of it is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed, scales, levels)
        ctx.shape = shape
        return x @ dequantize(packed, scales, levels, shape, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        packed, scales, levels = ctx.saved_tensors
        return grad @ dequantize(packed, scales, levels, ctx.shape, grad.dtype), None, None, None, None


def product(x: Tensor, weight: NF4Weight, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out: Tensor = NF4Product.apply(x, weight.packed, weight.scales, weight.levels, weight.shape)
    return out if bias is None else out + bias
