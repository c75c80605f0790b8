"""What a checkpoint that goes to S3 costs training: the share of time it stands still, and how its steps slow down."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runs import events, step_records, train
from tests.store.s3_server import running_s3

EVERY, SAVES = 15, 3
# 13 million parameters: 150 MB with AdamW's moments.
CONFIG = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 16000,
}


def run_file(config: dict[str, Any], every: int, tokens: int, precision: str) -> dict[str, Any]:
    return {
        "name": "store-saving",
        "model": {"preset": "llama-tiny", "config": config},
        "data": {"source": "corpus:austen", "sequence_length": 256},
        "train": {
            "steps": every * SAVES + every // 2,
            "global_batch": tokens // 256,
            "precision": precision,
            "schedule": "constant",
            "warmup_steps": 0,
            "log_every": 1,
        },
        "checkpoint": {"every": every, "keep": 2, "store": "s3://bench/runs"},
    }


def measure(
    config: dict[str, Any] | None = None, *, every: int = EVERY, tokens: int = 512, precision: str = "fp32"
) -> dict[str, Any]:
    """All within one run; the first step (compilation, caches) and the last, awaited save are left out."""
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name, running_s3() as s3:
        s3.make_bucket("bench")
        os.environ.update(s3.environment)
        done = train(Path(name), run_file(config or CONFIG, every, tokens, precision), threads=os.cpu_count() or 1)
        records = step_records(done)[1:]
        saves = [one for one in events(done, "checkpoint") if one["step"] % every == 0]
        uploads = {one["step"]: one for one in events(done, "uploaded")}
    stalls = {one["step"]: one["checkpoint_s"] for one in records if one["checkpoint_s"]}  # in the step after the save
    training_s = sum(one["step_s"] for one in records)
    under_way = [(one["time"] - one["seconds"], one["time"]) for one in uploads.values()]
    beside, alone = [], []
    for one in records:
        during = any(begin < one["time"] - one["step_s"] and one["time"] < end for begin, end in under_way)
        if one["step"] not in stalls:
            (beside if during else alone).append(one["step_s"])
    return {
        "stall_percent": round(100 * sum(stalls.values()) / training_s, 3),
        "stall_s": [round(one, 3) for one in stalls.values()],
        "checkpoint_mb": round(saves[-1]["bytes"] / 1e6),
        "uploads": len(uploads),
        "upload_s": round(statistics.median(one["seconds"] for one in uploads.values()), 2),
        "save_every_s": round(training_s / len(records) * every, 2),
        "step_s": round(statistics.median(alone), 4),
        "step_s_beside_an_upload": round(statistics.median(beside), 4) if beside else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, help="of the model, as JSON")
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    parser.add_argument("--precision", default="fp32")
    asked = parser.parse_args()
    print(json.dumps(measure(asked.config, every=asked.every, tokens=asked.tokens, precision=asked.precision)))
