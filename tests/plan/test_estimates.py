"""Estimates of memory and speed: against what was measured, and in what must hold for any run."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.runs import a_run, estimates, estimates_of, name_of
from windlass.catalog.gpus import gpu
from windlass.catalog.instances import instance
from windlass.plan.memory import LOGITS_PER_BLOCK, rows_per_block
from windlass.plan.speed import Hardware

MEASURED = json.loads((Path(__file__).parent / "measured_h200.json").read_text())
MEMORY_BOUND, SPEED_BOUND = 0.10, 0.20


@pytest.mark.parametrize("point", [one for one in MEASURED if one["peak_gib"]], ids=name_of)
def test_peak_memory_is_what_was_measured(point):
    assert estimates_of(point).memory.peak_gib == pytest.approx(point["peak_gib"], rel=MEMORY_BOUND)


@pytest.mark.parametrize("point", [one for one in MEASURED if one["tokens_per_s"]], ids=name_of)
def test_speed_is_what_was_measured(point):
    assert estimates_of(point).speed.tokens_per_s == pytest.approx(point["tokens_per_s"], rel=SPEED_BOUND)


def test_a_published_speed_on_another_gpu():
    """llmq, one H100, Qwen2.5-1.5B's sizes, bf16: 58.9k tokens/s, as its authors publish."""
    sizes = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
    changes = [f"model.config.{key}={value}" for key, value in (sizes | heads).items()]
    run = a_run(*changes, "data.sequence_length=1024", global_batch=16)
    speed = estimates(run, hardware=Hardware(gpu("H100"), 1, 1)).speed
    assert speed.tokens_per_s == pytest.approx(58_900, rel=SPEED_BOUND)


def test_state_bytes_per_parameter():
    def state(*overrides, ranks=1, micro=None):
        found = estimates(a_run(*overrides, global_batch=8), ranks=ranks, micro=micro)
        per = {name: size / found.shape.parameters for name, size in found.memory.items}
        return {name: round(size, 3) for name, size in per.items() if "weights" in name or name in STATE}

    assert state() == {"moments": 8, "fp32 masters": 4, "bf16 weights": 2}
    assert state("train.bf16_weights=false") == {"moments": 8, "fp32 weights": 4}
    assert state("parallel.sharding=ddp", ranks=4) == {"moments": 8, "fp32 weights": 4}
    sharded = state(ranks=4)
    assert (sharded["moments"], sharded["fp32 weights"]) == (2, 1)


STATE = ("moments", "fp32 masters")


def test_accumulation_keeps_fp32_sums():
    whole = estimates(a_run(global_batch=4))
    halves = estimates(a_run(global_batch=4), micro=2)
    extra = dict(halves.memory.items)["gradients"] - dict(whole.memory.items)["gradients"]
    assert extra == pytest.approx(4 * whole.shape.parameters, rel=0.05)


def test_the_unfused_head_needs_all_logits_several_times():
    fused, plain = (estimates(a_run(f"train.fused_head={on}", global_batch=4)).memory for on in ("true", "false"))
    assert dict(plain.items)["logits"] == 10 * 4 * 8192 * 128256
    assert plain.peak_bytes > fused.peak_bytes


def test_blocks_of_logits_are_few_and_equal():
    assert rows_per_block(128256, 16384) == 8192
    assert rows_per_block(128256, 32768) == 16384  # two blocks of 4 GiB rather than four
    assert rows_per_block(128256, 65536) == 16384
    assert rows_per_block(128256, 100) == 100
    assert rows_per_block(2 * LOGITS_PER_BLOCK, 3) == 1


def test_offload_moves_the_state_to_the_host():
    found = estimates(a_run("parallel.cpu_offload=true", global_batch=8), ranks=4)
    assert found.memory.host_bytes == 16 * found.shape.parameters / 4
    assert not {"moments", "fp32 weights"} & set(dict(found.memory.items))


sizes = st.integers(1, 12)
recomputing = st.sampled_from(["none", "selective", "full"])
shardings = st.sampled_from(["none", "full"])
quickly = settings(max_examples=60, deadline=None, derandomize=True)


@quickly
@given(batch=sizes, length=st.sampled_from([512, 2048, 8192]), recompute=recomputing, sharding=shardings)
def test_more_tokens_need_more_memory_and_time(batch, length, recompute, sharding):
    def planned(*overrides, rows=batch):
        options = (f"parallel.activation_checkpointing={recompute}", f"parallel.sharding={sharding}")
        return estimates(a_run(*options, f"data.sequence_length={length}", *overrides, global_batch=rows))

    small, long = planned(), planned(f"data.sequence_length={2 * length}")
    assert small.memory.peak_bytes < long.memory.peak_bytes
    more = planned(rows=batch + 1).speed
    assert small.speed.busy_s < more.busy_s < 2 * long.speed.busy_s
    assert small.speed.step_s <= more.step_s
    # One sequence more can mean one block of logits more, each of them smaller: true, but not monotonous.
    plain, wide = (planned("train.fused_head=false", rows=rows) for rows in (batch, batch + 1))
    assert plain.memory.peak_bytes < wide.memory.peak_bytes


@quickly
@given(shards=st.sampled_from([1, 2, 4, 8, 16, 32]), recompute=recomputing, offload=st.booleans())
def test_more_shards_need_less_memory(shards, recompute, offload):
    options = (f"parallel.activation_checkpointing={recompute}", f"parallel.cpu_offload={offload}".lower())
    few, many = (
        estimates(a_run(*options, "parallel.sharding=full", preset="llama3.1-8b", global_batch=ranks), ranks=ranks)
        for ranks in (shards, 2 * shards)
    )
    assert many.memory.peak_bytes <= few.memory.peak_bytes
    if not offload:
        assert many.memory.peak_bytes < few.memory.peak_bytes


@quickly
@given(batch=sizes, preset=st.sampled_from(["llama3.2-1b", "llama3.1-8b", "mistral-7b"]))
def test_recomputing_saves_memory_and_costs_time(batch, preset):
    found = [
        estimates(a_run(f"parallel.activation_checkpointing={level}", preset=preset, global_batch=batch))
        for level in ("none", "selective", "full")
    ]
    saved = [dict(one.memory.items).get("activations", 0.0) for one in found]
    times = [one.speed.step_s for one in found]
    assert times == sorted(times)
    assert saved == sorted(saved, reverse=True) or found[2].memory.moment == "end of the backward pass"
    peaks = [one.memory.peak_bytes for one in found]
    assert peaks == sorted(peaks, reverse=True)


def test_a_slower_network_makes_slower_steps():
    run = a_run(preset="llama3.1-8b", global_batch=32)
    fast = Hardware(gpu("H100"), 8, 2, instance("p5.48xlarge"))
    slow = Hardware(gpu("H100"), 8, 2)
    assert fast.network_gb_s == 400
    quick, late = (estimates(run, ranks=16, hardware=one).speed for one in (fast, slow))
    assert quick.step_s < late.step_s
    assert dict(quick.parts)["matrix products"] == dict(late.parts)["matrix products"]


def test_mfu_follows_the_trainers_convention():
    found = estimates(a_run(global_batch=2))
    assert found.speed.flops_per_step / 16384 == pytest.approx(9.025e9, rel=1e-3)
    assert found.speed.mfu == pytest.approx(9.025e9 * found.speed.tokens_per_s / 989e12, rel=1e-3)
