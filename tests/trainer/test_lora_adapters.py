"""Adapters leave in the format of `peft`, which computes the same with them, and come back the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from click.testing import Result as Invoked
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.campaign import campaign
from tests.trainer.fine_tuning import lora_run, save_model
from tests.trainer.harness import Result, train
from tests.trainer.states import first_weights, weights_of
from tests.trainer.test_bad_input import assert_refused
from windlass.checkpoint import CheckpointFolder
from windlass.cli.models.ckpt import ckpt
from windlass.errors import UserError

pytestmark = pytest.mark.train

TOKENS = torch.arange(3, 63).reshape(2, 30)


def logits_of(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits  # type: ignore[no-any-return]


def export(root: Path, *arguments: str) -> Invoked:
    return CliRunner().invoke(ckpt, ["export", "run", *arguments], env={"WINDLASS_RUNS": str(root / "runs")})


def exported(root: Path, to: Path, *arguments: str) -> Path:
    done = export(root, "--to", str(to), *arguments)
    assert done.exit_code == 0, done.output + str(done.exception)
    return to


KINDS = [("tied", {"rank_stabilised": True, "alpha": 3}), ("moe", {"targets": ["q_proj", "v_proj"]}), ("untied", {})]


@pytest.mark.parametrize(("kind", "lora"), campaign(KINDS, always=2), ids=[kind for kind, _ in KINDS])
def test_peft_loads_it_and_merging_computes_the_same(
    kind: str, lora: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = save_model(tmp_path / "model", kind)
    result = train(tmp_path, lora_run(corpus, model, lora, checkpoint={"export": True}), ranks=2)
    assert result.codes == [0, 0], result.output
    adapter = result.folder.export
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (adapter / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = logits_of(plain)
    beside = peft.PeftModel.from_pretrained(plain, adapter)
    with_adapter = logits_of(beside)
    assert not torch.allclose(with_adapter, before, atol=1e-3), "the adapter does something"
    merged = AutoModelForCausalLM.from_pretrained(exported(tmp_path, tmp_path / "merged", "--merge"))
    assert torch.allclose(logits_of(merged), with_adapter, atol=1e-5)
    assert torch.allclose(logits_of(beside.merge_and_unload()), logits_of(merged), atol=1e-6)
    assert AutoTokenizer.from_pretrained(adapter).eos_token == AutoTokenizer.from_pretrained(model).eos_token


def test_the_trainers_own_loss_is_that_of_the_merged_model(corpus: Path, tmp_path: Path) -> None:
    """Validation of the LoRA run at its end, and of the merged model before its first step."""
    model = save_model(tmp_path / "model")
    data = {"data__holdout": 0.1, "checkpoint": {"export": "merged"}}
    result = train(tmp_path, lora_run(corpus, model, **data), ranks=2)
    assert result.codes == [0, 0], result.output
    again = lora_run(corpus, model, data__holdout=0.1, train__learning_rate=1e-12, train__steps=2)
    again["model"] = {"path": str(result.folder.export), "init": "pretrained"}
    plain = train(tmp_path / "again", again, ranks=2)
    one, other = (run.records("validation")[-1] for run in (result, plain))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["accuracy"] == other["accuracy"]


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A model, an adapter of it, and the run that made it."""
    root = tmp_path_factory.mktemp("made")
    model = save_model(root / "model")
    result = train(root, lora_run(corpus, model, {"targets": ["q_proj", "up_proj"]}), ranks=2)
    assert result.codes == [0, 0], result.output
    return model, exported(root, root / "adapter"), result


def test_training_goes_on_from_an_adapter(made: tuple[Path, Path, Result], corpus: Path, tmp_path: Path) -> None:
    model, adapter, before = made
    run = lora_run(corpus, model, {"rank": None, "adapter": str(adapter)})
    first = first_weights(tmp_path / "first", run, 2)
    last = weights_of(CheckpointFolder(before.folder.checkpoints).at(8).path)
    assert set(first) == set(last)
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_an_adapter_that_peft_made_is_trained_on(corpus: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = save_model(tmp_path / "model")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits_of(theirs)
    run = lora_run(corpus, model, {"rank": None, "adapter": str(tmp_path / "adapter")}, train__steps=1)
    run["train"] |= {"learning_rate": 1e-12, "warmup_steps": 0}
    assert train(tmp_path, run, ranks=2).codes == [0, 0]
    merged = AutoModelForCausalLM.from_pretrained(exported(tmp_path, tmp_path / "merged", "--merge"))
    assert torch.allclose(logits_of(merged), expected, atol=1e-5)


def test_an_adapter_in_bfloat16(made: tuple[Path, Path, Result], tmp_path: Path) -> None:
    _, adapter, before = made
    root = before.folder.path.parent.parent
    half = load_file(exported(root, tmp_path / "half", "--dtype", "bfloat16") / "adapter_model.safetensors")
    whole = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)


