"""Sizes that follow from a configuration: parameters and checkpoint bytes."""

from __future__ import annotations

from typing import Any

from windlass.catalog.models import known_config
from windlass.spec import Run

LLAMA_LIKE = {"llama", "mistral", "mixtral"}
BYTES_PER_PARAMETER_SAVED = 12  # fp32 weight and two fp32 AdamW moments


def num_parameters(config: dict[str, Any] | None) -> int | None:
    """Parameters of a Llama-like configuration; None for families whose layout is not known here."""
    if not config or config.get("model_type") not in LLAMA_LIKE or config.get("attention_bias"):
        return None
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = config.get("num_local_experts", 0) if config["model_type"] == "mixtral" else 0
    feed_forward = 3 * hidden * config["intermediate_size"] * (experts or 1) + hidden * experts
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(layers * (attention + feed_forward + 2 * hidden) + hidden + embeddings)


def checkpoint_bytes(run: Run) -> int | None:
    """Bytes of one checkpoint; None where the model's size is not known before it is built."""
    from windlass.plan.lora import trained_parameters
    from windlass.plan.shape import ModelShape

    shape = ModelShape.of(known_config(run.model))
    if shape is None:
        return None
    trained = trained_parameters(run, shape)
    return (shape.parameters if trained is None else trained) * BYTES_PER_PARAMETER_SAVED
