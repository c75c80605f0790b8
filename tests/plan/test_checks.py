"""What cannot work is said before anything starts, with the value that would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.errors import UserError
from windlass.plan import check, resolve
from windlass.spec import parse_run


def refusal(world_size: int = 2, *, model: dict[str, Any] | None = None, **sections: Any) -> str:
    run = resolve(parse_run({"model": model or {"preset": "llama-tiny"}, "data": {}, **sections}))
    with pytest.raises(UserError) as refused:
        check(run, world_size)
    return str(refused.value)


def test_sequences_longer_than_the_model() -> None:
    text = refusal(data={"sequence_length": 1025})
    assert "sequences of 1025 tokens are longer than the model's maximum of 1024" in text
    assert "data.sequence_length=1024" in text


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"hidden_size": 130}, "model.config.num_attention_heads=5"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "model.config.num_key_value_heads=2"),
    ],
)
def test_heads_that_do_not_divide(config: dict[str, Any], fix: str) -> None:
    text = refusal(model={"preset": "llama-tiny", "config": config})
    assert "divisible" in text
    assert fix in text


@pytest.mark.parametrize(
    ("world_size", "sections", "fix"),
    [
        (2, {"parallel": {"sharding": "none"}}, "parallel.sharding=full"),
        (2, {"parallel": {"sharding": "ddp", "cpu_offload": True}}, "parallel.sharding=full"),
        (6, {"parallel": {"sharding": "hybrid", "shard_group": 4}}, "parallel.shard_group=3"),
        (4, {"train": {"global_batch": 3}}, "train.global_batch=4"),
    ],
)
def test_ranks_that_do_not_fit(world_size: int, sections: dict[str, Any], fix: str) -> None:
    assert fix in refusal(world_size, **sections)


def test_pretrained_weights_that_cannot_be() -> None:
    assert "has no published weights" in refusal(model={"preset": "llama-tiny", "init": "pretrained"})
    changed = {"preset": "llama3.2-1b", "init": "pretrained", "config": {"num_hidden_layers": 2}}
    assert "model.config sets num_hidden_layers" in refusal(model=changed)


def model_folder(folder: Path, **files: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return {"path": str(folder), "init": "pretrained"}


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    assert "missing: model.safetensors" in refusal(model=model_folder(tmp_path))
    index = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
    model = model_folder(tmp_path, model__safetensors__index__json=index)
    (tmp_path / "part-1.safetensors").touch()
    assert "missing: part-2.safetensors" in refusal(model=model)
    (tmp_path / "part-2.safetensors").touch()
    check(resolve(parse_run({"model": model, "data": {}})), 1)
    for broken in ("{", "[]", "{}", '{"weight_map": 3}'):
        assert "not an index" in refusal(model=model_folder(tmp_path, model__safetensors__index__json=broken))


def test_runs_that_fit() -> None:
    for world_size, parallel in (
        (1, {}),
        (8, {}),
        (8, {"sharding": "hybrid", "shard_group": 4}),
        (4, {"sharding": "ddp"}),
    ):
        check(resolve(parse_run({"model": {"preset": "mixtral-tiny"}, "data": {}, "parallel": parallel})), world_size)
