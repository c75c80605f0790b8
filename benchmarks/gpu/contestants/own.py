"""windlass: its real trainer, as a program, on shards of random tokens; the numbers are those of its metrics.jsonl."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.contestants import Job
from benchmarks.gpu.random_shards import write_random_shards
from benchmarks.gpu.random_weights import random_weights
from benchmarks.gpu.rows import Row, last_line, measured
from windlass.runfolder import RunFolder, steps_of

LOG_EVERY = 5  # on a GPU the trainer waits for the device, and so knows the time, at log lines alone
SHARDED = "parallel.sharding=full"
# Memory for speed: bf16 shards, which need no cast, and gathered weights kept from the forward to the backward pass.
FOR_SPEED = ("train.bf16_weights=true", "parallel.reshard_after_forward=false")
VARIANTS: dict[str, tuple[str, ...]] = {
    "windlass-fp8": ("train.fp8=true",),
    "windlass-sdpa": ("model.attention=sdpa",),  # torch's own attention
    "windlass-full": (SHARDED,),  # FSDP2 over one rank, as torchtitan
    "windlass-full-plain": (SHARDED, "train.lean_blocks=false"),
    "windlass-full-fast": (SHARDED, *FOR_SPEED),
    "windlass-full-fp8": (SHARDED, "train.fp8=true"),
    "windlass-full-fp8-fast": (SHARDED, "train.fp8=true", *FOR_SPEED),
    "windlass-nf4": ("model.lora.quantize=nf4",),
    "windlass-recompute": ("parallel.activation_checkpointing=full",),
    "windlass-nf4-recompute": ("model.lora.quantize=nf4", "parallel.activation_checkpointing=full"),
}
NO_LAST_CHECKPOINT = "checkpoint.at_end=false"  # 15 GB that nobody reads


def run(job: Job) -> Row:
    warmup, timed = whole_windows(job.warmup), whole_windows(job.steps - job.warmup)
    run_file = job.folder / "bench.yaml"
    run_file.write_text(yaml.safe_dump(run_values(job, steps=warmup + timed)))
    overrides = [NO_LAST_CHECKPOINT, *job.overrides, *VARIANTS.get(job.contestant, ())]
    begun = time.time()
    train([str(run_file), *overrides], job)
    steps = steps_of(RunFolder(job.folder / "runs" / "bench"))
    # Every step of a window carries the window's mean time: one of them stands for it.
    windows = [steps[number] for number in range(warmup + LOG_EVERY, warmup + timed + 1, LOG_EVERY)]
    last = windows[-1]
    # mfu and tokens/s of a record give the convention back: FLOPs per token over the peak.
    share = last["mfu"] / last["tokens_per_s"] if last["mfu"] else 0.0
    return measured(
        job.contestant,
        job.point.name,
        [record["step_s"] for record in windows],
        steps_per_time=LOG_EVERY,
        tokens=job.point.tokens,
        flops_per_token=share,
        peak_flops=1.0 if share else None,
        peak_gib=last["memory_gib"],
        loss=last["loss"],
        first_step_s=steps[1]["time"] - begun,
    )


def whole_windows(steps: int) -> int:
    return -(-steps // LOG_EVERY) * LOG_EVERY


def run_values(job: Job, *, steps: int) -> dict[str, Any]:
    point = job.point
    shards = job.folder / "shards"
    tokenizer = write_random_shards(
        shards,
        vocabulary=point.config()["vocab_size"],
        sequences=steps * point.batch,
        length=point.length,
        documents=point.documents,
    )
    model: dict[str, Any] = {"preset": point.preset, "config": point.changes}
    if point.lora:
        model = {"path": str(random_weights(point)), "init": "pretrained", "lora": {"rank": point.lora}}
    data = {"source": str(shards), "tokenizer": str(tokenizer), "sequence_length": point.length}
    return {
        "name": "bench",
        "model": model,
        "data": data | {"document_mask": bool(point.documents)},
        "train": {
            "steps": steps,
            "global_batch": point.batch,
            "micro_batch": point.batch,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "grad_clip": 1.0,
            "precision": "bf16",
            "log_every": LOG_EVERY,
        },
        "checkpoint": {"every": 10 * steps},
    }


def train(arguments: list[str], job: Job) -> None:
    cache = Path(tempfile.gettempdir()) / "windlass-bench-gpu" / "cache"  # contestants share it: compiled kernels
    environment = os.environ | {"WINDLASS_RUNS": str(job.folder / "runs"), "WINDLASS_CACHE": str(cache)}
    trainer = subprocess.Popen(
        [sys.executable, "-m", "windlass.trainer", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert trainer.stdout is not None
    said = []
    for line in trainer.stdout:  # passed on as it comes: what is stopped halfway has still said something
        print(line, end="", file=sys.stderr, flush=True)
        said.append(line)
    if code := trainer.wait():
        raise RuntimeError(f"the trainer ended with exit code {code}: {reason(said)}")


def reason(said: list[str]) -> str:
    """A UserError's own line or an exception's, else the last line."""
    errors = [line for line in said if line.startswith("error: ") or "Error: " in line]
    return last_line("".join(errors or said))
