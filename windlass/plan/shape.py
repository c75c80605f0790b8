"""The sizes of a decoder that its memory and speed follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from windlass.plan.sizes import num_parameters


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

    @classmethod
    def of(cls, config: dict[str, Any] | None) -> Self | None:
        """None where the layout of the family is not known here."""
        count = num_parameters(config)
        if config is None or count is None:
            return None
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or width // heads)
        kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
        experts = config.get("num_local_experts", 0) if config["model_type"] == "mixtral" else 0
        met = int(config.get("num_experts_per_tok") or experts) if experts else 1
        layers, ffn_width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
        tied = bool(config.get("tie_word_embeddings"))
        vocabulary = int(config["vocab_size"])
        outside = vocabulary * width * (1 if tied else 2) + width
        block = (count - outside) // layers
        return cls(
            family=str(config["model_type"]),
            layers=layers,
            width=width,
            ffn_width=ffn_width * met,
            query_width=heads * head_dim,
            kv_width=kv_width,
            heads=heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            tied=tied,
            parameters=count,
            block_parameters=block,
            active_block_parameters=block - 3 * width * ffn_width * (experts - met) if experts else block,
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
