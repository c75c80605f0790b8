"""Weights in 4 bits (NF4): sixteen levels fitted to a normal distribution, one scale per 64 weights.

The levels are those published with QLoRA and used by bitsandbytes. Products with such weights are operators of their
own: what they bring back exists within them alone. Written in plain torch, the compiler finds that both passes bring
back the same matrix and keeps it from one to the other, and then 4 bits take more memory than 16.
Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
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


QUANTIZED_AT_ONCE = 1 << 24  # weights: what quantising holds beside them is about 25 bytes each


class NF4Weight(nn.Module):
    """One frozen weight matrix: two weights in a byte, and the largest magnitude of every block."""

    packed: Tensor
    scales: Tensor

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: str = "meta") -> None:
        super().__init__()
        if outputs * inputs % BLOCK or inputs % 2:
            raise UserError(
                f"a weight of {outputs} × {inputs} cannot be held in 4 bits",
                cause=f"its size is not a multiple of {BLOCK}, or its rows are of uneven length",
                fix="model.lora.quantize=null",
            )
        self.shape, self.dtype = (outputs, inputs), dtype
        count = outputs * inputs
        # Not saved: a checkpoint holds what is trained, and these come from the model's files every time.
        self.register_buffer("packed", torch.empty(count // 2, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("scales", torch.empty(count // BLOCK, device=device), persistent=False)

    @torch.no_grad()
    def set(self, weight_oi: Tensor) -> None:
        weights = weight_oi.reshape(-1)
        for start in range(0, weights.numel(), QUANTIZED_AT_ONCE):
            part = weights[start : start + QUANTIZED_AT_ONCE].to(self.packed.device)
            packed, scales = quantize(part)
            self.packed[start // 2 :][: packed.numel()].copy_(packed)
            self.scales[start // BLOCK :][: scales.numel()].copy_(scales)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, scales) of a matrix, each weight at its nearest level."""
    blocks = weight.to(torch.float32).reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    levels = level_table(weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    places = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], borders, out_int32=True)
    whole = places.to(torch.uint8).reshape(-1, 2)
    return whole[:, 0] << 4 | whole[:, 1], scales


@functools.cache
def level_table(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def dequantize_into(out_oi: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Write a whole matrix, which may be columns of something wider."""
    levels = level_table(packed.device)
    if packed.is_cuda and out_oi.shape[1] % BLOCK == 0:  # rows of whole blocks, as all real models have
        from windlass.trainer.fast.kernels.nf4 import dequantize_into as kernel

        kernel(out_oi, packed, scales, levels)
        return
    whole = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1, BLOCK)
    out_oi.copy_((levels[whole.int()] * scales[:, None]).reshape(out_oi.shape))


def dequantize(packed: Tensor, scales: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    weight_oi = torch.empty(outputs, inputs, dtype=dtype, device=packed.device)
    dequantize_into(weight_oi, packed, scales)
    return weight_oi


@torch.library.custom_op("windlass::nf4_product", mutates_args=())
def nf4_product(x_ni: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """`x W'`."""
    return x_ni @ dequantize(packed, scales, outputs, x_ni.shape[1], x_ni.dtype).T


@nf4_product.register_fake
def _(x_ni: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    return x_ni.new_empty(x_ni.shape[0], outputs)


@torch.library.custom_op("windlass::nf4_product_backward", mutates_args=())
def nf4_product_backward(grad_no: Tensor, packed: Tensor, scales: Tensor, inputs: int) -> Tensor:
    return grad_no @ dequantize(packed, scales, grad_no.shape[1], inputs, grad_no.dtype)


@nf4_product_backward.register_fake
def _(grad_no: Tensor, packed: Tensor, scales: Tensor, inputs: int) -> Tensor:
    return grad_no.new_empty(grad_no.shape[0], inputs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_ni, packed, scales, _outputs = inputs
    ctx.save_for_backward(packed, scales)
    ctx.inputs = x_ni.shape[1]


def _backward(ctx: Any, grad_no: Tensor) -> tuple[Tensor | None, ...]:
    return nf4_product_backward(grad_no, *ctx.saved_tensors, ctx.inputs), None, None, None


nf4_product.register_autograd(_backward, setup_context=_save)


def product(x: Tensor, weight: NF4Weight, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    outputs, inputs = weight.shape
    out: Tensor = nf4_product(x.reshape(-1, inputs), weight.packed, weight.scales, outputs)
    out = out.reshape(*x.shape[:-1], outputs)
    return out if bias is None else out + bias
