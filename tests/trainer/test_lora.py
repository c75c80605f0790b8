"""LoRA: adapters alone train, the same on any spread, and nothing of it is lost or changed by a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaign import campaign
from tests.trainer.fine_tuning import lora_run, save_model
from tests.trainer.harness import Result, resume, train
from tests.trainer.layouts import Case, Together, trains
from tests.trainer.states import weights_of
from windlass.checkpoint import CheckpointFolder

pytestmark = [pytest.mark.train, pytest.mark.torch_floor]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda kind: root / kind if (root / kind).exists() else save_model(root / kind, kind)


@pytest.fixture(scope="module")
def together(
    request: pytest.FixtureRequest,
    corpus: Path,
    models: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Together:
    return Together(request, tmp_path_factory.mktemp("together"), corpus, models)


@pytest.fixture
def trained(request: pytest.FixtureRequest, together: Together) -> list[Result]:
    """The runs that a test `trains`."""
    return together.results_of(request.node)


def saved(result: Result, step: int) -> dict[str, torch.Tensor]:
    assert set(result.codes) == {0}, result.output
    return weights_of(CheckpointFolder(result.folder.checkpoints).at(step).path)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_loss_falls_and_only_adapters_train(model: Path, corpus: Path, tmp_path: Path) -> None:
    before = contents(model)
    run = lora_run(corpus, model, train__steps=90, checkpoint={"every": 90})
    result = train(tmp_path, run, ranks=2)
    weights = saved(result, 90)
    assert {name.rpartition(".")[2] for name in weights} == {"lora_a", "lora_b"}
    assert len(weights) == 2 * 2 * len(TARGETS)
    losses = list(result.losses.values())
    assert sum(losses[-5:]) / 5 < 0.85 * sum(losses[:5]) / 5
    assert contents(model) == before
    manifest = CheckpointFolder(result.folder.checkpoints).at(90).manifest()
    assert manifest.model["frozen"]["path"] == str(model)
    assert manifest.size < 12 * sum(tensor.numel() for tensor in weights.values()) + 400_000, "and what DCP writes"
    assert "of them trained (" in result.output


def whole_and_beside(corpus: Path, models: Callable[[str], Path]) -> list[Case]:
    model = models("untied")
    whole = {**lora_run(corpus, model), "model": {"path": str(model), "init": "pretrained"}}
    return [(1, whole), (1, lora_run(corpus, model))]


@trains(whole_and_beside)
def test_the_first_step_is_the_models_own(trained: list[Result]) -> None:
    """B is zero at first: the loss of step 1 is that of the model alone."""
    whole, beside = trained
    assert beside.losses[1] == whole.losses[1]
    assert beside.losses[2] != whole.losses[2]


SPREADS = [(2, {"sharding": "full"}), (2, {"sharding": "ddp"}), (4, {"sharding": "hybrid", "shard_group": 2})]
SPREADS += [(2, {"activation_checkpointing": "full"}), (2, {"cpu_offload": True}), (3, {"sharding": "full"})]
# Each spread with one kind of model; then with every kind.
KINDS = ("tied", "untied", "moe", "untied", "untied", "untied")
CHOSEN = [(kind, *spread) for kind, spread in zip(KINDS, SPREADS, strict=True)]
EVERY = [(kind, *spread) for kind in ("untied", "tied", "moe") for spread in SPREADS]
KINDS_AND_SPREADS = [*CHOSEN, *(one for one in EVERY if one not in CHOSEN)]


def one_and_spread(
    corpus: Path, models: Callable[[str], Path], *, kind: str, ranks: int, parallel: dict[str, Any]
) -> list[Case]:
    changes: dict[str, Any] = {"train__global_batch": 12, "train__micro_batch": 2, "train__steps": 4}
    one = lora_run(corpus, models(kind), **changes)
    if parallel.get("sharding") == "ddp" and kind != "moe":  # where every rank has the weights whole
        changes["train__lean_blocks"] = True
    return [(1, one), (ranks, lora_run(corpus, models(kind), **changes, parallel=parallel))]


@trains(one_and_spread)
@pytest.mark.parametrize(("kind", "ranks", "parallel"), campaign(KINDS_AND_SPREADS, always=len(CHOSEN)), ids=str)
def test_any_spread_equals_one_process(kind: str, ranks: int, parallel: dict[str, Any], trained: list[Result]) -> None:
    one, spread = trained
    assert set(one.codes) == {0}, one.output
    assert set(spread.codes) == {0}, spread.output
    assert list(spread.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)
    assert list(spread.grad_norms.values()) == pytest.approx(list(one.grad_norms.values()), rel=1e-5)
    for name, tensor in saved(spread, 4).items():
        assert torch.allclose(tensor, saved(one, 4)[name], atol=2e-5), name


def heads(corpus: Path, models: Callable[[str], Path], *, fused: bool) -> list[Case]:
    model = models("untied")
    other = lora_run(corpus, model, train__fused_head=fused, parallel={"sharding": "full"})
    return [(1, lora_run(corpus, model)), (2, other)]


@trains(heads)
@pytest.mark.parametrize("fused", campaign([True, False], always=1))
def test_the_fused_head_computes_the_same(fused: bool, trained: list[Result]) -> None:
    one, other = trained
    assert list(other.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)


def in_fp32_and_bf16(corpus: Path, models: Callable[[str], Path]) -> list[Case]:
    model = models("untied")
    cases: list[Case] = [(1, lora_run(corpus, model))]
    for ranks, sharding in ((1, "none"), (2, "full"), (2, "ddp")):
        run = lora_run(corpus, model, train__precision="bf16", parallel={"sharding": sharding})
        cases.append((ranks, run))
    return cases


@trains(in_fp32_and_bf16)
def test_bf16_is_near_fp32(trained: list[Result]) -> None:
    exact, *rounded = trained
    for result in rounded:
        assert set(result.codes) == {0}, result.output
        assert list(result.losses.values()) == pytest.approx(list(exact.losses.values()), rel=5e-3)
        assert result.losses != exact.losses
        assert {tensor.dtype for tensor in saved(result, 8).values()} == {torch.float32}, "adapters have fp32 masters"


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.campaign_only  # test_equality.py compiles blocks of whole models, test_lean_lora.py blocks with adapters
def test_compiled_blocks_compute_the_same(model: Path, corpus: Path, tmp_path: Path) -> None:
    one = train(tmp_path / "one", lora_run(corpus, model, train__steps=3))
    run = lora_run(corpus, model, train__steps=3, train__compile=True)
    compiled = train(tmp_path / "compiled", run, ranks=2, timeout=600)
    assert set(compiled.codes) == {0}, compiled.output
    assert list(compiled.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)


@pytest.mark.parametrize(
    ("lora", "sharding"),
    campaign([({"dropout": 0.2}, "full"), ({"quantize": "nf4"}, "ddp"), ({}, "full")], always=2),
)
def test_a_kill_changes_nothing(lora: dict[str, Any], sharding: str, model: Path, corpus: Path, tmp_path: Path) -> None:
    run = lora_run(corpus, model, lora, checkpoint={"every": 3, "background": False}, parallel={"sharding": sharding})
    run["train"]["lean_blocks"] = True if lora.get("quantize") else None
    whole = train(tmp_path / "whole", run, ranks=2)
    assert whole.codes == [0, 0], whole.output
    train(tmp_path / "killed", run, ranks=2, faults="kill:rank=1,step=5")
    resumed = resume(tmp_path / "killed", run, ranks=2)
    assert [event["step"] for event in resumed.events("resumed")] == [3]
    assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms)
    one, other = saved(whole, 8), saved(resumed, 8)
    assert all(torch.equal(one[name], other[name]) for name in one)


def dropped_twice_and_not(corpus: Path, models: Callable[[str], Path]) -> list[Case]:
    model = models("untied")
    dropped = lora_run(corpus, model, {"dropout": 0.5})
    return [(1, dropped), (1, dropped | {"name": "again"}), (1, lora_run(corpus, model))]


@trains(dropped_twice_and_not)
def test_dropout_is_used_and_drawn_from_the_seed(trained: list[Result]) -> None:
    dropped, again, without = (result.losses for result in trained)
    assert dropped == again
    assert dropped[3] != without[3]


def test_resumes_on_another_number_of_ranks(model: Path, corpus: Path, tmp_path: Path) -> None:
    run = lora_run(corpus, model, checkpoint={"every": 3, "background": False})
    whole = train(tmp_path / "whole", run, ranks=1)
    train(tmp_path / "killed", run, ranks=2, faults="kill:rank=0,step=5")
    resumed = resume(tmp_path / "killed", run, ranks=3)
    assert list(resumed.losses.values()) == pytest.approx(list(whole.losses.values()), rel=1e-5)


def test_other_weights_are_not_resumed_beside(corpus: Path, tmp_path: Path) -> None:
    """The checkpoint holds adapters alone: the model they belong to must still be the same."""
    model = save_model(tmp_path / "model")
    run = lora_run(corpus, model)
    assert train(tmp_path, run, ranks=2).codes == [0, 0]
    save_model(model, seed=6)
    changed = train(tmp_path, run, ranks=2, overrides=["train.steps=10"], attempt=2)
    assert changed.codes == [2, 2]
    assert changed.output.count("error: the checkpoint ") == 1
    assert "was trained beside other weights" in changed.output


def two_scales(corpus: Path, models: Callable[[str], Path]) -> list[Case]:
    choices: list[dict[str, Any]] = [{"alpha": 4, "rank_stabilised": True}, {"alpha": 8}]
    return [(1, lora_run(corpus, models("untied"), lora)) for lora in choices]


@trains(two_scales)
def test_rank_stabilised_scales_by_the_root(trained: list[Result]) -> None:
    """alpha / sqrt(4) with alpha 4 is alpha / 4 with alpha 8."""
    root, plain = trained
    assert root.losses == plain.losses


def some_targets(corpus: Path, models: Callable[[str], Path]) -> list[Case]:
    return [(1, lora_run(corpus, models("untied"), {"targets": ["v_proj", "layers.1.mlp.*"]}, train__steps=2))]


@trains(some_targets)
def test_targets_by_pattern(trained: list[Result]) -> None:
    names = {name.rpartition(".")[0] for name in saved(trained[0], 2)}
    assert names == {
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
        *(f"model.layers.1.mlp.{one}_proj" for one in ("gate", "up", "down")),
    }
