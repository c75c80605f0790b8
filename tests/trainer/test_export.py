"""A trained model leaves as a folder that transformers loads with the same logits, and comes back the same."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from tests.trainer.plain import TINY_TOKENIZER
from tests.trainer.states import weights_of
from tests.trainer.test_weights import FAMILIES, preset_run, saved_model
from windlass.catalog.models import presets
from windlass.checkpoint import CheckpointFolder
from windlass.cli.models.ckpt import ckpt
from windlass.errors import UserError

pytestmark = [pytest.mark.train, pytest.mark.torch_floor]

TOKENS = torch.arange(3, 63).reshape(2, 30)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


def trained_model(run: dict[str, Any], checkpoint: Path) -> Any:
    """The trained model by a way of its own: transformers builds it, DCP reads it."""
    config = AutoConfig.for_model(
        **copy.deepcopy({**presets()[run["model"]["preset"]].config, **run["model"]["config"]})
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    report = model.load_state_dict(weights_of(checkpoint), strict=False)
    assert not report.unexpected_keys
    assert report.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    return model


@pytest.mark.parametrize("preset", campaign(FAMILIES, always=2))
def test_transformers_loads_the_trained_model(preset: str, corpus: Path, tmp_path: Path) -> None:
    run = preset_run(corpus, preset, train__steps=3, checkpoint__export=True)
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    (exported,) = result.events("exported")
    assert exported["step"] == 3
    loaded = AutoModelForCausalLM.from_pretrained(result.folder.export)
    expected = trained_model(run, CheckpointFolder(result.folder.checkpoints).at(3).path)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits_of(loaded), logits_of(expected))
    tied = presets()[preset].config["tie_word_embeddings"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    names = set(load_file(result.folder.export / "model.safetensors"))
    assert ("lm_head.weight" in names) == (not tied)
    if preset == "mixtral-tiny":
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names, "Mixtral's published layout"
    assert loaded.config.use_cache
    tokenizer, original = (AutoTokenizer.from_pretrained(one) for one in (result.folder.export, TINY_TOKENIZER))
    text = "the windlass turns, and 17 chains come up"
    assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.eos_token == original.eos_token


@pytest.mark.parametrize("kind", campaign(["tied", "moe", "untied"], always=2))
def test_a_folder_goes_in_and_comes_out_the_same(kind: str, corpus: Path, tmp_path: Path) -> None:
    original = saved_model(tmp_path / "model", kind)
    run = tiny_run(corpus, data__tokenizer="tiny")
    run["model"] = {"path": str(tmp_path / "model"), "init": "pretrained"}
    train(tmp_path, run, ranks=2, faults="term:step=1")
    assert windlass_ckpt(tmp_path, "export", "run", "--to", str(tmp_path / "out")).exit_code == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "out"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits_of(original))
    if kind == "tied":
        the_folder_was_changed(tmp_path)


def the_folder_was_changed(root: Path) -> None:
    """Another configuration around the same shapes is another model: not exported with the trained weights."""
    file = root / "model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "hidden_act": "relu", "rms_norm_eps": 0.5, "eos_token_id": 7}))
    refused = windlass_ckpt(root, "export", "run", "--to", str(root / "other"))
    assert isinstance(refused.exception, UserError)
    assert "is of another model" in str(refused.exception)
    assert "hidden_act: 'silu' there, 'relu' here" in str(refused.exception)
    assert "rms_norm_eps" in str(refused.exception)
    assert "eos_token_id" not in str(refused.exception), "it says where generated text ends, not what the model is"
    assert not (root / "other").exists()


def test_the_exported_folder_trains_on(corpus: Path, tmp_path: Path) -> None:
    """Out of one run and into another: the weights, and the tokenizer in the folder."""
    run = preset_run(corpus, "mixtral-tiny", checkpoint__export=True, checkpoint__export_dtype="bfloat16")
    first = train(tmp_path / "first", run, ranks=2)
    assert {tensor.dtype for tensor in load_file(first.folder.export / "model.safetensors").values()} == {
        torch.bfloat16
    }
    run = tiny_run(corpus, model={"path": str(first.folder.export), "init": "pretrained"})
    second = train(tmp_path / "second", run, ranks=2)
    assert second.codes == [0, 0], second.output
    assert second.losses[1] < first.losses[2]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 2 and 4, and what is left of a save that was cut off."""
    root = tmp_path_factory.mktemp("finished")
    result = train(root, preset_run(corpus, "llama3.2-tiny", train__steps=4, checkpoint__every=2), ranks=2)
    assert result.codes == [0, 0], result.output
    torn = CheckpointFolder(result.folder.checkpoints).at(3).path
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    return root


