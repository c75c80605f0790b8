"""Lean blocks with LoRA: an adapter's two small products ride along in the large ones beside them.

The input of a product is widened by `x A'`, its weight by `B`: `[x, x A'] [W, B]'` is `x W' + x A' B'` in one product,
and its backward pass `g [W, B]` brings the gradient of `x A'` along. What is wider than x is no variable of its own:
who makes a widened input takes the gradient of its first columns alone, and the product gives that complete.

Weights in bf16 have room for B in the same tensor, and are views of it; weights in 4 bits get it when they are
brought back, which happens within one operator, so that nothing of it is kept.
Shapes: N tokens, I inputs, O outputs of all parts, P columns that are added; D, F as in lean_parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.trainer.fast.kernels.cublas import product_plus
from windlass.trainer.fast.lean_parts import norm_backward, swiglu_backward
from windlass.trainer.model.lora import LoraLinear, QuantizedLoraLinear
from windlass.trainer.model.nf4 import dequantize_into
from windlass.trainer.model.structure import projections

MULTIPLE = 8  # columns are added by so many: rows stay aligned to 16 bytes


def width_of(adapters: int, rank: int) -> int:
    """Columns that are added for some adapters of one rank."""
    return -(-adapters * rank // MULTIPLE) * MULTIPLE


# Inputs, widened


@torch.library.custom_op("windlass::beside", mutates_args=())
def beside(x_ni: Tensor, a_pi: Tensor) -> Tensor:
    wide = _wide(x_ni, a_pi, x_ni.shape[1])
    wide[:, : x_ni.shape[1]] = x_ni
    return _fill_tail(wide, a_pi)


@beside.register_fake
def _(x_ni: Tensor, a_pi: Tensor) -> Tensor:
    return _wide(x_ni, a_pi, x_ni.shape[1])


@torch.library.custom_op("windlass::norm_beside", mutates_args=())
def norm_beside(x_nd: Tensor, weight_d: Tensor, epsilon: float, a_pd: Tensor) -> Tensor:
    wide, width = _wide(x_nd, a_pd, x_nd.shape[1]), x_nd.shape[1]
    if x_nd.is_cuda:
        from windlass.trainer.fast.kernels import norm as kernel

        kernel.norm(x_nd.contiguous(), weight_d, epsilon, out_nd=wide[:, :width])
    else:
        wide[:, :width] = F.rms_norm(x_nd, weight_d.shape, weight_d, epsilon)
    return _fill_tail(wide, a_pd)


@norm_beside.register_fake
def _(x_nd: Tensor, weight_d: Tensor, epsilon: float, a_pd: Tensor) -> Tensor:
    return _wide(x_nd, a_pd, x_nd.shape[1])


@torch.library.custom_op("windlass::swiglu_beside", mutates_args=())
def swiglu_beside(gate_up_nf: Tensor, a_pf: Tensor) -> Tensor:
    width = gate_up_nf.shape[1] // 2
    wide = _wide(gate_up_nf, a_pf, width)
    if gate_up_nf.is_cuda:
        from windlass.trainer.fast.kernels import swiglu as kernel

        kernel.swiglu(gate_up_nf.contiguous(), wide[:, :width])
    else:
        gate, up = gate_up_nf.chunk(2, dim=1)
        wide[:, :width] = F.silu(gate) * up
    return _fill_tail(wide, a_pf)


@swiglu_beside.register_fake
def _(gate_up_nf: Tensor, a_pf: Tensor) -> Tensor:
    return _wide(gate_up_nf, a_pf, gate_up_nf.shape[1] // 2)


def _wide(x: Tensor, a_pi: Tensor, inputs: int) -> Tensor:
    return x.new_empty(x.shape[0], inputs + a_pi.shape[0])


def _fill_tail(wide: Tensor, a_pi: Tensor) -> Tensor:
    inputs = a_pi.shape[1]
    torch.mm(wide[:, :inputs], a_pi.T, out=wide[:, inputs:])
    return wide


class Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, a_pi: Tensor) -> Tensor:
        ctx.inputs = x_ni.shape[1]
        out: Tensor = beside(x_ni, a_pi)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # For attention: torch keeps cuDNN's plan of its backward pass by the layouts of q, k and v alone, so that a
        # gradient laid out otherwise than the first one of the process would be read wrongly.
        return grad_outputs[0][:, : ctx.inputs].contiguous(), None


class NormedBeside(torch.autograd.Function):
    """RMS norm, widened; its input is handed on, so that both gradients meet in one backward pass."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight_d: Tensor, epsilon: float, a_pd: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_nd, weight_d)
        ctx.epsilon = epsilon
        return norm_beside(x_nd, weight_d, epsilon, a_pd), x_nd

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_wide, added_nd = grad_outputs
        x_nd, weight_d = ctx.saved_tensors
        grad_nd = grad_wide[:, : x_nd.shape[1]]
        return *norm_backward(grad_nd, added_nd, x_nd, weight_d, ctx.epsilon), None, None


class SwigluBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_nf: Tensor, a_pf: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_nf)
        out: Tensor = swiglu_beside(gate_up_nf, a_pf)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up_nf,) = ctx.saved_tensors
        return swiglu_backward(grad_outputs[0][:, : gate_up_nf.shape[1] // 2], gate_up_nf), None


# Products


@torch.library.custom_op("windlass::wide_backward", mutates_args=())
def wide_backward(grad_no: Tensor, weight_ok: Tensor, a_pi: Tensor) -> Tensor:
    """The gradient of x in the first I columns, the way through `x A'` added; that of `x A'` in the others."""
    return _wide_backward(grad_no, weight_ok, a_pi)


@wide_backward.register_fake
def _(grad_no: Tensor, weight_ok: Tensor, a_pi: Tensor) -> Tensor:
    return grad_no.new_empty(grad_no.shape[0], weight_ok.shape[1])


@torch.library.custom_op("windlass::nf4_wide", mutates_args=())
def nf4_wide(
    wide_nk: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], b_op: Tensor, residual_no: Tensor | None
) -> Tensor:
    weight_ok = _brought_back(packed, scales, b_op, wide_nk.shape[1])
    return wide_nk @ weight_ok.T if residual_no is None else product_plus(wide_nk, weight_ok, residual_no)


@nf4_wide.register_fake
def _(
    wide_nk: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], b_op: Tensor, residual_no: Tensor | None
) -> Tensor:
    return wide_nk.new_empty(wide_nk.shape[0], b_op.shape[0])


@torch.library.custom_op("windlass::nf4_wide_backward", mutates_args=())
def nf4_wide_backward(
    grad_no: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], b_op: Tensor, a_pi: Tensor
) -> Tensor:
    weight_ok = _brought_back(packed, scales, b_op, sum(a_pi.shape))
    return _wide_backward(grad_no, weight_ok, a_pi)


@nf4_wide_backward.register_fake
def _(grad_no: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], b_op: Tensor, a_pi: Tensor) -> Tensor:
    return grad_no.new_empty(grad_no.shape[0], sum(a_pi.shape))


def _wide_backward(grad_no: Tensor, weight_ok: Tensor, a_pi: Tensor) -> Tensor:
    """Two products: one of I + P columns would be cut into tiles that a few columns fill badly."""
    inputs = a_pi.shape[1]
    grad_nk = grad_no.new_empty(grad_no.shape[0], weight_ok.shape[1])
    torch.mm(grad_no, weight_ok[:, :inputs], out=grad_nk[:, :inputs])
    torch.mm(grad_no, weight_ok[:, inputs:], out=grad_nk[:, inputs:])
    grad_nk[:, :inputs].addmm_(grad_nk[:, inputs:], a_pi)
    return grad_nk


def _brought_back(packed: Sequence[Tensor], scales: Sequence[Tensor], b_op: Tensor, width: int) -> Tensor:
    """The parts below each other, B beside them."""
    weight_ok = b_op.new_empty(b_op.shape[0], width)
    inputs, row = width - b_op.shape[1], 0
    for packed_weight, its_scales in zip(packed, scales, strict=True):
        rows = 2 * packed_weight.numel() // inputs
        dequantize_into(weight_ok[row : row + rows, :inputs], packed_weight, its_scales)
        row += rows
    weight_ok[:, inputs:] = b_op
    return weight_ok


class WideProduct(torch.autograd.Function):
    """A product of a widened input with weights that B lies beside, `residual` added where there is one.

    `tensors`: what is held of the weights (one wide tensor, or packed parts and then their scales), then every A, then
    every B. `a_pi` is all A times the adapters' scale, `b_op` all B in their places (for weights in 4 bits).
    """

    @staticmethod
    def forward(
        ctx: Any,
        wide_nk: Tensor,
        residual_no: Tensor | None,
        a_pi: Tensor,
        b_op: Tensor | None,
        scale: float,
        num_held: int,
        *tensors: Tensor,
    ) -> Tensor:
        held, adapters = tensors[:num_held], tensors[num_held:]
        count = len(adapters) // 2
        ctx.outputs = [adapter.shape[0] for adapter in adapters[count:]]
        ctx.rank, ctx.scale, ctx.num_held, ctx.added = adapters[0].shape[0], scale, num_held, residual_no is not None
        ctx.four_bits = b_op is not None
        if b_op is None:
            ctx.save_for_backward(wide_nk, a_pi, *held)
            return wide_nk @ held[0].T if residual_no is None else product_plus(wide_nk, held[0], residual_no)
        ctx.save_for_backward(wide_nk, a_pi, *held, b_op)
        out_no: Tensor = nf4_wide(wide_nk, list(held[:count]), list(held[count:]), b_op, residual_no)
        return out_no

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_no,) = grad_outputs
        wide_nk, a_pi, *held = ctx.saved_tensors
        count, inputs, rank = len(ctx.outputs), a_pi.shape[1], ctx.rank
        if ctx.four_bits:
            grad_nk = nf4_wide_backward(grad_no, held[:count], held[count:-1], held[-1], a_pi)
        else:
            grad_nk = wide_backward(grad_no, held[0], a_pi)
        grad_a_pi = (grad_nk[:, inputs:].T @ wide_nk[:, :inputs]).float() * ctx.scale
        grads_a = torch.split(grad_a_pi[: count * rank], rank)
        blocks = torch.split(grad_no, ctx.outputs, dim=1)
        inner = torch.split(wide_nk[:, inputs : inputs + count * rank], rank, dim=1)
        grads_b = [(block.T @ rows).float() for block, rows in zip(blocks, inner, strict=True)]
        residual = grad_no if ctx.added else None
        return grad_nk, residual, None, None, None, None, *(None,) * ctx.num_held, *grads_a, *grads_b


