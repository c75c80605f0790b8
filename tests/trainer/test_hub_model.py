"""A model by its hub id: configuration, weights and tokenizer over the Hub's protocol, from a server of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.servers import HubHandler, serving
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from tests.trainer.test_bad_input import assert_refused
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.runfolder import RunFolder, steps_of

pytestmark = pytest.mark.train


class ModelHub(HubHandler):
    repository = "acme/tiny-llama"
    kind, folder = "models", ""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("hub") / "tiny-llama"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_key_value_heads=2, max_position_embeddings=256, **sizes))
    model.save_pretrained(folder)
    load_tokenizer("tiny").save(folder)
    return folder


def run_trainer(
    root: Path, run: dict, *, ranks: int = 1, **environment: str
) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    root.mkdir(parents=True)
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump({"name": "run", **run}))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "windlass.trainer", str(file)],
        env={**os.environ, "WINDLASS_RUNS": str(root / "runs"), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    return done, RunFolder(root / "runs" / "run")


def test_a_hub_id_trains_as_its_folder_does(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    def run_on(path: str) -> dict[str, Any]:
        return tiny_run(corpus, model={"path": path, "init": "pretrained"}, train__steps=3)

    with serving(ModelHub, {path.name: path.read_bytes() for path in model_folder.iterdir()}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        done, folder = run_trainer(tmp_path / "hub", run_on("acme/tiny-llama"), **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert any("model.safetensors" in request for request in hub.requests)
    here = train(tmp_path / "folder", run_on(str(model_folder)))
    assert here.codes == [0], here.output
    assert {step: record["loss"] for step, record in steps_of(folder).items()} == here.losses


def test_a_hub_id_that_is_not_there_is_one_clear_error(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, model={"path": "acme/no-such-model"}, data__tokenizer="tiny")
    with serving(ModelHub, {}) as hub:
        done, folder = run_trainer(tmp_path / "x", run, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 2
    assert "error: there is no model acme/no-such-model on the hub, or it is private" in done.stderr
    assert "Traceback" not in done.stderr
    assert not folder.path.exists()


def test_every_file_is_downloaded_once_whatever_the_ranks(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    """Two ranks, a hub that puts every fifth request off, and then the same again from what is here."""
    lora = {"rank": 4}
    run = tiny_run(corpus, model={"path": "acme/tiny-llama", "init": "pretrained", "lora": lora}, train__steps=3)
    files = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    patient = type("Patient", (ModelHub,), {"impatience": [0, 1]})
    with serving(patient, files) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        done, folder = run_trainer(tmp_path / "x", run, ranks=2, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(steps_of(folder)) == 3
        gets = [request.split()[1] for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
        assert sorted(gets) == sorted(set(gets)), "one download of each"
        assert any("model.safetensors" in request for request in gets)
        assert folder.load_run().model.path == "acme/tiny-llama", "the run keeps the name it was given"
    again, _ = run_trainer(tmp_path / "y", run, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_gated_model_is_one_clear_error(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    gated = type("Gated", (ModelHub,), {"gated": "manual"})
    run = tiny_run(corpus, model={"path": "acme/tiny-llama", "init": "pretrained"}, data__tokenizer="tiny")
    with serving(gated, {path.name: path.read_bytes() for path in model_folder.iterdir()}) as hub:
        done, folder = run_trainer(
            tmp_path / "x", run, ranks=2, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_TOKEN=""
        )
    assert done.returncode != 0
    assert done.stderr.count("error: the hub does not give the model acme/tiny-llama to you") == 1
    assert not folder.path.exists()


def test_code_of_a_model_runs_only_when_asked(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = {"AutoConfig": "own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w').close()\nclass OwnConfig: pass\n")
    run = tiny_run(corpus, model={"path": str(folder)}, data__tokenizer="tiny")
    assert_refused(train(tmp_path, run, ranks=2), "model.trust_remote_code=true")
    assert not (tmp_path / "it-ran").exists()
