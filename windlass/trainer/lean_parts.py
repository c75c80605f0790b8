"""What lean blocks are made of: functions with backward passes of their own.

A backward pass of which torch.compile would make several passes over memory is an operator: a Triton kernel on the GPU,
plain torch elsewhere.
Shapes: N tokens (B sequences of T), I inputs, O outputs of all parts, F the width between up and down; H query heads,
G key and value heads, D the width of what is normed or of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.trainer.kernels.cublas import product_plus


class JoinedProduct(torch.autograd.Function):
    """One product for several linear layers; `weights` are the parts of `joined_oi`, for their gradients."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, joined_oi: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_ni, joined_oi)
        ctx.sizes = [weight.shape[0] for weight in weights]
        return x_ni @ joined_oi.T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_no,) = grad_outputs
        x_ni, joined_oi = ctx.saved_tensors
        return grad_no @ joined_oi, None, *(grad_no.T @ x_ni).split(ctx.sizes)


class AddedProduct(torch.autograd.Function):
    """A linear layer whose output is added to a residual stream."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, weight_oi: Tensor, residual_no: Tensor) -> Tensor:
        ctx.save_for_backward(x_ni, weight_oi)
        out_no: Tensor = product_plus(x_ni, weight_oi, residual_no)
        return out_no

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad_no,) = grad_outputs
        x_ni, weight_oi = ctx.saved_tensors
        return grad_no @ weight_oi, grad_no.T @ x_ni, grad_no


class Normed(torch.autograd.Function):
    """RMS norm that hands its input on beside the result, so that both gradients meet in one backward pass."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight_d: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_nd, weight_d)
        ctx.epsilon = epsilon
        return norm(x_nd, weight_d, epsilon), x_nd

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_nd, added_nd = grad_outputs
        return *norm_backward(grad_nd, added_nd, *ctx.saved_tensors, ctx.epsilon), None


class Rotated(torch.autograd.Function):
    """The heads of a joined product [B, T, H + 2 G, D] apart, queries and keys rotated: q, k, v, each [B, T, …, D]."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, groups: int, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos_btd, sin_btd)
        q, k, v = torch.split(joined, [joined.shape[2] - 2 * groups, groups, groups], dim=2)
        return rotate(q, cos_btd, sin_btd), rotate(k, cos_btd, sin_btd), v.clone()  # a view would keep all of `joined`

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return rotate_backward(*grad_outputs, *ctx.saved_tensors), None, None, None


class Swiglu(torch.autograd.Function):
    """`silu(gate) * up` of a gate and an up side by side."""

    @staticmethod
    def forward(ctx: Any, gate_up_nf: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_nf)
        gate, up = gate_up_nf.chunk(2, dim=1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gate_up_nf,) = ctx.saved_tensors
        out: Tensor = swiglu_backward(grad_outputs[0], gate_up_nf)
        return out


def rotate(x_bthd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> Tensor:
    low, high = x_bthd.chunk(2, dim=-1)
    return x_bthd * cos_btd.unsqueeze(2) + torch.cat([-high, low], dim=-1) * sin_btd.unsqueeze(2)


@torch.library.custom_op("windlass::norm", mutates_args=(), device_types="cuda")
def norm(x_nd: Tensor, weight_d: Tensor, epsilon: float) -> Tensor:
    from windlass.trainer.kernels import norm as kernel

    return kernel.norm(x_nd.contiguous(), weight_d, epsilon)


@norm.register_kernel("cpu")
def _(x_nd: Tensor, weight_d: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x_nd, weight_d.shape, weight_d, epsilon)


@norm.register_fake
def _(x_nd: Tensor, weight_d: Tensor, epsilon: float) -> Tensor:
    return x_nd.new_empty(x_nd.shape)


@torch.library.custom_op("windlass::norm_backward", mutates_args=(), device_types="cuda")
def norm_backward(
    grad_nd: Tensor, added_nd: Tensor, x_nd: Tensor, weight_d: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The gradient of `x_nd`, `added_nd` added to it, and that of the weight."""
    from windlass.trainer.kernels import norm as kernel

    return kernel.norm_backward(grad_nd.contiguous(), added_nd.contiguous(), x_nd.contiguous(), weight_d, epsilon)


@norm_backward.register_kernel("cpu")
def _(grad_nd: Tensor, added_nd: Tensor, x_nd: Tensor, weight_d: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x_nd.dtype, torch.float32)
    grad, x, weight = grad_nd.to(wide), x_nd.to(wide), weight_d.to(wide)
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
    normed, scaled = x * inverse, grad * weight
    along = (scaled * normed).mean(dim=-1, keepdim=True)
    grad_x = added_nd.to(wide) + (scaled - normed * along) * inverse
    return grad_x.to(x_nd.dtype), (grad * normed).sum(dim=0).to(weight_d.dtype)


@norm_backward.register_fake
def _(grad_nd: Tensor, added_nd: Tensor, x_nd: Tensor, weight_d: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x_nd.new_empty(x_nd.shape), weight_d.new_empty(weight_d.shape)


@torch.library.custom_op("windlass::rotate_backward", mutates_args=(), device_types="cuda")
def rotate_backward(
    grad_q_bthd: Tensor, grad_k_btgd: Tensor, grad_v_btgd: Tensor, cos_btd: Tensor, sin_btd: Tensor
) -> Tensor:
    """The gradient of the joined heads, [B, T, H + 2 G, D]."""
    from windlass.trainer.kernels import rotary as kernel

    return kernel.rotate_backward(
        *(one.contiguous() for one in (grad_q_bthd, grad_k_btgd, grad_v_btgd, cos_btd, sin_btd))
    )


@rotate_backward.register_kernel("cpu")
def _(grad_q_bthd: Tensor, grad_k_btgd: Tensor, grad_v_btgd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> Tensor:
    def back(grad: Tensor) -> Tensor:
        low, high = (grad * sin_btd.unsqueeze(2)).chunk(2, dim=-1)
        return grad * cos_btd.unsqueeze(2) + torch.cat([high, -low], dim=-1)

    return torch.cat([back(grad_q_bthd), back(grad_k_btgd), grad_v_btgd], dim=2)


@rotate_backward.register_fake
def _(grad_q_bthd: Tensor, grad_k_btgd: Tensor, grad_v_btgd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> Tensor:
    batch, length, heads, size = grad_q_bthd.shape
    return grad_q_bthd.new_empty(batch, length, heads + 2 * grad_k_btgd.shape[2], size)


@torch.library.custom_op("windlass::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward(grad_nf: Tensor, gate_up_nf: Tensor) -> Tensor:
    """The gradient of gate and up, side by side as they were."""
    from windlass.trainer.kernels import swiglu as kernel

    return kernel.swiglu_backward(grad_nf.contiguous(), gate_up_nf.contiguous())


@swiglu_backward.register_kernel("cpu")
def _(grad_nf: Tensor, gate_up_nf: Tensor) -> Tensor:
    wide = torch.promote_types(grad_nf.dtype, torch.float32)
    grad, (gate, up) = grad_nf.to(wide), gate_up_nf.to(wide).chunk(2, dim=1)
    opened = torch.sigmoid(gate)
    parts = grad * up * opened * (1 + gate * (1 - opened)), grad * gate * opened
    return torch.cat(parts, dim=1).to(gate_up_nf.dtype)


@swiglu_backward.register_fake
def _(grad_nf: Tensor, gate_up_nf: Tensor) -> Tensor:
    return gate_up_nf.new_empty(gate_up_nf.shape)
