"""The speed options change how numbers are computed, not what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.spec.training import TrainSection
from windlass.trainer.fast.fp8 import Float8Product
from windlass.trainer.fast.head import linear_cross_entropy
from windlass.trainer.model.structure import IGNORED
from windlass.trainer.optimizer import AdamW


@pytest.mark.parametrize("logits_per_block", [37, 37 * 7, 37 * 50, 10**9])
def test_the_fused_head_equals_autograd_in_fp64(logits_per_block: int) -> None:
    torch.manual_seed(0)
    labels_n = torch.randint(0, 37, (50,))
    labels_n[[3, 17]] = IGNORED
    hidden_nd = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight_vd = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    twins = [one.detach().clone().requires_grad_() for one in (hidden_nd, weight_vd)]

    loss = linear_cross_entropy(hidden_nd, weight_vd, labels_n, scale=0.3, logits_per_block=logits_per_block)
    loss.backward()
    expected = 0.3 * F.cross_entropy(twins[0] @ twins[1].T, labels_n, ignore_index=IGNORED, reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden_nd.grad, twins[0].grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight_vd.grad, twins[1].grad, rtol=1e-10, atol=1e-12)


def test_the_fused_head_without_gradients_is_the_same_loss() -> None:
    torch.manual_seed(0)
    hidden_nd, weight_vd = torch.randn(20, 8), torch.randn(11, 8)
    labels_n = torch.randint(0, 11, (20,))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden_nd, weight_vd, labels_n, logits_per_block=33)
    torch.testing.assert_close(loss, F.cross_entropy(hidden_nd @ weight_vd.T, labels_n, reduction="sum"))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adamw_with_masters_equals_torchs_in_fp32(clip: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    train_section = TrainSection(grad_clip=clip, weight_decay=0.1)
    ours = AdamW(model, train_section, bf16_copies=True, num_micro=1)
    matrices = [parameter for parameter in twin.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in twin.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(5):
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape).bfloat16()
            other.grad = mine.grad.float()
        expected = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
        )
        if clip:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        theirs.step()
        torch.testing.assert_close(ours.apply(1e-2, torch.ones(())), expected)
    for slot, other in zip(ours.slots, twin.parameters(), strict=True):
        torch.testing.assert_close(slot.master, other.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(slot.parameter, slot.master.bfloat16())


def test_a_gradient_that_is_not_finite_stops_all_later_steps_too() -> None:
    model = nn.Linear(4, 4)
    updates = AdamW(model, TrainSection(), bf16_copies=False, num_micro=1)
    before = model.weight.detach().clone()
    for value in (float("inf"), 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        updates.apply(1e-2, torch.ones(()))
    assert torch.equal(model.weight, before)


def test_an_fp8_product_and_its_gradients_are_near_the_exact_ones() -> None:
    torch.manual_seed(0)
    x_ni = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    weight_oi = (torch.randn(128, 256) * 0.02).bfloat16().requires_grad_()
    grad_no = torch.randn(64, 128).bfloat16()
    out_no = Float8Product.apply(x_ni, weight_oi)
    out_no.backward(grad_no)
    x, weight = (one.detach().double().requires_grad_() for one in (x_ni, weight_oi))
    exact = x @ weight.T
    exact.backward(grad_no.double())
    for ours, theirs in ((out_no, exact), (x_ni.grad, x.grad), (weight_oi.grad, weight.grad)):
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.08  # e4m3 has 3 bits, e5m2 has 2


def curve(tmp_path: Path, corpus: Path, name: str, **changes: object) -> list[float]:
    run = tiny_run(corpus, train__steps=200, train__global_batch=4, checkpoint__every=1000, **changes)
    result = train(tmp_path / name, run)
    assert result.codes == [0], result.output
    return list(result.losses.values())


@pytest.mark.train
def test_200_steps_of_the_fast_path_follow_the_plain_fp32_ones(tmp_path: Path, corpus: Path) -> None:
    reference = curve(tmp_path, corpus, "fp32", train__fused_head=False)
    fused = curve(tmp_path, corpus, "fused", train__fused_head=True)
    fast = curve(tmp_path, corpus, "bf16", train__precision="bf16", train__fused_head=True)
    cast = curve(tmp_path, corpus, "cast", train__precision="bf16", train__bf16_weights=False)
    assert max(abs(a - b) for a, b in zip(fused, reference, strict=True)) < 1e-3  # fp32 sums, ordered otherwise
    for one in (fast, cast):
        assert max(abs(a - b) / b for a, b in zip(one, reference, strict=True)) < 0.02
        assert abs(sum(one[-50:]) - sum(reference[-50:])) / 50 < 0.02
    assert reference[-1] < reference[0] - 1.5
