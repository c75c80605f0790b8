"""Blocks with fewer passes over memory, for models whose blocks are llama's.

Projections of the same input are one product: q, k and v; gate and up. Residual sums are taken inside the products
that end in them, and what lies between two products is one pass each way. It is what transformers' block computes,
rounded less often. Joined weights are one tensor whose parts are the parameters themselves, so nothing is copied and
nobody else has to know; that is possible where a rank has its bf16 weights to itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.layout import LEAN
from windlass.spec import Run
from windlass.trainer.lean_parts import AddedProduct, JoinedProduct, Normed, Rotated, Swiglu
from windlass.trainer.model import blocks
from windlass.trainer.ranks import Ranks


class LeanForward:
    """Takes the place of a block's own forward; the block keeps its parts and their names."""

    joined_qkv: Tensor
    joined_gate_up: Tensor

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        documents: Tensor | None = None,
        **_others: Any,
    ) -> Tensor:
        attention, mlp = self.self_attn, self.mlp
        batch, length, width = hidden_states.shape

        x, residual = normed(self.input_layernorm, hidden_states.reshape(-1, width))
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        joined = JoinedProduct.apply(x, self.joined_qkv, *(one.weight for one in projections))
        groups = attention.k_proj.weight.shape[0] // attention.head_dim
        heads = Rotated.apply(joined.view(batch, length, -1, attention.head_dim), groups, *position_embeddings)
        q, k, v = (one.transpose(1, 2) for one in heads)
        attended = attend(attention, q, k, v, attention_mask, documents)
        residual = AddedProduct.apply(attended.reshape(batch * length, -1), attention.o_proj.weight, residual)

        x, residual = normed(self.post_attention_layernorm, residual)
        gate_up = JoinedProduct.apply(x, self.joined_gate_up, mlp.gate_proj.weight, mlp.up_proj.weight)
        out: Tensor = AddedProduct.apply(Swiglu.apply(gate_up), mlp.down_proj.weight, residual)
        return out.view(batch, length, width)


def normed(layer: Any, x_nd: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = Normed.apply(x_nd, layer.weight, layer.variance_epsilon)
    return out


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Tensor | None) -> Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    dropout = module.attention_dropout if module.training else 0.0
    bounds = {} if documents is None else {"documents": documents}
    out: Tensor = attention(module, q, k, v, mask, dropout=dropout, scaling=module.scaling, **bounds)[0]
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
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}, not silu"
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
    return type(f"Lean{block.__name__}", (LeanForward, block), {})


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
