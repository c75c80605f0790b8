"""The benchmark that says whether fast numbers are right must itself notice wrong ones."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.curves import Plan, Workshop, chosen, main, parse_arguments
from benchmarks.gpu.curves_cases import FP32, GPU, GROUPS, TINY, Bound, Case, Size
from benchmarks.gpu.curves_reference import rate
from benchmarks.gpu.curves_start import learnable_tokens
from benchmarks.gpu.curves_verdicts import Outcome, judge, table
from windlass.plan.resolution import learning_rate
from windlass.spec.training import TrainSection

BASE = tuple(np.linspace(6.0, 4.0, 100).tolist())
NORMS = (2.0,) * 100
CASE = Case("mine", Bound(relative=0.02, mean=0.02, norm=0.1, fall=1.0), against="base")


def outcomes(mine: Outcome) -> dict[str, Outcome]:
    return {"base": Outcome(BASE, NORMS), "mine": mine}


def with_one_step_off(share: float) -> tuple[float, ...]:
    return (*BASE[:30], BASE[30] * (1 + share), *BASE[31:])


@pytest.mark.parametrize(
    ("losses", "norm", "why"),
    [
        (BASE, 1.0, ""),
        (with_one_step_off(0.019), 1.0, ""),
        (with_one_step_off(-0.021), 1.0, "a step"),
        (tuple(loss * 1.006 for loss in BASE), 1.0, "the mean"),
        (BASE, 2.0, "the gradient norm"),
        (BASE[:1] * 100, 0.5, "the fall and a step and the mean and the gradient norm"),
        ((float("nan"),) * 100, 1.0, "the fall and a step and the mean"),
    ],
)
def test_every_bound_is_looked_at(losses: tuple[float, ...], norm: float, why: str) -> None:
    row = judge(CASE, outcomes(Outcome(losses, tuple(norm * one for one in NORMS))))
    assert (row.verdict, row.why) == ("broken" if why else "ok", why)
    assert row.good is not bool(why)


def test_a_curve_may_be_as_far_off_as_its_peers_usually_are() -> None:
    case = Case("mine", Bound(relative=0.02), against="base", peers=("one", "two"))
    peers = {"one": Outcome(with_one_step_off(0.001), NORMS), "two": Outcome(with_one_step_off(-0.002), NORMS)}

    def verdict(share: float, known: dict[str, Outcome] = peers) -> str:
        return judge(case, outcomes(Outcome(with_one_step_off(share), NORMS)) | known).why

    assert [verdict(0.0059), verdict(0.0061)] == ["", "a step, beside its peers"]
    assert verdict(0.0061, {name: Outcome(skipped="only on CUDA") for name in peers}) == ""
    assert verdict(0.001, {"one": peers["one"]}) == "not all of one, two are there"
    lower = judge(case, outcomes(Outcome(tuple(loss * 0.9999 for loss in BASE), NORMS)) | peers)
    assert lower.why == "the mean, beside its peers"


def test_a_row_says_why_there_is_nothing_to_compare() -> None:
    failed = judge(CASE, outcomes(Outcome(error="exit code 2: error: no | such thing")))
    assert not failed.good
    assert "failed: exit code 2: error: no / such thing" in table([failed])
    assert judge(CASE, outcomes(Outcome(skipped="only on CUDA: …"))).good
    alone = judge(CASE, {"mine": Outcome(BASE, NORMS), "base": Outcome(error="not started")})
    assert (alone.verdict, alone.why) == ("not compared", "base: not started")
    assert not alone.good


def test_what_is_named_brings_what_it_is_compared_with() -> None:
    names = [case.name for group in chosen(None, "fp8,ddp") for case in group.cases]
    assert names == ["reference", "fast", "fp8", "default", "ddp"]
    with pytest.raises(SystemExit):
        parse_arguments(["--only=modes", "--names=fp8"])


def test_cases_are_told_apart_and_compared_within_their_group() -> None:
    everyone = [case.name for group in GROUPS for case in group.cases]
    assert len(set(everyone)) == len(everyone)
    for group in GROUPS:
        compared = {name for case in group.cases for name in (case.against, *case.peers)}
        assert compared - {None} <= {case.name for case in group.cases}


@pytest.mark.parametrize("size", [GPU, TINY], ids=["gpu", "tiny"])
def test_the_models_are_wide_enough_for_fp8(size: Size) -> None:
    from windlass.trainer.fast.fp8 import SMALLEST

    assert min(size.width, size.intermediate) >= SMALLEST


def test_tokens_can_be_learned_from_the_last_and_from_the_one_before_it() -> None:
    tokens = learnable_tokens(64, rows=400, length=64)
    assert np.array_equal(tokens, learnable_tokens(64, rows=400, length=64))
    assert tokens.min() == 0
    assert tokens.max() < 64
    alone = entropy(tokens[:, 2:])
    for distance in (1, 2):
        before = tokens[:, 2 - distance : -distance]
        assert entropy(before * 64 + tokens[:, 2:]) - entropy(before) < alone - 0.2


def entropy(values: np.ndarray) -> float:
    shares = np.array(list(Counter(values.reshape(-1).tolist()).values())) / values.size
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize(("steps", "warmup"), [(20, 2), (200, 20), (7, 1)])
def test_the_reference_has_the_same_schedule_by_another_hand(steps: int, warmup: int) -> None:
    train = TrainSection(steps=steps, warmup_steps=warmup, learning_rate=6e-4, schedule="cosine")
    for step in range(steps):
        ours = rate(step, steps=steps, warmup=warmup, peak=6e-4)
        assert ours == pytest.approx(learning_rate(step, train), rel=1e-12)


@pytest.mark.train
@pytest.mark.campaign
@pytest.mark.campaign_only  # six trainings; the bounds themselves are tested below
def test_the_trainer_follows_the_plain_loop_and_a_mode_follows_the_default(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    main(["--tiny", "--names=fp32,resume", "--steps=6", f"--out={out}"])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows["fp32"]["losses"]) == 6
    assert rows["fp32"]["relative"] < 1e-4
    assert rows["fp32"]["norm"] < 1e-3
    assert rows["fp32"]["why"] == "the fall"  # six steps are not enough for that
    assert rows["resume"]["verdict"] == "ok", rows["resume"]


@pytest.mark.train
def test_a_wrong_number_breaks_a_bound_and_a_failure_is_a_row(tmp_path: Path) -> None:
    options = parse_arguments(["--tiny"])
    size = replace(TINY, steps=20)
    workshop = Workshop(tmp_path, Plan(size, on_gpu=False, groups=GROUPS), deadline=float("inf"), options=options)
    exact = Case("exact", Bound(relative=1e-3), FP32, fast=False)
    other = replace(exact, name="other", against="exact", overrides=(*FP32, "train.grad_clip=0"))
    wrong = replace(exact, name="wrong", overrides=("train.fused_head=maybe",))
    found = {case.name: workshop.outcome(case, 20) for case in (exact, other, wrong)}
    assert judge(exact, found).good, found
    assert judge(other, found).why == "a step"
    assert found["wrong"].error.startswith("exit code 2: error: ")
    assert "fused_head" in found["wrong"].error


def test_what_has_not_begun_in_time_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.json"
    assert main(["--tiny", "--names=fast", "--steps=1", "--time-limit=0", f"--out={out}"]) == 1
    assert [row["why"] for row in json.loads(out.read_text())["rows"]] == ["not started: the time is over"] * 2
    assert capsys.readouterr().out.count("not started") == 2
