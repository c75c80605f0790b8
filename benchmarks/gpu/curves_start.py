"""What all curves begin with: shards of tokens that can be learned, and one folder of first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.curves_cases import Size
from benchmarks.gpu.random_shards import write_tokenizer
from windlass.data.shards.writing import ShardWriter
from windlass.data.tokenizers.tokenizer import from_folder

FOLLOWERS = (0.5, 0.25, 0.15, 0.1)  # how likely each of a token's four followers is
AFTER_LAST, AFTER_ONE_BEFORE = 0.45, 0.3  # the rest is drawn by frequency alone


def write_start(folder: Path, size: Size) -> dict[str, Any]:
    """Write shards, tokenizer and weights; the model and data sections of a run on them."""
    weights, shards = folder / "weights", folder / "shards"
    write_weights(weights, size)
    tokenizer = write_tokenizer(folder / "tokenizer", size.vocabulary)
    writer = ShardWriter(shards, from_folder(tokenizer, str(tokenizer)), shard_tokens=1 << 28)
    # One row more than is read: every window of a row needs the first token of the next as its last label.
    tokens = learnable_tokens(
        size.vocabulary, rows=max(size.steps, size.mode_steps) * size.batch + 1, length=size.length
    )
    writer.append(tokens.reshape(-1), np.full(len(tokens), size.length))
    writer.finish()
    # The same tokens in documents that end within sequences, and some that begin in one and end in the next.
    packed = ShardWriter(packed_shards(shards), from_folder(tokenizer, str(tokenizer)), shard_tokens=1 << 28)
    document = max(3, size.length * 2 // 5)
    whole, rest = divmod(tokens.size, document)
    packed.append(tokens.reshape(-1), np.array([document] * whole + [rest] * bool(rest)))
    packed.finish()
    return {
        "model": {"path": str(weights), "init": "pretrained"},
        "data": {"source": str(shards), "tokenizer": str(tokenizer), "sequence_length": size.length},
    }


def packed_shards(shards: Path) -> Path:
    return shards.with_name(f"{shards.name}-packed")


def write_weights(folder: Path, size: Size) -> None:
    """Drawn by transformers alone: were windlass to draw them, the reference would depend on it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    values = size.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def learnable_tokens(vocabulary: int, *, rows: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    """A chain of order 2 in every row: tokens follow the last one, or the one before it, or none.

    What follows the one before the last is only found through attention, so that a wrong one costs loss. Tokens are as
    unequal as words: frequent ones are learned in a few steps, rare ones all along, and the curve bends slowly.
    """
    draw = np.random.default_rng(seed)
    frequency = 1.0 / (np.arange(vocabulary) + 8.0)
    cumulative = np.cumsum(frequency / frequency.sum())

    def by_frequency(*shape: int) -> NDArray[np.int64]:
        return np.searchsorted(cumulative, draw.random(shape)).clip(max=vocabulary - 1)

    after_last, after_one_before = (by_frequency(vocabulary, len(FOLLOWERS)) for _ in range(2))
    tokens = by_frequency(rows, length)
    for at in range(2, length):
        which = draw.choice(len(FOLLOWERS), p=FOLLOWERS, size=rows)
        kind = draw.random(rows)
        follows = after_last[tokens[:, at - 1], which]
        follows_one_before = after_one_before[tokens[:, at - 2], which]
        either = np.where(kind < AFTER_LAST, follows, follows_one_before)
        tokens[:, at] = np.where(kind < AFTER_LAST + AFTER_ONE_BEFORE, either, tokens[:, at])
    return tokens
