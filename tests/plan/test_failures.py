"""`plan` says what failures will cost and proposes the intervals; the simulator agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.cli.main import run_command

LARGE = """
model: {preset: llama3.1-70b}
data: {sequence_length: 8192}
train: {global_batch: 2048, steps: 200000}
parallel: {activation_checkpointing: full}
"""


@pytest.fixture
def plan(tmp_path: Path, capfd: Any) -> Any:
    def call(text: str, *arguments: str) -> str:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        assert run_command(["plan", str(path), *arguments]) == 0
        out: str = capfd.readouterr().out
        return out

    return call


def test_a_large_run_is_told_what_failures_cost(plan: Any) -> None:
    arguments = ("--instance", "p5.48xlarge", "--nodes", "256")
    told = json.loads(plan(LARGE, *arguments, "--json"))["goodput"]
    assert told["hours_between_failures"] == pytest.approx(54 * 24 / 466 * 16_384 / 2_048)
    assert told["proposed_goodput"] > told["goodput"] + 0.01
    assert told["goodput"] + sum(told["losses"].values()) == pytest.approx(1.0)
    assert told["proposed"]["memory_every"] < told["proposed"]["every"] < 500
    text = plan(LARGE, *arguments)
    assert "failures expected, one every" in text
    assert f"checkpoint.memory_every={told['proposed']['memory_every']}" in text
    proposal = [f"checkpoint.{key}={value}" for key, value in told["proposed"].items()]
    again = json.loads(plan(LARGE, *arguments, *proposal, "--json"))["goodput"]
    assert again["goodput"] == pytest.approx(told["proposed_goodput"]), "what it proposes is what it then expects"


def test_a_small_run_is_told_nothing(plan: Any) -> None:
    small = "model: {preset: llama3.2-1b}\ndata: {sequence_length: 8192}\ntrain: {global_batch: 64, steps: 1000}\n"
    assert "goodput" not in plan(small, "--gpu", "H200")
    told = json.loads(plan(small, "--gpu", "H200", "--json"))["goodput"]
    assert told["failures"] < 0.01
    assert "memory_every" not in told["proposed"], "one node has no peer"
