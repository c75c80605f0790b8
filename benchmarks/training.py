"""Tokens per second of a tiny preset on the CPU against a plain transformers loop: same model, batch and threads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import step_records, train

STEPS, WARMUP, BATCH, LENGTH = 24, 4, 8, 256
REPEATS = 3


def plain_loop(preset: str, threads: int) -> list[float]:
    """Seconds of each step of the loop a user would write."""
    import time

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from windlass.catalog.models import presets

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    values = dict(presets()[preset].config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.utils.data.DataLoader(
        torch.randint(0, config.vocab_size, (STEPS * BATCH, LENGTH)), batch_size=BATCH, shuffle=True
    )
    seconds = []
    began = time.perf_counter()
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        float(loss)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return seconds


def windlass_run(folder: Path, preset: str, threads: int) -> list[float]:
    run = {
        "name": preset.replace(".", "-"),
        "model": {"preset": preset},
        "data": {"source": "corpus:austen", "sequence_length": LENGTH},
        "train": {"steps": STEPS, "global_batch": BATCH, "precision": "fp32"},
        "checkpoint": {"every": 10**6},
    }
    return [record["step_s"] for record in step_records(train(folder, run, threads=threads))]


def measure(preset: str = "llama-tiny") -> dict[str, Any]:
    """Medians over alternating runs, so that both meet the same noise."""
    threads = os.cpu_count() or 1
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        for repeat in range(REPEATS):
            ours += windlass_run(Path(name) / str(repeat), preset, threads)[WARMUP:]
            printed = subprocess.run(
                [sys.executable, "-m", "benchmarks.training", preset], capture_output=True, text=True, check=True
            )
            theirs += json.loads(printed.stdout)[WARMUP:]
    tokens = BATCH * LENGTH
    return {
        "preset": preset,
        "windlass_tokens_per_s": round(tokens / statistics.median(ours)),
        "plain_tokens_per_s": round(tokens / statistics.median(theirs)),
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 3),
    }


if __name__ == "__main__":
    print(json.dumps(plain_loop(sys.argv[1], os.cpu_count() or 1)))
