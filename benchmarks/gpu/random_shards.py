"""Token shards of random tokens, with a tokenizer that fits them: what the real trainer reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.shards.writing import ShardWriter
from windlass.data.tokenizers.tokenizer import CONFIG_FILE, TOKENIZER_FILE, from_folder


def write_random_shards(folder: Path, *, vocabulary: int, sequences: int, length: int, documents: int = 0) -> Path:
    """Shards that hold `sequences` windows of `length` tokens; the folder of their tokenizer.

    One document, or documents of a given length.
    """
    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder.with_name(f"{folder.name}-tokenizer"), vocabulary)
    writer = ShardWriter(folder, from_folder(tokenizer, str(tokenizer)), shard_tokens=1 << 28)
    tokens = np.random.default_rng(0).integers(vocabulary, size=sequences * length + 1)
    whole, rest = divmod(len(tokens), documents or len(tokens))
    writer.append(tokens, np.array([documents or len(tokens)] * whole + [rest] * bool(rest)))
    writer.finish()
    return tokenizer


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """A tokenizer of two words whose largest id says how many tokens there are."""
    folder.mkdir(parents=True)
    end = "<end>"
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, end: vocabulary - 1}, "unk_token": "a"},
    }
    (folder / TOKENIZER_FILE).write_text(json.dumps(definition))
    (folder / CONFIG_FILE).write_text(json.dumps({"eos_token": end}))
    return folder
