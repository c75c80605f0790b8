"""One decision, made once: what a plan expects of a run is what the trainer resolves, for all presets and options."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from windlass.catalog.gpus import gpu
from windlass.catalog.models import known_config, presets
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.plan.layout import Facts, Layout
from windlass.plan.shape import ModelShape
from windlass.spec import Run, parse_run

pytest.importorskip("transformers")
HALF = ["q_proj", "v_proj"]
WHOLE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORAS: list[dict[str, Any] | None] = [
    None,
    {"rank": 4},
    {"rank": 4, "quantize": "nf4"},
    {"rank": 4, "dropout": 0.1},
    {"rank": 4, "targets": HALF},
    {"rank": 4, "targets": WHOLE},
]
BLOCKS = [{}, {"hidden_act": "gelu"}, {"attention_dropout": 0.1}, {"mlp_bias": True}, {"head_dim": 96}]


@cache
def facts_of_the_built_model(preset: str, lora: int, block: int) -> Facts:
    """The model on the meta device, as the trainer has it."""
    from windlass.trainer.model.structure import model_config
    from windlass.trainer.preparation import build, model_facts

    run = run_of(preset, lora, block)
    config = model_config(run_of(preset, 0, block))
    return model_facts(run, build(config, run, None, None, quantize=False), config, cuda=True)


def run_of(preset: str, lora: int, block: int, **sections: Any) -> Run:
    model: dict[str, Any] = {"preset": preset, "config": {"num_hidden_layers": 2, **BLOCKS[block]}}
    model |= {"lora": LORAS[lora], "init": "pretrained" if lora else "random"} | sections.pop("model", {})
    return resolve(parse_run({"model": model, "data": {}, **sections}))


def resolved(layout: Any, *arguments: Any) -> Layout | str:
    try:
        found: Layout = layout(*arguments)
    except UserError as error:
        return str(error)
    return found


@pytest.mark.train  # builds models
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_plan_and_trainer_agree(data: st.DataObject) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    preset = draw(*sorted(presets()))
    lora, block, world_size = draw(*range(len(LORAS))), draw(*range(len(BLOCKS))), draw(1, 2, 8)
    assume(lora == 0 or "mixtral" not in preset or (LORAS[lora] or {}).get("targets") != WHOLE)  # has experts
    train = {
        "precision": draw("bf16", "fp32"),
        "fp8": draw(False, True),
        "bf16_weights": draw(None, False, True),
        "fused_head": draw(None, False, True),
        "lean_blocks": draw(None, False, True),
        "compile": draw(None, False),
        "global_batch": 16,
    }
    parallel = {"sharding": draw("auto", "full", "hybrid", "ddp", "none"), "cpu_offload": draw(False, True)}
    run = run_of(
        preset,
        lora,
        block,
        model={"attention": draw("auto", "flash4", "sdpa", "eager")},
        train=train,
        parallel=parallel,
    )
    run = run.model_copy(update={"data": run.data.model_copy(update={"document_mask": draw(False, True)})})
    shape = ModelShape.of(known_config(run.model))
    assume(shape is not None)
    planned = resolved(Layout.planned, run, world_size, 2, shape, gpu("H200"))
    assert planned == resolved(Layout.resolve, run, world_size, 2, facts_of_the_built_model(preset, lora, block))


def test_on_other_gpus_attention_is_torchs_own() -> None:
    run = run_of("llama3.2-1b", 0, 0)
    shape = ModelShape.of(known_config(run.model))
    assert shape is not None
    chosen = {name: Layout.planned(run, 1, 1, shape, gpu(name)).attention for name in ("H200", "H100", "B200", "L4")}
    assert chosen == {"H200": "flash4", "H100": "flash4", "B200": "sdpa_causal", "L4": "sdpa_causal"}
