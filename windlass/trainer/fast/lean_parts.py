"""What lean blocks are made of: functions with backward passes of their own.

A backward pass of which torch.compile would make several passes over memory is an operator: a Triton kernel on the GPU,
plain torch elsewhere.
Shapes: N tokens (B sequences of T), I inputs, O outputs of all parts, F the width between up and down; H query heads,
G key and value heads, D the width of what is normed or of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.trainer.fast.kernels.cublas import product_plus


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


class GatheredProduct(torch.autograd.Function):
    """The same for weights that do not lie side by side: FSDP2 gathers each into memory of its own."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_ni, *weights)
        out: Tensor = gathered_product(x_ni, list(weights))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        (grad_no,) = grad_outputs
        x_ni, *weights = ctx.saved_tensors
        grad_x_ni, grad_oi = gathered_product_backward(grad_no, x_ni, weights)
        return grad_x_ni, *grad_oi.split([weight.shape[0] for weight in weights])


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


def _by_rows(x_nd: Tensor) -> Tensor:
    """Rows may be apart from each other, as columns of something wider are; the numbers of one are not."""
    return x_nd if x_nd.stride(1) == 1 else x_nd.contiguous()


def rotate(x_bthd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> Tensor:
    low, high = x_bthd.chunk(2, dim=-1)
    return x_bthd * cos_btd.unsqueeze(2) + torch.cat([-high, low], dim=-1) * sin_btd.unsqueeze(2)


NARROW = 2048  # outputs: narrower products waste more than it takes to copy their weights side by side


@torch.library.custom_op("windlass::gathered_product", mutates_args=())
def gathered_product(x_ni: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`x W'` for each of some weights, side by side."""
    sizes = [weight.shape[0] for weight in weights]
    if min(sizes) < NARROW:
        return x_ni @ torch.cat(list(weights)).T
    out_no = x_ni.new_empty(x_ni.shape[0], sum(sizes))
    for weight, part in zip(weights, torch.split(out_no, sizes, dim=1), strict=True):
        torch.mm(x_ni, weight.T, out=part)
    return out_no


@gathered_product.register_fake
def _(x_ni: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x_ni.new_empty(x_ni.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("windlass::gathered_product_backward", mutates_args=())
def gathered_product_backward(grad_no: Tensor, x_ni: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of the weights below each other."""
    sizes = [weight.shape[0] for weight in weights]
    if min(sizes) < NARROW:
        return grad_no @ torch.cat(list(weights)), grad_no.T @ x_ni
    grad_x_ni = torch.empty_like(x_ni)
    grad_oi = x_ni.new_empty(sum(sizes), x_ni.shape[1])
    parts = zip(weights, torch.split(grad_no, sizes, dim=1), torch.split(grad_oi, sizes), strict=True)
    for number, (weight, grad, grad_weight) in enumerate(parts):
        torch.mm(grad.T, x_ni, out=grad_weight)
        if number:
            grad_x_ni.addmm_(grad, weight)
        else:
            torch.mm(grad, weight, out=grad_x_ni)
    return grad_x_ni, grad_oi


@gathered_product_backward.register_fake
def _(grad_no: Tensor, x_ni: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    outputs = sum(weight.shape[0] for weight in weights)
    return x_ni.new_empty(x_ni.shape), x_ni.new_empty(outputs, x_ni.shape[1])


@torch.library.custom_op("windlass::norm", mutates_args=(), device_types="cuda")
def norm(x_nd: Tensor, weight_d: Tensor, epsilon: float) -> Tensor:
    from windlass.trainer.fast.kernels import norm as kernel

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
    from windlass.trainer.fast.kernels import norm as kernel

    return kernel.norm_backward(_by_rows(grad_nd), added_nd.contiguous(), x_nd.contiguous(), weight_d, epsilon)


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
    from windlass.trainer.fast.kernels import rotary as kernel

    return kernel.rotate_backward(
        *(tensor.contiguous() for tensor in (grad_q_bthd, grad_k_btgd, grad_v_btgd, cos_btd, sin_btd))
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
    from windlass.trainer.fast.kernels import swiglu as kernel

    return kernel.swiglu_backward(_by_rows(grad_nf), gate_up_nf.contiguous())


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
