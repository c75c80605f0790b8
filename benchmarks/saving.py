"""How long a save stops training, in the background and not, and what a resume costs in memory: a 500 MB model."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import events, step_records, train

EVERY, SAVES = 6, 3
# 125 million parameters: 500 MB of fp32 weights, 1.5 GB with AdamW's moments.
CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 15,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 16000,
}


def run_file(name: str, *, background: bool, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"preset": "llama-tiny", "config": CONFIG},
        "data": {"source": "corpus:austen", "sequence_length": 128},
        "train": {"steps": steps, "global_batch": 4, "precision": "fp32", "schedule": "constant", "warmup_steps": 0},
        "checkpoint": {"every": EVERY, "keep": 1, "background": background},
    }


def measure() -> dict[str, Any]:
    """Stalls as training saw them, medians over the saves of one run each; the last, awaited save is left out."""
    threads = os.cpu_count() or 1
    steps = EVERY * SAVES + 3
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        stalls = {}
        for background in (True, False):
            done = train(folder, run_file(f"save-{background}", background=background, steps=steps), threads=threads)
            records = step_records(done)
            stalls[background] = [one["checkpoint_s"] for one in records if one["checkpoint_s"]]
            if background:
                fresh_gib = records[0]["memory_gib"]
                size = events(done, "checkpoint")[-1]["bytes"]
                train(folder, run_file(f"save-{background}", background=background, steps=steps + 2), threads=threads)
                resumed_gib = step_records(done)[steps]["memory_gib"]
    background_s, waiting_s = statistics.median(stalls[True]), statistics.median(stalls[False])
    return {
        "checkpoint_mb": round(size / 1e6),
        "background_stall_s": round(background_s, 3),
        "first_background_stall_s": round(stalls[True][0], 3),
        "synchronous_stall_s": round(waiting_s, 3),
        "stall_ratio": round(background_s / waiting_s, 3),
        "fresh_start_peak_gib": fresh_gib,
        "resume_peak_gib": resumed_gib,
    }
