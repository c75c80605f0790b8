"""Which models may go on from each other's checkpoints: by what they compute, not by their shapes alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig

from windlass.errors import UserError
from windlass.trainer.checkpointing.resuming import check_same_model, model_settings

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}


def described(**changes: Any) -> dict[str, Any]:
    """What a manifest says of a model, after a way through JSON."""
    config = LlamaConfig(**{**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, **changes})
    said = {"fingerprint": "same shapes", "config": config.to_diff_dict(), **model_settings(config, nn.Linear(1, 1))}
    return dict(json.loads(json.dumps(said)))


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    with pytest.raises(UserError, match="is of another model") as caught:
        check_same_model(theirs, ours, where="it", fix="do something")
    return caught.value.evidence or ""


@pytest.mark.parametrize("change", [{}, {"use_cache": False}, {"eos_token_id": 7}, {"dtype": "bfloat16"}], ids=str)
def test_the_same_model(change: dict[str, Any]) -> None:
    check_same_model(described(), described(**change), where="it", fix="do something")
    assert described()["settings_fingerprint"] == described(**change)["settings_fingerprint"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "num_attention_heads: 4 there, 8 here"),
        ({"hidden_act": "relu"}, "hidden_act: 'silu' there, 'relu' here"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps: 1e-06 there, 0.1 here"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, "rope_parameters.rope_theta: "),
        ({"attention_dropout": 0.5}, "attention_dropout: 0.0 there, 0.5 here"),
        ({"pad_token_id": 3}, "pad_token_id: None there, 3 here"),
    ],
    ids=str,
)
def test_another_model_of_the_same_shapes(change: dict[str, Any], named: str) -> None:
    assert named in differing(described(), described(**change))
    assert described()["settings_fingerprint"] != described(**change)["settings_fingerprint"]


def test_other_shapes() -> None:
    assert differing({**described(), "fingerprint": "other"}, described()) == "parameter names or shapes differ"


def test_checkpoints_of_an_older_windlass() -> None:
    """They note what differs from the class's defaults, and nothing else."""
    older = {key: value for key, value in described(rms_norm_eps=0.1).items() if key in ("fingerprint", "config")}
    check_same_model(older, described(rms_norm_eps=0.1), where="it", fix="do something")
    assert "rms_norm_eps: 0.1 there" in differing(older, described(rms_norm_eps=0.2))


def test_another_transformers_knows_other_settings() -> None:
    theirs = described()
    theirs["settings"]["once_there_was"] = 1
    del theirs["settings"]["attention_dropout"]
    evidence = differing(theirs, described())
    assert "once_there_was: 1 there, not set here" in evidence
    assert "attention_dropout: not set there, 0.0 here" in evidence
    theirs["transformers"] = "5.0.0"
    check_same_model(theirs, described(), where="it", fix="do something")
    assert "hidden_act" in differing(theirs, described(hidden_act="relu"))


@pytest.mark.parametrize("settings", [None, [], 7, "x"])
def test_settings_that_are_none(settings: Any) -> None:
    differing({**described(), "settings": settings}, described())
