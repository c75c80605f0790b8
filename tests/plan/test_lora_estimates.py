"""What LoRA saves, estimated: parameters to the number; no masters, gradients or moments of what is frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.catalog.models import presets
from windlass.plan import checkpoint_bytes, resolve
from windlass.plan.description import describe
from windlass.plan.layout import Layout
from windlass.plan.memory import estimate_memory
from windlass.plan.shape import ModelShape, trained_parameters
from windlass.spec import Run, parse_run


def run_of(folder: Path, preset: str, lora: dict[str, Any] | None, **sections: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(presets()[preset].config))
    model: dict[str, Any] = {"path": str(folder), "init": "pretrained"}
    if lora is not None:
        model["lora"] = lora
    data = {"source": "corpus:austen", "tokenizer": "tiny", "sequence_length": 512, **sections.pop("data", {})}
    return resolve(parse_run({"model": model, "data": data, **sections}))


def shape_of(preset: str) -> ModelShape:
    shape = ModelShape.of(presets()[preset].config)
    assert shape is not None
    return shape


@pytest.mark.train  # builds the model
@pytest.mark.parametrize("preset", ["llama3.2-1b", "llama-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
def test_parameters_to_the_number(preset: str, targets: list[str] | None, tmp_path: Path) -> None:
    from windlass.trainer.model.structure import facts, model_config
    from windlass.trainer.preparation import build

    run = run_of(tmp_path, preset, {"rank": 8, "targets": targets}, data={"special_tokens": ["<|a|>", "<|b|>"]})
    built = facts(build(model_config(run), run, None, (10, 12), quantize=False))
    assert trained_parameters(run, shape_of(preset)) == built.num_trained


def peak(run: Run, preset: str) -> dict[str, float]:
    shape = shape_of(preset)
    estimate = estimate_memory(shape, Layout.planned(run, 1, 4, shape))
    return {"peak": estimate.peak_gib, **{name: size / 2**30 for name, size in estimate.items}}


def test_frozen_weights_have_no_state(tmp_path: Path) -> None:
    full = peak(run_of(tmp_path, "llama3.1-8b", None), "llama3.1-8b")
    lora = peak(run_of(tmp_path, "llama3.1-8b", {"rank": 16}), "llama3.1-8b")
    four = peak(run_of(tmp_path, "llama3.1-8b", {"rank": 16, "quantize": "nf4"}), "llama3.1-8b")
    parameters = presets()["llama3.1-8b"].num_parameters or 0
    assert lora["frozen weights"] == pytest.approx(2 * parameters / 2**30)
    assert full["peak"] - lora["peak"] > 0.9 * 12 * parameters / 2**30
    assert four["peak"] < lora["peak"] - 0.6 * lora["frozen weights"]


def test_a_checkpoint_is_that_of_the_adapter(tmp_path: Path) -> None:
    run = run_of(tmp_path, "llama3.2-1b", {"rank": 16})
    trained = trained_parameters(run, shape_of("llama3.2-1b"))
    assert trained == 11_272_192
    assert checkpoint_bytes(run) == 12 * trained
    (model,) = [text for label, text in describe(run, 1) if label == "model"]
    assert "LoRA of rank 16" in model
