"""Any causal model of transformers: a few of every kind. `make test-architectures` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.architectures import all_types, try_one

WORKS = {
    "gpt_neox": "sdpa",  # has an is_decoder that is false, and is causal all the same
    "gpt_oss": "eager",  # sinks
    "gptj": "eager",  # no SDPA in transformers
    "qwen3_moe": "sdpa",
}
REFUSED = {
    "bert": "is an encoder",
    "bart": "encoder-decoder",
    "cpmant": "see those after them",
}


@pytest.mark.parametrize("model_type", WORKS)
def test_works(model_type: str, tmp_path: Path) -> None:
    outcome = try_one(model_type, tmp_path)
    assert outcome.verdict == "works", outcome
    assert f"attention {WORKS[model_type]}" in outcome.says


@pytest.mark.parametrize("model_type", REFUSED)
def test_is_refused_in_words(model_type: str, tmp_path: Path) -> None:
    outcome = try_one(model_type, tmp_path)
    assert outcome.verdict == "refused", outcome
    assert REFUSED[model_type] in outcome.says


def test_the_list_is_long() -> None:
    assert len(all_types()) > 100
