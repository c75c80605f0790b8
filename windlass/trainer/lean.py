"""Blocks with fewer passes over memory, for models whose blocks are llama's.

Projections of the same input are one product: q, k and v; gate and up. Residual sums are taken inside the products
that end in them. It is what transformers' block computes, rounded less often. Joined weights are one tensor whose parts
are the parameters themselves, so nothing is copied and nobody else has to know; that is possible where a rank has its
bf16 weights to itself.
Shapes: N tokens, I inputs, O outputs of all parts.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.layout import LEAN
from windlass.spec import Run
from windlass.trainer.kernels.cublas import product_plus
from windlass.trainer.model import blocks
from windlass.trainer.ranks import Ranks


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


class LeanForward:
    """Takes the place of a block's own forward; the block keeps its parts and their names."""

    joined_qkv: Tensor
    joined_gate_up: Tensor
    rotate: Any  # the family's own rotary embedding

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        **_others: Any,
    ) -> Tensor:
        attention, mlp = self.self_attn, self.mlp
        batch, length, width = hidden_states.shape
        residual = hidden_states.reshape(-1, width)

        x = self.input_layernorm(hidden_states).reshape(-1, width)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        qkv = JoinedProduct.apply(x, self.joined_qkv, *(one.weight for one in projections))
        heads = [one.weight.shape[0] // attention.head_dim for one in projections]
        q, k, v = (one.transpose(1, 2) for one in qkv.view(batch, length, -1, attention.head_dim).split(heads, dim=2))
        q, k = self.rotate(q, k, *position_embeddings)
        v = v.clone(memory_format=torch.preserve_format)  # a view would keep all of qkv for the backward pass
        attended = attend(attention, q, k, v, attention_mask)
        residual = AddedProduct.apply(attended.reshape(batch * length, -1), attention.o_proj.weight, residual)

        x = self.post_attention_layernorm(residual.view(batch, length, width)).reshape(-1, width)
        joined = JoinedProduct.apply(x, self.joined_gate_up, mlp.gate_proj.weight, mlp.up_proj.weight)
        gate, up = joined.chunk(2, dim=1)
        out: Tensor = AddedProduct.apply(mlp.act_fn(gate) * up, mlp.down_proj.weight, residual)
        return out.view(batch, length, width)


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    dropout = module.attention_dropout if module.training else 0.0
    out: Tensor = attention(module, q, k, v, mask, dropout=dropout, scaling=module.scaling)[0]
    return out


def use_lean_blocks(model: Any, run: Run, ranks: Ranks, *, bf16_copies: bool) -> bool:
    """Change the blocks' class where that is possible; `join_weights` must follow."""
    asked = run.train.lean_blocks
    if asked is False or (asked is None and ranks.device.type != "cuda"):
        return False
    if obstacle := obstacle_to_lean_blocks(model, run, bf16_copies=bf16_copies):
        if asked:
            raise UserError("train.lean_blocks cannot be had here", evidence=obstacle, fix="train.lean_blocks=false")
        return False
    block: Any
    for block in blocks(model).values():
        block.__class__ = lean_class(block.__class__)
    return True


def obstacle_to_lean_blocks(model: Any, run: Run, *, bf16_copies: bool) -> str:
    config = model.config.get_text_config()
    if config.model_type not in LEAN:
        return f"{config.model_type} blocks are not {' or '.join(sorted(LEAN))} blocks"
    if not bf16_copies:
        return "train.bf16_weights is off: it needs one rank, bf16 and no model.lora"
    if run.train.fp8:
        return "train.fp8 computes the products in another way"
    if run.model.attention not in ("auto", "flash4", "sdpa"):
        return f"model.attention is {run.model.attention}"
    if any(parameter.ndim == 1 and name.endswith("bias") for name, parameter in model.named_parameters()):
        return "the model's linear layers have biases"
    return ""


@functools.cache
def lean_class(block: Any) -> Any:
    rotate = staticmethod(sys.modules[block.__module__].apply_rotary_pos_emb)
    return type(f"Lean{block.__name__}", (LeanForward, block), {"rotate": rotate})


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Lay the weights of lean blocks side by side, once they are where they stay; the parameters become views."""
    block: Any
    for block in (one for one in blocks(model).values() if isinstance(one, LeanForward)):
        attention, mlp = block.self_attn, block.mlp
        block.joined_qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        block.joined_gate_up = _joined(mlp.gate_proj, mlp.up_proj)


def _joined(*layers: nn.Linear) -> Tensor:
    joined_oi = torch.cat([layer.weight.data for layer in layers])
    start = 0
    for layer in layers:
        end = start + layer.weight.shape[0]
        layer.weight.data = joined_oi[start:end]
        start = end
    return joined_oi
