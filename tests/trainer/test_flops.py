"""Model FLOPs against numbers worked out by hand."""

from __future__ import annotations

import pytest

from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.trainer.callbacks.metrics import flops_per_token, peak_flops
from windlass.trainer.model.structure import meta_model, model_config


def flops(preset: str, length: int) -> float:
    run = resolve(parse_run({"model": {"preset": preset}, "data": {"sequence_length": length}}))
    config = model_config(run)
    return flops_per_token(meta_model(config, run), config, length)


@pytest.mark.parametrize(("length", "giga"), [(2048, 7.817), (4096, 8.220), (8192, 9.025)])
def test_llama_1b(length: int, giga: float) -> None:
    """973.1 M matrix weights in the blocks and a tied head of 262.7 M; causal attention."""
    assert flops("llama3.2-1b", length) / 1e9 == pytest.approx(giga, abs=5e-4)


def test_a_mixture_counts_the_experts_a_token_meets() -> None:
    attention = 4096 * 128 * (2 * 32 + 2 * 8)
    experts = 2 * 3 * 4096 * 14336 + 8 * 4096  # two of eight, and the router
    weights = 32 * (attention + experts) + 32000 * 4096
    assert flops("mixtral-8x7b", 4096) == pytest.approx(6 * weights + 6 * 32 * 4096 * 4096)


def test_no_peak_for_a_cpu() -> None:
    assert peak_flops(None) is None
