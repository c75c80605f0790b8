"""Weights in 4 bits: the published levels, the nearest one each, and training beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.fine_tuning import lora_run, save_model
from tests.trainer.harness import train
from tests.trainer.states import weights_of
from windlass.checkpoint import CheckpointFolder
from windlass.trainer.model.nf4 import BLOCK, LEVELS, NF4Weight, dequantize, product, quantize


def roundtrip(weight: torch.Tensor) -> torch.Tensor:
    packed, scales = quantize(weight)
    return dequantize(packed, scales, weight.shape[0], weight.shape[1], weight.dtype)


def test_every_weight_goes_to_its_nearest_level() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    scale = weight.reshape(-1, BLOCK).abs().amax(dim=1, keepdim=True)
    ratios = weight.reshape(-1, BLOCK) / scale
    nearest = (ratios[..., None] - torch.tensor(LEVELS)).abs().argmin(dim=-1)
    expected = (torch.tensor(LEVELS)[nearest] * scale).reshape(weight.shape)
    assert torch.equal(roundtrip(weight), expected)
    packed, scales = quantize(weight)
    assert packed.numel() * 2 == weight.numel()
    assert scales.numel() * BLOCK == weight.numel()


def test_levels_are_kept_exactly() -> None:
    weight = (torch.tensor(LEVELS).repeat(16) * 3.5).reshape(4, BLOCK)
    assert torch.equal(roundtrip(weight), weight)
    assert torch.equal(roundtrip(torch.zeros(2, BLOCK)), torch.zeros(2, BLOCK))


def test_as_bitsandbytes_does_it() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(1))
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(quantize(weight)[0], theirs.flatten())
    assert torch.allclose(roundtrip(weight), functional.dequantize_4bit(theirs, state), atol=1e-7)


def test_products_and_gradients_are_those_of_the_plain_matrix() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    held = NF4Weight(24, 64, torch.float32, device="cpu")
    held.set(weight)
    x = torch.randn(5, 64, requires_grad=True)
    bias = torch.randn(24)
    out = product(x, held, bias)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    plain = torch.nn.functional.linear(x, roundtrip(weight), bias)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    assert torch.allclose(out, plain, atol=1e-5)
    assert torch.allclose(grad, expected, atol=1e-3)


@pytest.mark.train
def test_training_beside_them(corpus: Path, tmp_path: Path) -> None:
    """One rank and two agree, the loss is near that beside whole weights, and only adapters are saved."""
    model = save_model(tmp_path / "model")
    whole = train(tmp_path / "whole", lora_run(corpus, model))
    one = train(tmp_path / "one", lora_run(corpus, model, {"quantize": "nf4"}))
    two = train(tmp_path / "two", lora_run(corpus, model, {"quantize": "nf4"}), ranks=2)
    assert set(one.codes + two.codes) == {0}, one.output + two.output
    assert list(two.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)
    assert list(one.losses.values()) == pytest.approx(list(whole.losses.values()), rel=0.03)
    assert one.losses != whole.losses
    names = weights_of(CheckpointFolder(one.folder.checkpoints).at(8).path)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)


@pytest.mark.train
def test_in_bf16(corpus: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = lora_run(corpus, model, {"quantize": "nf4"}, train__precision="bf16")
    exact = train(tmp_path / "fp32", lora_run(corpus, model, {"quantize": "nf4"}))
    result = train(tmp_path / "bf16", run, ranks=2)
    assert result.codes == [0, 0], result.output
    assert list(result.losses.values()) == pytest.approx(list(exact.losses.values()), rel=5e-3)
