"""A small model that is worth fine-tuning, and runs that do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.conftest import tiny_run

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def save_model(folder: Path, kind: str = "untied", seed: int = 5) -> Path:
    """A model drawn by transformers, saved with a tokenizer; weights large enough that logits differ visibly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    from windlass.data.tokenizers.tokenizer import load_tokenizer

    torch.manual_seed(seed)
    shape = {**SHAPE, "initializer_range": 0.05}
    model: Any
    if kind == "moe":
        model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=kind == "tied"))
    model.save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    return folder


def lora_run(corpus: Path, model: Path, lora: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    run = tiny_run(corpus, **{"train__learning_rate": 1e-2, **changes})
    run["model"] = {"path": str(model), "init": "pretrained", "lora": {"rank": 4, **(lora or {})}}
    return run
