"""Matrix products of the blocks in fp8, opt-in: one scale per tensor, all three products of a linear layer.

Weights and activations are e4m3, gradients e5m2. Scales are taken from the tensors themselves in the same step, so
there is no history to save. Masters, norms, attention, the head and everything between stay what they are.
A gated feed-forward is one function: what lies between its products is found and quantised on the way.
Shapes: N tokens, I inputs, O outputs, D the model's width, F that between up and down.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
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
    scale = scale_of(x.abs().amax(), dtype)
    return scaled(x, scale, dtype), scale


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return (largest.float() / torch.finfo(dtype).max).clamp(min=1e-12)


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
        g8, g_scale = quantize(grad_no, BACKWARD)
        return gradients(g8, g_scale, x8, x_scale, weight_oi, w_scale, ctx.dtype)


def gradients(
    g8: Tensor, g_scale: Tensor, x8: Tensor, x_scale: Tensor, weight_oi: Tensor, w_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Those of a product's input and of its weight."""
    w8 = scaled(weight_oi, w_scale, FORWARD)
    by_columns_w8, by_columns_x8 = w8.t().contiguous().t(), x8.t().contiguous().t()
    grad_x_ni = scaled_product(g8, by_columns_w8, g_scale, w_scale, dtype, fast=False)
    return grad_x_ni, scaled_product(g8.t().contiguous(), by_columns_x8, g_scale, x_scale, dtype, fast=False)


class Float8Linear(nn.Linear):
    """A linear layer whose class says that it computes in fp8: one compiled block then serves all layers."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Float8Product.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return out.reshape(*x.shape[:-1], -1)


class GatedProducts(torch.autograd.Function):
    """`down(silu(gate(x)) * up(x))`."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, gate_fd: Tensor, up_fd: Tensor, down_df: Tensor) -> Tensor:
        x8, x_scale = quantize(x_nd, FORWARD)
        gate8, gate_scale = quantize(gate_fd, FORWARD)
        up8, up_scale = quantize(up_fd, FORWARD)
        down8, down_scale = quantize(down_df, FORWARD)
        gate_nf = scaled_product(x8, gate8.t(), x_scale, gate_scale, x_nd.dtype, fast=True)
        up_nf = scaled_product(x8, up8.t(), x_scale, up_scale, x_nd.dtype, fast=True)
        h_scale = scale_of(gated_largest(gate_nf, up_nf), FORWARD)
        h8: Tensor = gated_quantized(gate_nf, up_nf, h_scale)
        weights = gate_fd, gate_scale, up_fd, up_scale, down_df, down_scale
        ctx.save_for_backward(x8, x_scale, gate_nf, up_nf, h8, h_scale, *weights)
        return scaled_product(h8, down8.t(), h_scale, down_scale, x_nd.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        x8, x_scale, gate_nf, up_nf, h8, h_scale, *weights = ctx.saved_tensors
        gate_fd, gate_scale, up_fd, up_scale, down_df, down_scale = weights
        dtype = gate_nf.dtype
        g8, g_scale = quantize(grad_outputs[0], BACKWARD)
        grad_h_nf, grad_down = gradients(g8, g_scale, h8, h_scale, down_df, down_scale, dtype)
        grad_gate_nf, grad_up_nf, largest = gated_backward(grad_h_nf, gate_nf, up_nf)
        of_gate, of_up = scale_of(largest, BACKWARD).unbind()
        gate8, up8 = scaled(grad_gate_nf, of_gate, BACKWARD), scaled(grad_up_nf, of_up, BACKWARD)
        grad_x, grad_gate = gradients(gate8, of_gate, x8, x_scale, gate_fd, gate_scale, dtype)
        more_x, grad_up = gradients(up8, of_up, x8, x_scale, up_fd, up_scale, dtype)
        return grad_x + more_x, grad_gate, grad_up, grad_down


@torch.library.custom_op("windlass::gated_largest", mutates_args=(), device_types="cuda")
def gated_largest(gate_nf: Tensor, up_nf: Tensor) -> Tensor:
    """The largest magnitude of `silu(gate) * up`."""
    from windlass.trainer.fast.kernels import swiglu as kernel

    return kernel.largest(gate_nf.contiguous(), up_nf.contiguous())


@gated_largest.register_kernel("cpu")
def _(gate_nf: Tensor, up_nf: Tensor) -> Tensor:
    return (F.silu(gate_nf.float()) * up_nf.float()).abs().amax()


@gated_largest.register_fake
def _(gate_nf: Tensor, up_nf: Tensor) -> Tensor:
    return gate_nf.new_empty((), dtype=torch.float32)


@torch.library.custom_op("windlass::gated_quantized", mutates_args=(), device_types="cuda")
def gated_quantized(gate_nf: Tensor, up_nf: Tensor, scale: Tensor) -> Tensor:
    """`silu(gate) * up` in fp8."""
    from windlass.trainer.fast.kernels import swiglu as kernel

    return kernel.quantize(gate_nf.contiguous(), up_nf.contiguous(), scale, FORWARD)


@gated_quantized.register_kernel("cpu")
def _(gate_nf: Tensor, up_nf: Tensor, scale: Tensor) -> Tensor:
    return scaled(F.silu(gate_nf.float()) * up_nf.float(), scale, FORWARD)


@gated_quantized.register_fake
def _(gate_nf: Tensor, up_nf: Tensor, scale: Tensor) -> Tensor:
    return gate_nf.new_empty(gate_nf.shape, dtype=FORWARD)


@torch.library.custom_op("windlass::gated_backward", mutates_args=(), device_types="cuda")
def gated_backward(grad_nf: Tensor, gate_nf: Tensor, up_nf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and the largest magnitude of each."""
    from windlass.trainer.fast.kernels import swiglu as kernel

    return kernel.backward_largest(grad_nf.contiguous(), gate_nf.contiguous(), up_nf.contiguous())


@gated_backward.register_kernel("cpu")
def _(grad_nf: Tensor, gate_nf: Tensor, up_nf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, gate, up = grad_nf.float(), gate_nf.float(), up_nf.float()
    opened = torch.sigmoid(gate)
    of_gate, of_up = grad * up * opened * (1 + gate * (1 - opened)), grad * gate * opened
    largest = torch.stack([of_gate.abs().amax(), of_up.abs().amax()])
    return of_gate.to(gate_nf.dtype), of_up.to(up_nf.dtype), largest


@gated_backward.register_fake
def _(grad_nf: Tensor, gate_nf: Tensor, up_nf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    empty = gate_nf.new_empty
    return empty(gate_nf.shape), empty(gate_nf.shape), empty(2, dtype=torch.float32)


class Float8Gated:
    """Takes the place of a gated feed-forward's own forward; the module keeps its parts and their names."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        out: Tensor = GatedProducts.apply(x.reshape(-1, x.shape[-1]), *weights)
        return out.reshape(*x.shape[:-1], -1)


def is_gated(module: Any) -> bool:
    """Whether a module is llama's feed-forward, with all its products in fp8."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return plain and len(list(module.children())) == 4 and all(type(part) is Float8Linear for part in parts)


@functools.cache
def gated_class(module: Any) -> Any:
    return type(f"Float8{module.__name__}", (Float8Gated, module), {})


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
    for block in blocks(model).values():
        for module in [one for one in block.modules() if is_gated(one)]:
            module.__class__ = gated_class(type(module))
    return len(chosen)