def test_weights_in_the_old_format_train_whole_but_not_beside_lora(corpus: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    whole = train(tmp_path / "new", tiny(corpus, model), ranks=2)
    (model / "model.safetensors").unlink()
    old = train(tmp_path / "old", tiny(corpus, model), ranks=2)
    assert old.codes == [0, 0], old.output
    assert old.losses == whole.losses
    assert_refused(train(tmp_path, lora_run(corpus, model), ranks=2), "pytorch_model.bin", "save_pretrained")


def tiny(corpus: Path, model: Path) -> dict[str, Any]:
    run = lora_run(corpus, model, train__steps=2)
    del run["model"]["lora"]
    return run


def test_merging_beside_other_weights_is_refused(corpus: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert train(tmp_path, lora_run(corpus, model, train__steps=2)).codes == [0]
    save_model(model, seed=9)
    refused = export(tmp_path, "--to", str(tmp_path / "out"), "--merge")
    assert isinstance(refused.exception, UserError)
    assert "is not the model that this adapter was trained beside" in str(refused.exception)
    assert not (tmp_path / "out").exists()
    assert export(tmp_path, "--to", str(tmp_path / "out")).exit_code == 0


def test_a_run_without_an_adapter_has_none_to_merge(corpus: Path, tmp_path: Path) -> None:
    run = lora_run(corpus, save_model(tmp_path / "model"), train__steps=2)
    del run["model"]["lora"]
    assert train(tmp_path, run).codes == [0]
    refused = export(tmp_path, "--merge")
    assert isinstance(refused.exception, UserError)
    assert "no adapter to merge" in str(refused.exception)


def wrong_shapes(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-8].contiguous()}, adapter / "adapter_model.safetensors")


def wrong_rank(adapter: Path) -> None:
    change(adapter, r=7)


def another_kind(adapter: Path) -> None:
    change(adapter, use_dora=True)


def no_json(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")


def no_tensors(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


def cut_short(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def of_another_model(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"model_sha256": "0" * 64})


def change(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (wrong_shapes, "does not fit the model"),
        (wrong_rank, "does not fit the model"),
        (another_kind, "use_dora"),
        (no_json, "is not the configuration of a LoRA adapter"),
        (no_tensors, "holds no adapter"),
        (cut_short, "beyond the end of the file"),
        (of_another_model, "belongs to another model"),
    ],
)
def test_an_adapter_that_cannot_be_used(
    damage: Any, said: str, made: tuple[Path, Path, Result], corpus: Path, tmp_path: Path
) -> None:
    model, adapter, _ = made
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in adapter.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage(copy)
    run = lora_run(corpus, model, {"rank": None, "adapter": str(copy)})
    assert_refused(train(tmp_path, run, ranks=2), said)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "target": ({"targets": ["q_prj"]}, {}, "model.lora.targets=[q_proj]"),
    "target of another kind": ({"targets": ["embed_tokens"]}, {}, "no linear layer matches 'embed_tokens'"),
    "head": ({"targets": ["lm_head"]}, {}, "names the head lm_head"),
    "adapter": ({"adapter": "/nowhere/adapter"}, {}, "/nowhere/adapter holds no adapter"),
    "random weights": ({}, {"init": "random"}, "model.init is random"),
    "rank": ({"rank": 0}, {}, "model.lora.rank"),
    "dropout": ({"dropout": 1.0}, {}, "model.lora.dropout"),
    "sharded 4 bits": ({"quantize": "nf4"}, {}, "parallel.sharding=ddp"),
    "key": ({"ranks": 4}, {}, "model.lora.rank?"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, made: tuple[Path, Path, Result], corpus: Path, tmp_path: Path) -> None:
    lora, changes, said = BAD[case]
    run = lora_run(corpus, made[0], lora, parallel={"sharding": "full"})
    run["model"] |= changes
    assert_refused(train(tmp_path, run, ranks=2), said)
