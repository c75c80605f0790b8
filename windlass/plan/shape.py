"""The sizes of a decoder that its memory and speed follow from.

Sizes that follow from a configuration: parameters and checkpoint bytes.

How many parameters LoRA adds to a decoder whose layout is known, and how many weights it freezes in 4 bits.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any, Self

from windlass.catalog.models import known_config
from windlass.spec import Run


@dataclass(frozen=True)
class ModelShape:
    """Widths are in numbers of elements per token."""

    family: str
    layers: int
    width: int  # d, of the residual stream
    ffn_width: int  # f, of all experts a token meets together
    query_width: int  # heads × head_dim
    kv_width: int  # key-value heads × head_dim
    heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    parameters: int
    block_parameters: int  # of one block
    active_block_parameters: int  # of one block, without the experts a token does not meet
    expert_parameters: int = 0  # of one block: in its experts, which a tensor group does not cut
    experts_met: int = 1  # by a token in a block

    @classmethod
    def of(cls, config: dict[str, Any] | None) -> Self | None:
        """None where the layout of the family is not known here."""
        if not config or config.get("model_type") not in LLAMA_LIKE or config.get("attention_bias"):
            return None
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or width // heads)
        query_width, kv_width = heads * head_dim, int(config.get("num_key_value_heads") or heads) * head_dim
        experts = config.get("num_local_experts", 0) if config["model_type"] == "mixtral" else 0
        met = int(config.get("num_experts_per_tok") or experts) if experts else 1
        layers, ffn_width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        tied = bool(config.get("tie_word_embeddings"))
        vocabulary = int(config["vocab_size"])
        feed_forward = 3 * width * ffn_width * (experts or 1) + width * experts
        block = 2 * width * (query_width + kv_width) + feed_forward + 2 * width
        outside = vocabulary * width * (1 if tied else 2) + width
        return cls(
            family=str(config["model_type"]),
            layers=layers,
            width=width,
            ffn_width=ffn_width * met,
            query_width=query_width,
            kv_width=kv_width,
            heads=heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            tied=tied,
            parameters=layers * block + outside,
            block_parameters=block,
            active_block_parameters=block - 3 * width * ffn_width * (experts - met) if experts else block,
            expert_parameters=3 * width * ffn_width * experts,
            experts_met=met,
        )

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def root_parameters(self) -> int:
        """What is in no block: embedding, head, final norm."""
        return self.parameters - self.layers * self.block_parameters

    @property
    def matmul_parameters(self) -> int:
        """Weights a token is multiplied with; an embedding is only looked up."""
        return self.layers * self.active_block_parameters + self.head_parameters


LLAMA_LIKE = {"llama", "mistral", "mixtral"}
BYTES_PER_PARAMETER_SAVED = 12  # fp32 weight and two fp32 AdamW moments


def num_parameters(config: dict[str, Any] | None) -> int | None:
    """Parameters of a Llama-like configuration; None for families whose layout is not known here."""
    shape = ModelShape.of(config)
    return shape.parameters if shape else None


def num_experts(config: dict[str, Any]) -> int:
    """Experts of a block of a mixture; 0 for other models."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return int(next((config[name] for name in names if config.get(name)), 0))


def checkpoint_bytes(run: Run) -> int | None:
    """Bytes of one checkpoint; None where the model's size is not known before it is built."""
    shape = ModelShape.of(known_config(run.model))
    if shape is None:
        return None
    trained = trained_parameters(run, shape)
    return (shape.parameters if trained is None else trained) * BYTES_PER_PARAMETER_SAVED


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The linear layers of a block: inputs and outputs by name. Experts are no linear layers of their own."""
    d, f, q, kv = shape.width, shape.ffn_width, shape.query_width, shape.kv_width
    attention = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    if shape.family == "mixtral":
        return attention
    return {**attention, "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def layer_names(shape: ModelShape) -> list[str]:
    """The linear layers of all blocks, by the names that transformers has for them."""
    mlp = ("gate_proj", "up_proj", "down_proj")
    inside = [f"{'mlp' if name in mlp else 'self_attn'}.{name}" for name in projections(shape)]
    return [f"model.layers.{layer}.{name}" for layer in range(shape.layers) for name in inside]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a module: its whole name, or the end of it from a dot on."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def is_adapted_whole(run: Run, shape: ModelShape) -> bool:
    """Whether every linear layer of the blocks has an adapter."""
    patterns = (run.model.lora and run.model.lora.targets) or ("*",)
    return all(any(matches(name, pattern) for pattern in patterns) for name in layer_names(shape))


def targets(run: Run, shape: ModelShape) -> list[tuple[int, int]]:
    """Of one block. Patterns that name more than a layer's last name are taken to mean all: an estimate, never less."""
    patterns = (run.model.lora and run.model.lora.targets) or ()
    linear_layers = projections(shape)
    if not patterns or not linear_layers.keys() >= set(patterns):
        return list(linear_layers.values())
    return [linear_layers[name] for name in patterns]


def trained_parameters(run: Run, shape: ModelShape) -> int | None:
    """Parameters of the adapters and of added tokens' rows; None where the whole model trains."""
    lora = run.model.lora
    if lora is None:
        return None
    rank = lora.rank or 0
    adapters = shape.layers * sum(rank * (inputs + outputs) for inputs, outputs in targets(run, shape))
    rows = len(run.data.special_tokens) * shape.width * (1 if shape.tied else 2)
    return adapters + rows


def four_bit_parameters(run: Run, shape: ModelShape) -> int:
    lora = run.model.lora
    if lora is None or lora.quantize is None:
        return 0
    return shape.layers * sum(inputs * outputs for inputs, outputs in targets(run, shape))