def windlass_ckpt(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(ckpt, arguments, env={"WINDLASS_RUNS": str(root / "runs")})


def test_export_in_bfloat16(finished: Path, tmp_path: Path) -> None:
    done = windlass_ckpt(finished, "export", "run", "--to", str(tmp_path / "out"), "--dtype", "bfloat16", "--json")
    described = json.loads(done.output)
    assert (described["step"], described["dtype"], described["path"]) == (4, "bfloat16", str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert described["bytes"] > sum(tensor.nbytes for tensor in written.values())
    for name, tensor in weights_of(finished / "runs/run/checkpoints/step-00000004").items():
        assert torch.equal(written[name], tensor.bfloat16()), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_export_of_an_earlier_step(finished: Path, tmp_path: Path) -> None:
    done = windlass_ckpt(finished, "export", "run", "--step", "2", "--to", str(tmp_path / "out"))
    assert done.exit_code == 0
    assert done.output.startswith("step 2 → ")
    expected = weights_of(finished / "runs/run/checkpoints/step-00000002")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_export_does_not_overwrite_unasked(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    refused = windlass_ckpt(finished, "export", "run", "--to", str(tmp_path / "out"))
    assert isinstance(refused.exception, UserError)
    assert "exists" in str(refused.exception)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    assert windlass_ckpt(finished, "export", "run", "--to", str(tmp_path / "out"), "--force").exit_code == 0
    assert not (tmp_path / "out" / "precious").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ("export", "run", "--step", "3"),
            "no complete checkpoint of step 3 of run can be had\n  evidence  complete: 2, 4",
        ),
        (("verify", "run", "--step", "7"), "no complete checkpoint of step 7"),
        (("export", "rum"), "there is no run 'rum'"),
        (("ls", "rum"), "there is no run 'rum'"),
    ],
)
def test_what_is_not_there(arguments: tuple[str, ...], what: str, finished: Path) -> None:
    failed = windlass_ckpt(finished, *arguments)
    assert isinstance(failed.exception, UserError)
    assert what in str(failed.exception)
    assert failed.exception.fix


def test_ls(finished: Path) -> None:
    rows = json.loads(windlass_ckpt(finished, "ls", "run", "--json").output)
    assert [(row["step"], row["complete"]) for row in rows] == [(2, True), (3, False), (4, True)]
    assert rows[2]["tokens"] == 4 * 8 * 32
    assert rows[2]["world_size"] == 2
    assert rows[1]["bytes"] == 4
    text = windlass_ckpt(finished, "ls", "run").output
    assert len(text.splitlines()) == 4  # with its header
    assert "incomplete" in text.splitlines()[2]


def test_verify_names_what_is_damaged(finished: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    whole = windlass_ckpt(root, "verify", "run", "--json")
    assert whole.exit_code == 0
    assert [row["damages"] for row in json.loads(whole.output)] == [[], [], []]
    file = root / "runs/run/checkpoints/step-00000004/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    damaged = windlass_ckpt(root, "verify", "run", "--json")
    assert damaged.exit_code == 1
    (damage,) = json.loads(damaged.output)[2]["damages"]
    assert damage["file"] == "__1_0.distcp"
    assert "SHA-256" in damage["reason"]
    text = windlass_ckpt(root, "verify", "run").output
    assert "DAMAGED" in text
    assert "__1_0.distcp" in text
    assert windlass_ckpt(root, "verify", "run", "--step", "2").exit_code == 0
    refused = windlass_ckpt(root, "export", "run")
    assert isinstance(refused.exception, UserError)
    assert "__1_0.distcp" in str(refused.exception)
    assert not (root / "runs/run/export").exists()


def test_export_while_a_run_saves(finished: Path, tmp_path: Path) -> None:
    """A run that saves every moment and keeps one: every export succeeds, each of a step that was there."""
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    checkpoints = CheckpointFolder(root / "runs/run/checkpoints")
    checkpoints.at(2).delete()
    ended, saved = threading.Event(), [4]

    def save_on() -> None:
        while not ended.is_set():
            here, after = checkpoints.at(saved[-1]), checkpoints.at(saved[-1] + 1)
            manifest = here.manifest()
            shutil.copytree(here.path, after.path, ignore=shutil.ignore_patterns("manifest.json"))
            after.publish(dataclasses.replace(manifest, step=after.step))
            saved.append(after.step)
            here.delete()

    run = threading.Thread(target=save_on)
    run.start()
    try:
        for number in itertools.count():
            if number >= 4 and len(saved) > 10:
                break
            assert run.is_alive()
            done = windlass_ckpt(root, "export", "run", "--to", str(tmp_path / f"out-{number}"), "--json")
            assert done.exit_code == 0, done.exception
            assert json.loads(done.output)["step"] in saved
    finally:
        ended.set()
        run.join()
    assert not list(checkpoints.path.glob(".pinned*"))
