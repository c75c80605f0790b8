"""Write a small model with weights and a tokenizer, for cases that train beside them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpu.cases import TINY


def main(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from windlass.data.tokenizers.tokenizer import load_tokenizer

    torch.manual_seed(5)
    shape = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "initializer_range": 0.05}
    LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=256)).save_pretrained(folder)
    load_tokenizer("tiny").save(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
