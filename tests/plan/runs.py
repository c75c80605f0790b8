"""Runs and their estimates, in few words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.catalog.gpus import gpu
from windlass.catalog.models import known_config
from windlass.plan import resolve
from windlass.plan.fitting import apply
from windlass.plan.layout import Layout, rows_per_rank
from windlass.plan.memory import MemoryEstimate, estimate_memory
from windlass.plan.shape import ModelShape
from windlass.plan.speed import Hardware, SpeedEstimate, estimate_speed
from windlass.spec import Run, parse_run

SMALL_LLAMA = {  # sizes of a model whose activations are counted by running it
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def a_run(*overrides: str, preset: str = "llama3.2-1b", **train: Any) -> Run:
    values = {"name": "planned", "model": {"preset": preset}, "data": {"sequence_length": 8192}, "train": train}
    return resolve(apply(parse_run(values), overrides))


@dataclass(frozen=True)
class Estimates:
    shape: ModelShape
    layout: Layout
    memory: MemoryEstimate
    speed: SpeedEstimate


def estimates(run: Run, *, ranks: int = 1, micro: int | None = None, hardware: Hardware | None = None) -> Estimates:
    """Of a run whose rows are one micro-batch, unless told otherwise."""
    shape = ModelShape.of(known_config(run.model))
    assert shape is not None
    on = hardware or Hardware(gpu("H200"), min(ranks, 8), max(1, ranks // 8))
    arranged = Layout.planned(run, ranks, micro or -(-run.train.global_batch // ranks), shape, on.gpu)
    speed = estimate_speed(shape, arranged, on, global_batch=run.train.global_batch)
    return Estimates(shape, arranged, estimate_memory(shape, arranged), speed)


def name_of(point: dict[str, Any]) -> str:
    options = "".join(f" {one.partition('.')[2]}" for one in point["options"])
    ranks = f" on {point['ranks']} ranks" if point.get("ranks", 1) > 1 else ""
    return f"{point['model']} L={point['layers']} B={point['batch']} T={point['length']}{options}{ranks}"


def estimates_of(point: dict[str, Any]) -> Estimates:
    """Of a measured point."""
    layers = f"model.config.num_hidden_layers={point['layers']}"
    length = f"data.sequence_length={point['length']}"
    run = a_run(layers, length, *point["options"], preset=point["model"], global_batch=point["batch"])
    ranks = point.get("ranks", 1)
    return estimates(run, ranks=ranks, micro=rows_per_rank(run, ranks))
