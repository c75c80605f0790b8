"""What cannot train is said before a rank is started: misspelt fields, fp8 and LoRA where they cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.catalog.gpus import gpu
from windlass.errors import UserError
from windlass.plan import check, resolve
from windlass.plan.fitting import choose_micro_batch
from windlass.plan.layout import shard_group
from windlass.spec.loading import parse_run


def run_of(model: dict[str, Any], **sections: Any) -> Any:
    return resolve(parse_run({"name": "x", "model": model, "data": {"source": "corpus:austen"}, **sections}))


def refusal(model: dict[str, Any], **sections: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check(run_of(model, **sections), 1)
    return caught.value


def test_a_misspelt_field_of_the_configuration() -> None:
    error = refusal({"preset": "llama3.2-tiny", "config": {"hiden_size": 100}})
    assert error.what == "the model's configuration has no field 'hiden_size' (model.config.hiden_size)"
    assert error.fix == "model.config.hidden_size=…"


@pytest.mark.parametrize("name", ["hidden_size", "attention_dropout", "rope_theta", "initializer_range"])
def test_fields_that_the_preset_leaves_out_are_known_too(name: str) -> None:
    value = {"hidden_size": 128, "attention_dropout": 0.1, "rope_theta": 1e6, "initializer_range": 0.01}[name]
    check(run_of({"preset": "llama3.2-tiny", "config": {name: value}}), 1)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 16384},
        {"attention_dropout": 0.1},
    ],
)
def test_what_leaves_weights_as_they_are_may_change_a_pretrained_model(config: dict[str, Any]) -> None:
    check(run_of({"preset": "llama3.2-1b", "init": "pretrained", "config": config}), 1)


def test_what_changes_weights_may_not() -> None:
    error = refusal({"preset": "llama3.2-1b", "init": "pretrained", "config": {"num_hidden_layers": 2}})
    assert "num_hidden_layers" in str(error.evidence)
    assert "dropout" in str(error.cause)


def test_fp8_where_there_are_no_gpus_or_no_large_layers() -> None:
    assert (
        "gpus_per_node is 0"
        in refusal({"preset": "llama3.2-1b"}, train={"fp8": True}, resources={"gpus_per_node": 0}).what
    )
    assert "large enough" in refusal({"preset": "llama3.2-tiny"}, train={"fp8": True}).what
    assert refusal({"preset": "llama3.2-1b"}, train={"fp8": True, "precision": "fp32"}).fix == "train.precision=bf16"
    check(run_of({"preset": "llama3.2-1b"}, train={"fp8": True}), 1)


@pytest.mark.parametrize(
    ("pattern", "fix"),
    [("q_prj", "model.lora.targets=[q_proj]"), ("attention.*", None), ("layers.99.mlp.up_proj", None)],
)
def test_lora_targets_that_match_nothing(pattern: str, fix: str | None) -> None:
    error = refusal({"preset": "llama3.2-1b", "init": "pretrained", "lora": {"targets": [pattern]}})
    assert error.what == f"model.lora.targets: no linear layer matches {pattern!r}"
    assert fix is None or error.fix == fix


@pytest.mark.parametrize("pattern", ["q_proj", "self_attn.*", "layers.3.mlp.up_proj", "*_proj", "model.layers.0.*"])
def test_lora_targets_that_match(pattern: str) -> None:
    check(run_of({"preset": "llama3.2-1b", "init": "pretrained", "lora": {"targets": [pattern]}}), 1)


def test_hybrid_groups_are_of_the_nodes_that_are_there() -> None:
    """Three of four nodes came: 24 ranks, 8 on each, and not groups of six across nodes."""
    run = run_of(
        {"preset": "llama3.2-1b"},
        parallel={"sharding": "hybrid"},
        resources={"nodes": 4, "gpus_per_node": 8},
        train={"global_batch": 24},
    )
    assert shard_group(run, 24, 8) == 8
    assert shard_group(run, 32) == 8, "what plan expects before there are any"
    check(run, 24, 8)


def test_the_micro_batch_of_a_hub_model_comes_from_its_shape() -> None:
    """A 70B at 8k does not get eight sequences at once because its name alone says nothing."""
    from windlass.catalog.models import preset
    from windlass.plan.shape import ModelShape

    run = run_of(
        {"path": "acme/llama-70b"},
        data={"source": "corpus:austen", "sequence_length": 8192, "tokenizer": "tiny"},
        train={"global_batch": 512},
        parallel={"activation_checkpointing": "full"},
    )
    shape = ModelShape.of(preset("llama3.1-70b").config)
    assert shape is not None
    by_name = run_of(
        {"preset": "llama3.1-70b"},
        data={"source": "corpus:austen", "sequence_length": 8192},
        train={"global_batch": 512},
        parallel={"activation_checkpointing": "full"},
    )
    h100 = gpu("H100")
    assert choose_micro_batch(run, 64, h100, shape) == choose_micro_batch(by_name, 64, h100) < 8
