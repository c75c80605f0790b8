"""However a run is spread, its losses and gradient norms are those of a plain single-process transformers loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.fine_tuning import SHAPE
from tests.trainer.harness import Result, train
from tests.trainer.layouts import Case, Together, trains
from tests.trainer.plain import documents_apart, plain_loop, token_stream, whole_rows, windows

pytestmark = pytest.mark.train

LENGTH = 32
STEPS = 4
PEAK, FLOOR = 1e-3, 1e-4
# Two steps of warm-up, then half a cosine over the other two.
RATES = [PEAK / 2, PEAK, FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi / 2)) / 2, FLOOR]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied dense model and an MoE, drawn and saved by transformers alone."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(5)
    dense = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    moe = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))
    dense.save_pretrained(root / "dense")
    moe.save_pretrained(root / "moe")
    return {"dense": root / "dense", "moe": root / "moe"}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path], corpus: Path) -> Callable[..., tuple[list[float], list[float]]]:
    """The plain loop's curve for a model and a global batch, computed once."""
    rows = windows(token_stream(corpus), LENGTH)
    known: dict[tuple[str, int, bool], tuple[list[float], list[float]]] = {}

    def curve(model: str, batch: int, *, apart: bool = False) -> tuple[list[float], list[float]]:
        key = (model, batch, apart)
        if key not in known:
            batches = [rows[step * batch : (step + 1) * batch] for step in range(STEPS)]
            known[key] = plain_loop(models[model], batches, RATES, loss_of=documents_apart if apart else whole_rows)
        return known[key]

    return curve


