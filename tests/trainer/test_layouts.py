"""Tensor, context and expert parallelism: the numbers are one rank's, and checkpoints do not know the layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, resume, train
from tests.trainer.layouts import train_all
from tests.trainer.plain import documents_apart, plain_loop, token_stream, whole_rows, windows
from tests.trainer.test_equality import LENGTH, RATES, SHAPE, STEPS, spread_run

pytestmark = pytest.mark.train

HYBRID = {"sharding": "hybrid", "shard_group": 2}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Of two ranks, each kind alone; of four with FSDP2, hybrid and each other. What else changes is in other sections.
ALONE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tensor": 2}),
    ("qwen3", {"context": 2}),
    ("mixtral", {"expert": 2}),
    ("qwen2", {"tensor": 2}),
    ("qwen3moe", {"expert": 2}),
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tensor": 2, "activation_checkpointing": "selective", "document_mask": True}),
    ("llama", {"tensor": 2, "context": 2, "activation_checkpointing": "attention"}),
    ("qwen3", {"tensor": 2, **HYBRID}),
    ("mixtral", {"tensor": 2, "expert": 4}),
    ("mixtral", {"context": 2, "expert": 2, **HYBRID}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"context": 2, "activation_checkpointing": "full"}),
    ("mixtral", {"tensor": 2, "activation_checkpointing": "full", **HYBRID}),
]
MORE += [
    (model, layout)
    for model in ("llama", "qwen3", "mixtral")
    for layout in (
        {"tensor": 2},
        {"tensor": 2, **HYBRID},
        {"context": 2},
        {"context": 4},
        {"context": 2, **HYBRID},
        {"tensor": 2, "context": 2},
        {"tensor": 2, "reshard_after_forward": False},
        {"tensor": 2, "document_mask": True, **HYBRID},
    )
] + [("mixtral", {"expert": 2}), ("mixtral", {"expert": 4}), ("mixtral", {"tensor": 2, "expert": 2, **HYBRID})]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    small_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    drawn = {
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
        "mixtral": MixtralForCausalLM(MixtralConfig(**SHAPE, **MIXTURE)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **small_experts, head_dim=32)),
    }
    for name, parameter in drawn["qwen2"].named_parameters():
        if name.endswith("bias"):  # of queries, keys and values; zero when a model is drawn
            torch.nn.init.normal_(parameter, std=0.1)
    for name, model in drawn.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in drawn}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path], corpus: Path) -> Callable[..., tuple[list[float], list[float]]]:
    """Losses and gradient norms of a plain single-process transformers loop."""
    rows = windows(token_stream(corpus), LENGTH)
    batches = [rows[step * 8 : (step + 1) * 8] for step in range(STEPS)]
    known: dict[tuple[str, bool], tuple[list[float], list[float]]] = {}

    def curve(model: str, *, apart: bool) -> tuple[list[float], list[float]]:
        if (model, apart) not in known:
            loss_of = documents_apart if apart else whole_rows
            known[model, apart] = plain_loop(models[model], batches, RATES, loss_of=loss_of)
        return known[model, apart]

    return curve


@pytest.mark.parametrize(("ranks", "cases"), campaign([(2, ALONE), (4, TOGETHER), (4, MORE)], always=2))
def test_losses_are_those_of_one_rank(
    ranks: int,
    cases: list[tuple[str, dict[str, Any]]],
    models: dict[str, Path],
    plain: Callable[..., tuple[list[float], list[float]]],
    corpus: Path,
    tmp_path: Path,
) -> None:
    runs = {}
    for model, layout in cases:
        run = spread_run(corpus, models[model], batch=8, train__micro_batch=2)
        run["data"]["document_mask"] = layout.get("document_mask", False)
        run["parallel"] = {key: value for key, value in layout.items() if key != "document_mask"}
        runs["-".join([model, *(f"{key[:6]}{value}".lower() for key, value in layout.items())])] = run
    results = train_all(tmp_path, runs, ranks=ranks)
    for (name, result), run in zip(results.items(), runs.values(), strict=True):
        assert set(result.codes) == {0}, f"{name}: {result.output[-4000:]}"
        losses, norms = plain(name.split("-")[0], apart=run["data"]["document_mask"])
        assert list(result.losses.values()) == pytest.approx(losses, rel=1e-5), name
        assert list(result.grad_norms.values()) == pytest.approx(norms, rel=1e-5), name


def mixture_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    run = tiny_run(corpus, **changes)
    run["model"] = {"preset": "mixtral-tiny", "config": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}}
    return run


def test_the_balance_of_experts_is_over_all_ranks(corpus: Path, tmp_path: Path) -> None:
    """From random weights, and with a weight that changes the curve."""
    layouts = {"tensor": {"tensor": 2}, "expert": {"expert": 2, "activation_checkpointing": "full"}}
    run = mixture_run(corpus, train__steps=4, train__balance_experts=1.0, train__log_every=2)
    one = train_all(
        tmp_path, {"one": run, "free": mixture_run(corpus, train__steps=4, train__balance_experts=0)}, ranks=1
    )
    spread = train_all(tmp_path, {name: run | {"parallel": layout} for name, layout in layouts.items()}, ranks=2)
    for name, result in spread.items():
        assert set(result.codes) == {0}, result.output[-4000:]
        assert result.losses == pytest.approx(one["one"].losses, rel=1e-5), name
        assert result.grad_norms == pytest.approx(one["one"].grad_norms, rel=1e-5), name
        assert [record["shares"] for record in result.records("experts")] == [
            record["shares"] for record in one["one"].records("experts")
        ]
    assert one["free"].grad_norms != pytest.approx(one["one"].grad_norms, rel=1e-3), "the balance changes nothing"


def test_checkpoints_do_not_know_the_layout(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    """kill -9 in a tensor group, then in context groups, then one rank to the end; and bitwise where it is the same."""
    run = tiny_run(corpus, train__steps=12, checkpoint__every=3, checkpoint__export=True)
    split = run | {"parallel": {"tensor": 2}}
    killed = train(tmp_path / "moved", split, ranks=4, faults="kill:rank=3,step=5")
    assert set(killed.losses) == {1, 2, 3, 4}, killed.output
    killed = train(
        tmp_path / "moved", run | {"parallel": {"context": 2}}, ranks=2, faults="kill:rank=0,step=8", attempt=2
    )
    assert set(killed.losses) == set(range(1, 8)), killed.output
    moved = resume(tmp_path / "moved", run)
    alone = undisturbed(run, 1)
    assert moved.losses == pytest.approx(alone.losses, rel=1e-5)
    assert (moved.folder.export / "model.safetensors").is_file()

    train(tmp_path / "same", split, ranks=4, faults="kill:rank=2,step=7")
    same, whole = resume(tmp_path / "same", split, ranks=4), train(tmp_path / "whole", split, ranks=4)
    assert same.losses == whole.losses
    assert same.grad_norms == whole.grad_norms
    assert whole.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("steps", campaign([100, 500], always=1))
def test_a_mixture_from_scratch_keeps_its_experts_in_use(steps: int, tmp_path: Path) -> None:
    """By the default weight of the balancing loss, and not without it."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 8}
    run: dict[str, Any] = {
        "model": {"preset": "mixtral-tiny", "config": sizes},
        "data": {"source": "corpus:austen", "sequence_length": 64},
        "train": {"steps": steps, "global_batch": 8, "precision": "fp32", "warmup_steps": 10, "log_every": 100},
        "checkpoint": {"every": 1000},
    }
    run["train"]["learning_rate"] = 1e-3
    without = run | {"train": run["train"] | {"balance_experts": 0}}
    results = train_all(tmp_path, {"balanced": run, "free": without}, ranks=1, timeout=600)
    least = {}
    for name, result in results.items():
        assert set(result.codes) == {0}, result.output[-4000:]
        shares = result.records("experts")[-1]["shares"]
        print(f"{name}, last 100 of {steps} steps: {shares}")
        least[name] = min(share for block in shares for share in block)
    assert least["balanced"] > 0.75 / 8
    assert least["free"] < 0.25 / 8
