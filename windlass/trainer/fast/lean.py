"""Blocks with fewer passes over memory, for models whose blocks are llama's.

Projections of the same input are one product: q, k and v; gate and up. Residual sums are taken inside the products
that end in them, and what lies between two products is one pass each way. It is what transformers' block computes,
rounded less often. Three kinds, by where the weights are:

- a rank has its bf16 weights to itself: joined weights are one tensor whose parts are the parameters themselves, so
  nothing is copied and nobody else has to know;
- FSDP2 gathers them for a pass: each lies in memory of its own;
- they are frozen, with LoRA beside them (lean_lora).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from windlass.trainer.fast.fp8 import Float8Linear, Float8Product
from windlass.trainer.fast.lean_lora import Beside, Joint, NormedBeside, SwigluBeside
from windlass.trainer.fast.lean_parts import AddedProduct, GatheredProduct, JoinedProduct, Normed, Rotated, Swiglu
from windlass.trainer.model.lora import LoraLinear
from windlass.trainer.model.structure import blocks, projections


class LeanForward:
    """Takes the place of a block's own forward; the block keeps its parts and their names."""

    joined_qkv: Tensor | None = None  # None: gathered weights, each in memory of its own
    joined_gate_up: Tensor | None = None

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
        joined = product_of(x, self.joined_qkv, attention.q_proj, attention.k_proj, attention.v_proj)
        attended = attend(attention, joined, position_embeddings, attention_mask, documents, (batch, length))
        residual = added_product(attended, attention.o_proj, residual)

        x, residual = normed(self.post_attention_layernorm, residual)
        gate_up = product_of(x, self.joined_gate_up, mlp.gate_proj, mlp.up_proj)
        return added_product(Swiglu.apply(gate_up), mlp.down_proj, residual).view(batch, length, width)


class LeanLoraForward:
    """The same where every projection is frozen and has an adapter of its own."""

    joints: tuple[Joint, Joint, Joint, Joint]  # q, k and v; o; gate and up; down

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        documents: Tensor | None = None,
        **_others: Any,
    ) -> Tensor:
        batch, length, width = hidden_states.shape
        qkv, o, gate_up, down = self.joints

        x, residual, a_pi = normed_beside(self.input_layernorm, hidden_states.reshape(-1, width), qkv)
        joined = qkv.product(x, a_pi)
        attended = attend(self.self_attn, joined, position_embeddings, attention_mask, documents, (batch, length))
        a_pi = o.a(attended)
        residual = o.product(Beside.apply(attended, a_pi), a_pi, residual)

        x, residual, a_pi = normed_beside(self.post_attention_layernorm, residual, gate_up)
        both = gate_up.product(x, a_pi)
        a_pi = down.a(both)
        out: Tensor = down.product(SwigluBeside.apply(both, a_pi), a_pi, residual)
        return out.view(batch, length, width)


def product_of(x_ni: Tensor, joined_oi: Tensor | None, *layers: nn.Linear) -> Tensor:
    weights = [layer.weight for layer in layers]
    out: Tensor
    if isinstance(layers[0], Float8Linear):
        out = Float8Product.apply(x_ni, *weights)
    elif joined_oi is None:
        out = GatheredProduct.apply(x_ni, *weights)
    else:
        out = JoinedProduct.apply(x_ni, joined_oi, *weights)
    return out


def added_product(x_ni: Tensor, layer: nn.Linear, residual_no: Tensor) -> Tensor:
    out: Tensor
    if isinstance(layer, Float8Linear):
        out = residual_no + Float8Product.apply(x_ni, layer.weight)
    else:
        out = AddedProduct.apply(x_ni, layer.weight, residual_no)
    return out


def normed(layer: Any, x_nd: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = Normed.apply(x_nd, layer.weight, layer.variance_epsilon)
    return out


def normed_beside(layer: Any, x_nd: Tensor, joint: Joint) -> tuple[Tensor, Tensor, Tensor]:
    a_pd = joint.a(x_nd)
    wide, residual = NormedBeside.apply(x_nd, layer.weight, layer.variance_epsilon, a_pd)
    return wide, residual, a_pd


def attend(
    module: Any,
    joined_no: Tensor,
    position_embeddings: Any,
    mask: Tensor | None,
    documents: Tensor | None,
    shape: tuple[int, int],
) -> Tensor:
    """Attention of queries, keys and values side by side: [N, heads · size]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    groups = module.config.num_key_value_heads
    heads = Rotated.apply(joined_no.view(*shape, -1, module.head_dim), groups, *position_embeddings)
    q, k, v = (head.transpose(1, 2) for head in heads)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, None)
    dropout = module.attention_dropout if module.training else 0.0
    bounds = {} if documents is None else {"documents": documents}
    out: Tensor = attention(module, q, k, v, mask, dropout=dropout, scaling=module.scaling, **bounds)[0]
    return out.reshape(joined_no.shape[0], -1)


def use_lean_blocks(model: Any) -> None:
    """Change the blocks' class; `join_weights` must follow. The layout says whether that is possible."""
    block: Any
    for block in blocks(model).values():
        if not isinstance(block.self_attn.q_proj, LoraLinear):
            block.__class__ = lean_class(LeanForward, block.__class__)
            continue
        block.__class__ = lean_class(LeanLoraForward, block.__class__)
        block.joints = tuple(Joint(*layers) for layers in projections(block))
        block.register_forward_pre_hook(_refresh)


def _refresh(block: Any, _inputs: Any) -> None:
    for joint in block.joints:
        joint.refresh()


@functools.cache
def lean_class(lean: Any, block: Any) -> Any:
    return type(f"{lean.__name__.removesuffix('Forward')}{block.__name__}", (lean, block), {})


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Lay the weights of lean blocks side by side, once they are where they stay; the parameters become views."""
    block: Any
    for block in (part for part in blocks(model).values() if isinstance(part, LeanForward | LeanLoraForward)):
        if isinstance(block, LeanLoraForward):
            for joint in block.joints:
                joint.join()
        elif not isinstance(block, FSDPModule):
            qkv, _, gate_up, _ = projections(block)
            block.joined_qkv, block.joined_gate_up = _joined(*qkv), _joined(*gate_up)


def _joined(*layers: nn.Linear) -> Tensor:
    joined_oi = torch.cat([layer.weight.data for layer in layers])
    start = 0
    for layer in layers:
        end = start + layer.weight.shape[0]
        layer.weight.data = joined_oi[start:end]
        start = end
    return joined_oi