@pytest.fixture(scope="module")
def together(
    request: pytest.FixtureRequest, corpus: Path, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Together:
    return Together(request, tmp_path_factory.mktemp("together"), corpus, models)


@pytest.fixture
def trained(request: pytest.FixtureRequest, together: Together) -> list[Result]:
    """The runs that a test `trains`."""
    return together.results_of(request.node)


def spread_run(corpus: Path, model: Path, *, batch: int = 16, **changes: Any) -> dict[str, Any]:
    run = tiny_run(corpus, data__shuffle=False, data__tokenizer="tiny", train__steps=STEPS, train__global_batch=batch)
    run["model"] = {"path": str(model), "init": "pretrained"}
    run["train"] |= {"learning_rate": PEAK, "min_learning_rate": FLOOR}
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        run.setdefault(section, {})[leaf] = value
    return run


def assert_curve(result: Result, expected: tuple[list[float], list[float]], rel: float = 1e-5) -> None:
    assert set(result.codes) == {0}, result.output
    assert list(result.losses.values()) == pytest.approx(expected[0], rel=rel)
    assert list(result.grad_norms.values()) == pytest.approx(expected[1], rel=rel)


KINDS = [(1, "none"), (2, "full"), (2, "ddp"), (4, "full"), (4, "hybrid"), (4, "ddp")]
ORDERS = {"dense": (1, 2, 4), "moe": (2, 4, 1)}
# Every kind of spread, the sharded ones with both models, and every accumulation; then every pair of them.
CHOSEN = [("moe", 1, "full", 2), ("moe", 2, "full", 4), ("moe", 4, "hybrid", 4)]
CHOSEN += [("dense", *kind, steps) for kind, steps in zip(KINDS, ORDERS["dense"] * 2, strict=True)]
ALL = [(model, 1, "full", 2) for model in ORDERS]
ALL += [(model, *kind, accumulation) for model in ORDERS for kind in KINDS for accumulation in (1, 2, 4)]
SPREADS = list(dict.fromkeys([*CHOSEN, *ALL]))


def spreads(
    corpus: Path, models: dict[str, Path], *, model: str, ranks: int, sharding: str, accumulation: int
) -> list[Case]:
    run = spread_run(corpus, models[model], train__micro_batch=16 // (ranks * accumulation))
    run["parallel"] = {"sharding": sharding} | ({"shard_group": 2} if sharding == "hybrid" else {})
    return [(ranks, run)]


@trains(spreads)
@pytest.mark.parametrize(("model", "ranks", "sharding", "accumulation"), campaign(SPREADS, always=len(CHOSEN)))
def test_any_spread_equals_the_plain_loop(
    model: str, ranks: int, sharding: str, accumulation: int, trained: list[Result], plain: Callable[..., Any]
) -> None:
    assert_curve(trained[0], plain(model, 16))


def odd_batches(
    corpus: Path, models: dict[str, Path], *, batch: int, ranks: int, micro: int | None, sharding: str
) -> list[Case]:
    changes = {"parallel__sharding": sharding, "train__micro_batch": micro}
    return [(ranks, spread_run(corpus, models["dense"], batch=batch, **changes))]


@trains(odd_batches)
@pytest.mark.parametrize(
    ("batch", "ranks", "micro", "sharding"),
    campaign([(10, 4, None, "full"), (7, 3, 2, "ddp"), (7, 3, None, "full"), (7, 3, 2, "full")], always=2),
)
def test_a_batch_that_does_not_divide(
    batch: int, ranks: int, micro: int | None, sharding: str, trained: list[Result], plain: Callable[..., Any]
) -> None:
    assert_curve(trained[0], plain("dense", batch))


SAVINGS: list[dict[str, Any]] = [
    {"cpu_offload": True},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "sharding": "ddp"},
    {"reshard_after_forward": False},
]
# Each with one model or the other; then with both.
MODELS_AND_SAVINGS = [
    (("dense", "moe")[(index + turn) % 2], saving) for turn in (0, 1) for index, saving in enumerate(SAVINGS)
]


def option_names(value: Any) -> str:
    return ",".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def savings(corpus: Path, models: dict[str, Path], *, model: str, parallel: dict[str, Any]) -> list[Case]:
    return [(2, spread_run(corpus, models[model], train__micro_batch=4) | {"parallel": parallel})]


@trains(savings)
@pytest.mark.parametrize(("model", "parallel"), campaign(MODELS_AND_SAVINGS, always=len(SAVINGS)), ids=option_names)
def test_saving_memory_changes_no_number(
    model: str, parallel: dict[str, Any], trained: list[Result], plain: Callable[..., Any]
) -> None:
    assert_curve(trained[0], plain(model, 16))


HEADS = [("dense", 1, "none"), ("moe", 2, "full"), ("dense", 2, "ddp")]
HEADS += [("moe", 1, "none"), ("dense", 2, "full"), ("moe", 2, "ddp")]


def fused_heads(corpus: Path, models: dict[str, Path], *, model: str, ranks: int, sharding: str) -> list[Case]:
    changes = {"train__fused_head": True, "train__micro_batch": 4, "parallel__sharding": sharding}
    return [(ranks, spread_run(corpus, models[model], **changes))]


@trains(fused_heads)
@pytest.mark.parametrize(("model", "ranks", "sharding"), campaign(HEADS, always=3))
def test_the_fused_head_computes_the_same(
    model: str, ranks: int, sharding: str, trained: list[Result], plain: Callable[..., Any]
) -> None:
    assert_curve(trained[0], plain(model, 16))


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(
    models: dict[str, Path], plain: Callable[..., Any], corpus: Path, tmp_path: Path
) -> None:
    run = spread_run(corpus, models["dense"], train__compile=True, parallel__activation_checkpointing="selective")
    assert_curve(train(tmp_path, run, ranks=2, timeout=300), plain("dense", 16))


def masked(corpus: Path, models: dict[str, Path], *, model: str, ranks: int) -> list[Case]:
    return [(ranks, spread_run(corpus, models[model], data__document_mask=True))]


@trains(masked)
@pytest.mark.parametrize(("model", "ranks"), campaign([("dense", 2), ("moe", 2), ("dense", 1)], always=2))
def test_masked_documents_equal_documents_by_themselves(
    model: str, ranks: int, trained: list[Result], plain: Callable[..., Any]
) -> None:
    expected = plain(model, 16, apart=True)
    assert expected[0] != pytest.approx(plain(model, 16)[0], rel=1e-5), "the data has no document borders to see"
    assert_curve(trained[0], expected)


def in_bf16(corpus: Path, models: dict[str, Path]) -> list[Case]:
    cases = []
    for ranks, copies, lean in ((1, True, None), (1, False, None), (2, None, True), (2, True, True)):
        run = spread_run(corpus, models["dense"], train__precision="bf16", train__bf16_weights=copies)
        run["train"] |= {"micro_batch": 4, "lean_blocks": lean}
        cases.append((ranks, run))
    return cases


@trains(in_bf16)
def test_bf16_is_near_fp32_on_any_number_of_ranks(trained: list[Result], plain: Callable[..., Any]) -> None:
    """bf16 has 8 bits of mantissa: a loss within 0.5 %, a gradient norm within 2 %."""
    for result in trained:
        losses, norms = plain("dense", 16)
        assert set(result.codes) == {0}, result.output
        assert list(result.losses.values()) == pytest.approx(losses, rel=5e-3)
        assert list(result.grad_norms.values()) == pytest.approx(norms, rel=2e-2)
        assert list(result.losses.values()) != losses, "bf16 was not used"


def clipped(corpus: Path, models: dict[str, Path]) -> list[Case]:
    return [(2, spread_run(corpus, models["dense"], train__grad_clip=0.05))]


@trains(clipped)
def test_clipping_is_by_the_global_norm(models: dict[str, Path], corpus: Path, trained: list[Result]) -> None:
    """A limit below every norm, so that each step is scaled."""
    rows = windows(token_stream(corpus), LENGTH)
    batches = [rows[step * 16 : (step + 1) * 16] for step in range(STEPS)]
    expected = plain_loop(models["dense"], batches, RATES, clip=0.05)
    assert_curve(trained[0], expected)


def validated(corpus: Path, models: dict[str, Path]) -> list[Case]:
    run = spread_run(corpus, models["dense"], data__holdout=0.1, train__validate_every=2)
    run["train"]["validation_sequences"] = 13
    return [(ranks, run) for ranks in (1, 2, 3)]


@trains(validated)
def test_validation_is_the_same_on_any_number_of_ranks(trained: list[Result]) -> None:
    """Also where the validation sequences do not divide by the ranks."""
    losses = []
    for result in trained:
        records = result.records("validation")
        assert [(record["step"], record["sequences"], record["tokens"]) for record in records] == [
            (2, 13, 416),
            (4, 13, 416),
        ]
        losses.append([record["loss"] for record in records])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
