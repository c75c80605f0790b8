"""A plain single-process transformers training loop: what windlass must equal. Uses nothing of windlass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY_TOKENIZER = Path(__file__).parents[2] / "windlass" / "data" / "assets" / "tiny-tokenizer"


def token_stream(corpus: Path) -> list[int]:
    """All documents of a JSONL file, each followed by the end token."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    return [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def windows(stream: list[int], length: int) -> list[list[int]]:
    """Consecutive sequences of `length` inputs and the targets one token on."""
    return [stream[start : start + length + 1] for start in range(0, len(stream) - length, length)]


def whole_rows(model: Any, rows: list[list[int]]) -> tuple[Tensor, int]:
    """Summed loss and number of targets of a batch."""
    tokens = torch.tensor(rows)
    logits = model(input_ids=tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return losses, tokens[:, 1:].numel()


def documents_apart(model: Any, rows: list[list[int]], *, end: int = 1) -> tuple[Tensor, int]:
    """The same where every document of every row goes through the model by itself."""
    total, count = torch.zeros(()), 0
    for row in rows:
        starts = [0, *(at + 1 for at, token in enumerate(row[:-1]) if token == end)]
        for begin, stop in zip(starts, [*starts[1:], len(row)], strict=True):
            document = torch.tensor(row[begin:stop])
            if len(document) < 2:
                continue
            logits = model(input_ids=document[None, :-1]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum")
            count += len(document) - 1
    return total, count


def plain_loop(
    folder: Path,
    batches: Sequence[list[list[int]]],
    rates: Sequence[float],
    *,
    loss_of: Callable[[Any, list[list[int]]], tuple[Tensor, int]] = whole_rows,
    clip: float = 1.0,
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step from the weights in `folder`."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for rows, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        total, count = loss_of(model, rows)
        loss = total / count
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms
