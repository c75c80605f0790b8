"""The weights a run begins with: drawn as the family says, the same on any number of ranks, tied where told."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen3Config,
)

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from tests.trainer.states import first_weights, looking, weights_of
from windlass.catalog.models import presets
from windlass.checkpoint import CheckpointFolder
from windlass.plan import num_parameters, resolve
from windlass.spec import dump_run, parse_run
from windlass.trainer.model.structure import facts, meta_model, model_config

pytestmark = [pytest.mark.train, pytest.mark.torch_floor]

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE: dict[str, Any] = {**SMALL, "vocab_size": 1024, "num_attention_heads": 4, "max_position_embeddings": 256}
FAMILIES = ["llama3.2-tiny", "mixtral-tiny", "llama-tiny", "mistral-tiny"]  # the first two differ most


def preset_run(corpus: Path, preset: str, **changes: Any) -> dict[str, Any]:
    config = dict(SMALL) | ({"head_dim": 16} if "head_dim" in presets()[preset].config else {})
    return tiny_run(corpus, model={"preset": preset, "config": config}, **changes)


@pytest.mark.parametrize("preset", campaign(FAMILIES, always=2))
def test_drawn_as_the_configuration_says(preset: str, corpus: Path, tmp_path: Path) -> None:
    run = preset_run(corpus, preset)
    run["model"]["config"]["initializer_range"] = 0.05
    weights = first_weights(tmp_path, run, 2)
    matrices = {name: tensor for name, tensor in weights.items() if tensor.ndim >= 2}
    assert len(matrices) >= 2 * 6
    for name, tensor in weights.items():
        assert bool(tensor.isfinite().all()), name
        if tensor.ndim == 1:
            assert bool((tensor == 1).all()), f"{name} is a norm"
    for name, tensor in matrices.items():
        assert float(tensor.std()) == pytest.approx(0.05, rel=0.1), name
        assert abs(float(tensor.mean())) < 0.005, name
        assert bool((tensor != 0).all()), name
    slices = {name: tensor.flatten()[:256] for name, tensor in matrices.items()}
    for experts in [tensor for tensor in matrices.values() if tensor.ndim == 3]:
        slices |= {f"expert {id(experts)} {index}": part.flatten()[:256] for index, part in enumerate(experts) if index}
    assert len({tuple(part.tolist()) for part in slices.values()}) == len(slices), "two matrices begin alike"


SPREADS = [(1, "none"), (2, "full"), (3, "full"), (4, "full"), (2, "ddp"), (4, "hybrid")]
# Each kind of spread with one model or the other; then all of them with both.
DRAWS = [("llama3.2-tiny", [(1, "none"), (3, "full"), (2, "ddp")]), ("mixtral-tiny", [(1, "none"), (4, "hybrid")])]
DRAWS += [("llama3.2-tiny", SPREADS), ("mixtral-tiny", SPREADS)]


@pytest.mark.parametrize(("preset", "spreads"), campaign(DRAWS, always=2))
def test_independent_of_ranks_and_sharding(
    preset: str, spreads: list[tuple[int, str]], corpus: Path, tmp_path: Path
) -> None:
    drawn = []
    for ranks, sharding in spreads:
        parallel = {"sharding": sharding} | ({"shard_group": 2} if sharding == "hybrid" else {})
        run = preset_run(corpus, preset, parallel=parallel)
        drawn.append(first_weights(tmp_path / f"{sharding}-{ranks}", run, ranks))
    for weights in drawn[1:]:
        assert set(weights) == set(drawn[0])
        for name, tensor in weights.items():
            assert torch.equal(tensor, drawn[0][name]), name


def test_another_seed_another_draw(corpus: Path, tmp_path: Path) -> None:
    one, other = (
        first_weights(tmp_path / str(seed), preset_run(corpus, "llama-tiny", train__seed=seed), 1) for seed in (0, 1)
    )
    assert all(not torch.equal(one[name], other[name]) for name in one if one[name].ndim >= 2)


ROTARY = [("llama3.2-tiny", 2, "full"), ("mistral-tiny", 2, "ddp")]
ROTARY += [("llama3.2-tiny", 1, "none"), ("llama3.2-tiny", 2, "ddp"), ("mistral-tiny", 1, "none")]
ROTARY += [("mistral-tiny", 2, "full")]


@pytest.mark.parametrize(("preset", "ranks", "sharding"), campaign(ROTARY, always=2))
def test_rotary_buffers_are_right_on_every_rank(
    preset: str, ranks: int, sharding: str, corpus: Path, tmp_path: Path
) -> None:
    run = preset_run(corpus, preset, parallel={"sharding": sharding}, train__steps=2)
    assert set(train(tmp_path, run, ranks=ranks, prelude=looking(tmp_path)).codes) == {0}
    values = copy.deepcopy({**presets()[preset].config, **run["model"]["config"]})
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(values)))
    expected = dict(fresh.named_buffers())
    assert any("inv_freq" in name for name in expected)
    if preset == "llama3.2-tiny":
        plain = AutoConfig.for_model(**{**values, "rope_scaling": None})
        unscaled = dict(AutoModelForCausalLM.from_config(plain).named_buffers())
        assert not torch.equal(unscaled["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"])
    for rank in range(ranks):
        found = torch.load(tmp_path / f"buffers-{rank}.pt")
        assert set(found) == set(expected)
        for name, buffer in found.items():
            assert torch.equal(buffer, expected[name]), f"rank {rank} {name}"


TIES = [("llama3.2-tiny", True, "full"), ("llama-tiny", False, "ddp")]
TIES += [("llama3.2-tiny", True, "ddp"), ("llama-tiny", False, "full")]


@pytest.mark.parametrize(("preset", "tied", "sharding"), campaign(TIES, always=2))
def test_tied_embeddings_stay_tied(preset: str, tied: bool, sharding: str, corpus: Path, tmp_path: Path) -> None:
    """Through training, a save, a resume on another number of ranks, and another save."""
    run = preset_run(corpus, preset, parallel={"sharding": sharding}, checkpoint__background=False)
    run["train"]["steps"] = 4
    prelude = looking(tmp_path)
    first = train(tmp_path, run, ranks=2, prelude=prelude, overrides=["train.steps=2", "train.warmup_steps=1"])
    assert first.codes == [0, 0], first.output
    again = train(tmp_path, run, ranks=3, prelude=prelude, attempt=2, overrides=["train.warmup_steps=1"])
    assert again.codes == [0, 0, 0], again.output
    for rank, steps in ((0, 4), (1, 4), (2, 2)):
        noted = [json.loads(line) for line in (tmp_path / f"tied-{rank}.jsonl").read_text().splitlines()]
        assert noted == [tied] * steps
    for step in (2, 4):
        weights = weights_of(CheckpointFolder(again.folder.checkpoints).at(step).path)
        assert ("lm_head.weight" in weights) == (not tied)
        if not tied:
            assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_building_a_model_changes_neither_the_run_nor_the_catalogue() -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 1024}
    run = resolve(parse_run({"model": {"preset": "llama-tiny", "config": {"rope_scaling": scaling}}, "data": {}}))
    before = dump_run(run), json.dumps(presets()["llama3.2-tiny"].config)
    model_config(run)
    model_config(resolve(parse_run({"model": {"preset": "llama3.2-tiny"}, "data": {}})))
    assert (dump_run(run), json.dumps(presets()["llama3.2-tiny"].config)) == before


@pytest.mark.parametrize("preset", sorted(presets()))
def test_parameters_on_the_meta_device(preset: str) -> None:
    """To the parameter: what is built, what is published and what the plan computes."""
    run = resolve(parse_run({"model": {"preset": preset}, "data": {}}))
    built = facts(meta_model(model_config(run), run))
    published = presets()[preset].num_parameters
    assert built.num_parameters == num_parameters(presets()[preset].config)
    if not preset.endswith("-tiny"):
        assert built.num_parameters == published
    assert built.tied == presets()[preset].config["tie_word_embeddings"]


def saved_model(folder: Path, kind: str) -> Any:
    torch.manual_seed(3)
    model: Any = {
        "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)),
        "untied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "moe": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_key_value_heads=2)),
    }[kind]()
    model.save_pretrained(folder)
    return model


# Each kind of model, and of spread; then every pair.
LOADED = [("tied", 2, "full"), ("moe", 2, "full"), ("untied", 2, "ddp"), ("moe", 1, "none")]
LOADED += [("tied", 1, "none"), ("untied", 1, "none"), ("untied", 2, "full"), ("tied", 2, "ddp"), ("moe", 2, "ddp")]


@pytest.mark.parametrize(("kind", "ranks", "sharding"), campaign(LOADED, always=4))
def test_published_weights_are_loaded(kind: str, ranks: int, sharding: str, corpus: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = saved_model(tmp_path / "model", kind)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    if kind == "moe":
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names, "Mixtral's published layout"
    if kind == "tied":
        assert "lm_head.weight" not in names
    run = tiny_run(corpus, data__tokenizer="tiny", parallel={"sharding": sharding})
    run["model"] = {"path": str(tmp_path / "model"), "init": "pretrained"}
    loaded = first_weights(tmp_path, run, ranks)
    expected = dict(model.named_parameters())
    assert set(loaded) == set(expected)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


OTHERS = {
    "gpt2": GPT2Config(vocab_size=1024, n_embd=64, n_layer=2, n_head=4, n_positions=64),  # dropout of 0.1
    "sliding": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=8),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
}


@pytest.mark.parametrize("family", campaign(list(OTHERS), always=2))  # test_layouts.py trains the others
def test_other_families_train_and_resume(family: str, corpus: Path, tmp_path: Path) -> None:
    """Any causal language model of transformers, from its configuration alone."""
    OTHERS[family].save_pretrained(tmp_path / "model")
    run = tiny_run(corpus, data__tokenizer="tiny", checkpoint={"every": 3, "background": False})
    run["model"] = {"path": str(tmp_path / "model")}
    alone = first_weights(tmp_path / "one", run, 1)
    shared = first_weights(tmp_path / "two", run, 2)
    assert all(torch.equal(alone[name], shared[name]) for name in alone)
    whole = train(tmp_path / "whole", run, ranks=2)
    assert whole.codes == [0, 0], whole.output
    assert whole.losses[8] < whole.losses[1]
    train(tmp_path / "killed", run, ranks=2, faults="kill:rank=1,step=5")
    resumed = train(tmp_path / "killed", run, ranks=2, attempt=2)
    assert [event["step"] for event in resumed.events("resumed")] == [3]
    assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms)
