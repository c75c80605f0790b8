"""The plain loop that curves are held against: transformers' model and torch's AdamW, in fp32 throughout.

Of windlass it takes the run file and the order of the data, nothing that computes. It runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from windlass.data import open_sequences
from windlass.plan import resolve
from windlass.spec import Run, load_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file")
    parser.add_argument("--out", type=Path, required=True, help="(loss, gradient norm) of every step, as JSON")
    options = parser.parse_args()
    options.out.write_text(json.dumps(plain_loop(resolve(load_run(options.run_file, [])))))
    return 0


def plain_loop(run: Run) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of every step from the weights in the folder that the run names."""
    from transformers import AutoModelForCausalLM

    train = run.train
    torch.set_float32_matmul_precision("highest")  # no TF32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float32).to(device).train()
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
    )
    numbers: list[tuple[Tensor, Tensor]] = []
    for step, (tokens_bt, starts) in enumerate(batches(run)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps=train.steps, warmup=train.warmup_steps or 0, peak=train.learning_rate)
        tokens_bt = tokens_bt.to(device)
        labels_bt, apart = tokens_bt[:, 1:].clone(), {}
        if run.data.document_mask:
            length = labels_bt.shape[1]
            positions = [restarting([begin for begin in one if begin < length], length) for one in starts]
            apart = {"position_ids": torch.stack(positions).to(device)}  # transformers makes a mask of these
            for row, one in zip(labels_bt, starts, strict=True):
                row[[start - 1 for start in one if start]] = -100  # what follows belongs to another document
        logits = model(input_ids=tokens_bt[:, :-1], use_cache=False, **apart).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_bt.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.detach(), norm))
    return [(float(loss), float(norm)) for loss, norm in numbers]


def restarting(starts: list[int], length: int) -> Tensor:
    """0, 1, 2, … anew at every start."""
    begins = sorted({0, *starts})
    return torch.cat([torch.arange(end - begin) for begin, end in zip(begins, [*begins[1:], length], strict=True)])


def batches(run: Run) -> Iterator[tuple[Tensor, list[list[int]]]]:
    """B rows of T + 1 tokens for every step, and where documents begin in each."""
    assert run.data.tokenizer
    sequences = open_sequences(run, "train", tokenizer=run.data.tokenizer)
    assert sequences is not None
    positions = list(range(run.train.global_batch))
    for step in range(run.train.steps):
        rows = sequences.batch(step, run.train.global_batch, positions).sequences
        tokens_bt = torch.stack([torch.from_numpy(row.tokens) for row in rows])
        yield tokens_bt, [[int(one) for one in row.document_starts] for row in rows]


def rate(step: int, *, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak. Not windlass's: that one is being judged."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / (steps - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


if __name__ == "__main__":
    sys.exit(main())
