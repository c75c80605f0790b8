"""Presets are the published models, to the field and to the parameter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.catalog.models import default_tokenizer, known_config, preset, presets
from windlass.common.hub import is_hub_id
from windlass.errors import UserError
from windlass.plan import num_parameters
from windlass.spec.training import ModelSection

# vocabulary, width, feed-forward, layers, heads, key-value heads, positions, rope base, rope scaling, tied, parameters
PUBLISHED = {
    "llama2-7b": (32000, 4096, 11008, 32, 32, 32, 4096, 1e4, None, False, 6_738_415_616),
    "llama2-13b": (32000, 5120, 13824, 40, 40, 40, 4096, 1e4, None, False, 13_015_864_320),
    "llama2-70b": (32000, 8192, 28672, 80, 64, 8, 4096, 1e4, None, False, 68_976_648_192),
    "llama3.1-8b": (128256, 4096, 14336, 32, 32, 8, 131072, 5e5, 8.0, False, 8_030_261_248),
    "llama3.1-70b": (128256, 8192, 28672, 80, 64, 8, 131072, 5e5, 8.0, False, 70_553_706_496),
    "llama3.1-405b": (128256, 16384, 53248, 126, 128, 8, 131072, 5e5, 8.0, False, 405_853_388_800),
    "llama3.2-1b": (128256, 2048, 8192, 16, 32, 8, 131072, 5e5, 32.0, True, 1_235_814_400),
    "llama3.2-3b": (128256, 3072, 8192, 28, 24, 8, 131072, 5e5, 32.0, True, 3_212_749_824),
    "mistral-7b": (32768, 4096, 14336, 32, 32, 8, 32768, 1e6, None, False, 7_248_023_552),
    "mistral-7b-v0.1": (32000, 4096, 14336, 32, 32, 8, 32768, 1e4, None, False, 7_241_732_096),
    "mathstral-7b": (32768, 4096, 14336, 32, 32, 8, 32768, 1e6, None, False, 7_248_023_552),
    "mixtral-8x7b": (32000, 4096, 14336, 32, 32, 8, 32768, 1e6, None, False, 46_702_792_704),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configuration(name: str) -> None:
    entry = preset(name)
    config = entry.config
    scaling = config.get("rope_scaling")
    assert (
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["max_position_embeddings"],
        config["rope_theta"],
        scaling and scaling["factor"],
        config["tie_word_embeddings"],
        entry.num_parameters,
    ) == PUBLISHED[name]
    assert num_parameters(config) == entry.num_parameters
    assert entry.hub_id
    if scaling:
        assert scaling == {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def test_every_published_preset_is_in_the_table() -> None:
    assert {name for name in presets() if not name.endswith("-tiny")} == set(PUBLISHED)
    assert {preset(name).config["model_type"] for name in presets() if name.endswith("-tiny")} == {
        "llama",
        "mistral",
        "mixtral",
    }


def test_details_of_the_mistral_family() -> None:
    assert preset("mistral-7b-v0.1").config["sliding_window"] == 4096
    assert preset("mistral-7b").config["sliding_window"] is None
    mixtral = preset("mixtral-8x7b").config
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)
    assert mixtral["router_aux_loss_coef"] == 0.02


def test_a_name_nearly_right() -> None:
    with pytest.raises(UserError) as refused:
        preset("Llama3.2-1bb")
    assert refused.value.fix == "model.preset=llama3.2-1b"
    with pytest.raises(UserError) as refused:
        preset("xyzzy")
    assert refused.value.fix == "windlass init --list"


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64}))
    model = ModelSection(path=str(tmp_path), config={"hidden_size": 32})
    assert known_config(model) == {"model_type": "qwen2", "hidden_size": 32}
    assert default_tokenizer(model) == str(tmp_path)
    assert num_parameters(known_config(model)) is None
    for folder, fix in {"missing": "model.path=", "runs/my/export": "windlass ckpt export my"}.items():
        with pytest.raises(UserError, match="holds no model") as refused:
            known_config(ModelSection(path=str(tmp_path / folder)))
        assert (refused.value.fix or "").startswith(fix)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        known_config(model)


def test_hub_ids_are_not_asked_for() -> None:
    assert known_config(ModelSection(path="Qwen/Qwen3-0.6B")) is None
    assert not is_hub_id("./model")
    assert not is_hub_id("/model")
    assert is_hub_id("Qwen/Qwen3-0.6B")