# Blocks


class Joint:
    """The linear layers of one input as one product. No module: their parameters have names already."""

    def __init__(self, *layers: LoraLinear) -> None:
        self.layers = layers
        self.rank, self.scale = layers[0].lora_a.shape[0], layers[0].lora_scale
        self.four_bits = isinstance(layers[0], QuantizedLoraLinear)
        self.weight_ok: Tensor | None = None

    @torch.no_grad()
    def join(self) -> None:
        """Lay weights in bf16 below each other, with room for B; the parameters become views."""
        if self.four_bits:
            return
        weights = [layer.weight.data for layer in self.layers]
        inputs, rows = weights[0].shape[1], 0
        outputs = sum(weight.shape[0] for weight in weights)
        joined = weights[0].new_zeros(outputs, inputs + width_of(len(weights), self.rank))
        for layer, weight in zip(self.layers, weights, strict=True):
            joined[rows : rows + weight.shape[0], :inputs] = weight
            layer.weight.data = joined[rows : rows + weight.shape[0], :inputs]
            rows += weight.shape[0]
        self.weight_ok = joined

    @torch.no_grad()
    def refresh(self) -> None:
        """Put B where it is computed with; before every forward pass, because an optimizer moves it."""
        if self.weight_ok is not None:
            self.place(self.weight_ok, self.layers[0].in_features)

    def place(self, into: Tensor, column: int) -> None:
        row = 0
        for layer in self.layers:
            b_or = layer.lora_b
            into[row : row + b_or.shape[0], column : column + self.rank] = b_or
            row, column = row + b_or.shape[0], column + self.rank

    def a(self, like: Tensor) -> Tensor:
        """All A below each other, times the scale, with rows of zeros up to a full width."""
        parts = [layer.lora_a.detach() * self.scale for layer in self.layers]
        missing = width_of(len(parts), self.rank) - len(parts) * self.rank
        if missing:
            parts.append(parts[0].new_zeros(missing, parts[0].shape[1]))
        return torch.cat(parts).to(like.dtype)

    def b(self, like: Tensor) -> Tensor:
        """Every B in its place: what comes from another adapter's A is zero."""
        width, parts = width_of(len(self.layers), self.rank), []
        for number, layer in enumerate(self.layers):
            left = number * self.rank
            parts.append(F.pad(layer.lora_b.detach(), (left, width - left - self.rank)))
        return torch.cat(parts).to(like.dtype)

    def product(self, wide_nk: Tensor, a_pi: Tensor, residual_no: Tensor | None = None) -> Tensor:
        held: list[Tensor]
        if self.four_bits:
            nf4 = [layer.nf4 for layer in self.layers if isinstance(layer, QuantizedLoraLinear)]
            held, b_op = [*(weight.packed for weight in nf4), *(weight.scales for weight in nf4)], self.b(wide_nk)
        else:
            assert self.weight_ok is not None
            held, b_op = [self.weight_ok], None
        adapters = [layer.lora_a for layer in self.layers] + [layer.lora_b for layer in self.layers]
        out: Tensor = WideProduct.apply(wide_nk, residual_no, a_pi, b_op, self.scale, len(held), *held, *adapters)
        return out


def obstacle_to_lean_lora(block: Any) -> str:
    """Why a llama block with adapters cannot be a lean one; empty where it can."""
    layers = [layer for reading_the_same in projections(block) for layer in reading_the_same]
    if not all(isinstance(layer, LoraLinear) for layer in layers):
        return "model.lora.targets leaves out some of the blocks' projections"
    if any(layer.lora_dropout for layer in layers):
        return "model.lora.dropout"
    return ""
