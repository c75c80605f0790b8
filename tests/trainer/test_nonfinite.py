"""A loss that is not a number stops the run before the optimizer step, with the step, rank and batch named."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, resume, train
from tests.trainer.states import state_of
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train


@pytest.mark.parametrize("sharding", campaign(["full", "ddp"], always=1))
def test_a_poisoned_step(sharding: str, corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    run = tiny_run(corpus, parallel={"sharding": sharding}, train__micro_batch=2)
    result = train(tmp_path, run, ranks=2, faults="nan:rank=1,step=6")
    assert result.codes == [1, 1], result.output
    assert result.output.count("error: step 6 was stopped before its optimizer step: loss nan") == 1
    assert re.search(r"rank 1, micro-batch 0: window:\d+, window:\d+", result.output)
    assert "rank 0, micro-batch" not in result.output
    for rank in (0, 1):
        described = json.loads(result.folder.rank_error(rank).read_text())
        assert (described["retry"], described["rank"], described["exit_code"]) == (False, rank, 1)
    assert list(result.losses) == [1, 2, 3, 4, 5]
    newest = CheckpointFolder(result.folder.checkpoints).complete()[-1]
    assert newest.step == 5
    assert all(bool(tensor.isfinite().all()) for tensor in state_of(newest.path).values())
    resumed = resume(tmp_path, run, ranks=2, most=1)
    assert resumed.losses == undisturbed(run).losses, "what was saved is the state before the step"


def infinite_loss(step: int, rank: int) -> None:
    """In rank 1, before it trains: its loss of one step is reported as infinite, its gradients stay as they are."""
    if rank != 1:
        return
    from windlass.trainer.step import Stepper

    backward, calls = Stepper.backward, iter(range(1, 1000))

    def reported(self: Stepper, *args: Any, **options: Any) -> torch.Tensor:
        losses = backward(self, *args, **options)
        return losses + float("inf") if next(calls) == step else losses

    Stepper.backward = reported  # type: ignore[method-assign]


def test_an_infinite_loss_with_finite_gradients(
    corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    run = tiny_run(corpus)
    result = train(tmp_path, run, ranks=2, prelude=functools.partial(infinite_loss, 6))
    assert result.codes == [1, 1], result.output
    assert "error: step 6 was stopped before its optimizer step: loss inf" in result.output
    resumed = resume(tmp_path, run, ranks=2, most=1)
    assert resumed.events("resumed")[0]["step"] == 5
    assert resumed.losses == undisturbed(run).losses, "what was saved is the state before the step"


def test_the_first_step(corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus), ranks=2, faults="nan:rank=0,step=1")
    assert result.codes == [1, 1]
    assert "error: step 1 was stopped" in result.output
    assert [checkpoint.step for checkpoint in CheckpointFolder(result.folder.checkpoints).complete()] == [0]


EXPLODING = {"train__learning_rate": 1e20, "train__weight_decay": 1e30, "train__warmup_steps": 0}  # in one step


def test_a_real_overflow(corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus, **EXPLODING), ranks=2)
    assert result.codes == [1, 1], result.output
    assert "error: step 2 was stopped before its optimizer step" in result.output
    assert "rank 0, micro-batch 0: window:" in result.output
    assert "rank 1, micro-batch 0: window:" in result.output


def test_an_overflow_in_the_gradient_alone(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, train__learning_rate=1e30, train__warmup_steps=0)
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [1, 1], result.output
    assert "error: step 2 was stopped before its optimizer step" in result.output
    assert "every rank's loss is finite; the gradient overflowed" in result.output


def test_a_real_overflow_seen_in_validation(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, **EXPLODING, data__holdout=0.1, train__validate_every=1)
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [1, 1], result.output
    assert result.output.count("error: the validation loss after step 1 is nan") == 1
    assert "Traceback" not in result.output


def test_a_bad_weight(corpus: Path, tmp_path: Path) -> None:
    """A pretrained folder with an infinity in it: nothing is trained on it."""
    config: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**config))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    model.save_pretrained(tmp_path / "model")
    run = tiny_run(corpus, model={"path": str(tmp_path / "model"), "init": "pretrained"}, data__tokenizer="tiny")
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [1, 1], result.output
    assert "error: step 1 was stopped before its optimizer step" in result.output
    assert not result.losses
