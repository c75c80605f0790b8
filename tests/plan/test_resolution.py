"""Defaults follow from the model alone, and batches are shared out completely."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.catalog.models import presets
from windlass.plan import resolve
from windlass.plan.description import describe
from windlass.plan.fitting import batch_shape
from windlass.plan.layout import effective_sharding
from windlass.spec import Run, parse_run


def run_of(preset: str = "llama-tiny", **sections: Any) -> Run:
    return parse_run({"model": {"preset": preset}, "data": {}, **sections})


@pytest.mark.parametrize("preset", sorted(presets()))
def test_resolving_twice_changes_nothing(preset: str) -> None:
    once = resolve(run_of(preset))
    assert resolve(once) == once
    assert None not in (
        once.data.sequence_length,
        once.data.tokenizer,
        once.train.warmup_steps,
        once.train.min_learning_rate,
    )


def test_what_is_filled_in() -> None:
    run = resolve(run_of("llama3.2-1b", train={"steps": 1000, "learning_rate": 4e-4}))
    assert run.data.sequence_length == 2048
    assert run.data.tokenizer == "meta-llama/Llama-3.2-1B"
    assert run.data.config == "en"
    assert run.train.warmup_steps == 20
    assert run.train.min_learning_rate == pytest.approx(4e-5)
    tiny = resolve(run_of("llama-tiny"))
    assert (tiny.data.sequence_length, tiny.data.tokenizer) == (1024, "tiny")


def test_what_is_asked_for_stays() -> None:
    train = {"steps": 100, "warmup_steps": 0, "min_learning_rate": 0}
    run = resolve(run_of(train=train, data={"sequence_length": 77, "tokenizer": "x/y", "source": "corpus:austen"}))
    assert (run.train.warmup_steps, run.train.min_learning_rate) == (0, 0)
    assert (run.data.sequence_length, run.data.tokenizer, run.data.config) == (77, "x/y", None)


@given(batch=st.integers(1, 500), micro=st.none() | st.integers(1, 64), world_size=st.integers(1, 64))
def test_every_row_has_a_place(batch: int, micro: int | None, world_size: int) -> None:
    run = run_of(train={"global_batch": batch, "micro_batch": micro})
    size, count = batch_shape(run, world_size)
    most = max(len(range(rank, batch, world_size)) for rank in range(world_size))
    assert size * count >= most, "no row is left out"
    assert size * (count - 1) < most, "no micro-batch is padding alone for the fullest rank"
    assert size <= (micro or 8)


def test_sharding_by_itself() -> None:
    assert effective_sharding(run_of(), 1) == "none"
    assert effective_sharding(run_of(), 2) == "full"
    assert effective_sharding(run_of(parallel={"cpu_offload": True}), 1) == "full"
    assert effective_sharding(run_of(parallel={"sharding": "ddp"}), 2) == "ddp"


def test_the_plan_in_words() -> None:
    rows = dict(describe(resolve(run_of("llama3.2-1b", train={"global_batch": 24, "micro_batch": 4})), 2))
    assert rows["model"] == "llama3.2-1b, 1.24 B parameters, random weights"
    assert rows["ranks"] == "2, full sharding"
    one = dict(describe(resolve(run_of(train={"global_batch": 1, "micro_batch": 1})), 1))
    assert one["batch"].startswith("1 sequence = ")
    assert dict(describe(resolve(run_of()), 1))["ranks"] == "1, the whole model on it"
    assert dict(describe(resolve(run_of(resources={"nodes": 2})), 16))["ranks"] == "16 on 2 nodes, full sharding"
    assert rows["batch"] == "24 sequences = 49,152 tokens a step; 3 × 4 per rank"
    assert "13.81 GiB each" in rows["checkpoints"]
    assert "validation" not in rows
    held_out = run_of(data={"holdout": 0.1, "source": "corpus:austen"}, train={"validate_every": 5})
    assert "every 5 steps and at the end" in dict(describe(resolve(held_out), 1))["validation"]
