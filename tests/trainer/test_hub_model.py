"""A model by its hub id: configuration, weights and tokenizer over the Hub's protocol, from a server of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.data.servers import HubHandler, serving
from tests.trainer.conftest import tiny_run
from windlass.data.tokenizer import load_tokenizer
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


def run_trainer(root: Path, run: dict, **environment: str) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    root.mkdir(parents=True)
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump({"name": "run", **run}))
    done = subprocess.run(
        [sys.executable, "-m", "windlass.trainer", str(file)],
        env={**os.environ, "WINDLASS_RUNS": str(root / "runs"), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    return done, RunFolder(root / "runs" / "run")


def test_a_hub_id_trains_as_its_folder_does(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    def losses(where: str, path: str, **environment: str) -> list[float]:
        run = tiny_run(corpus, model={"path": path, "init": "pretrained"}, train__steps=3)
        done, folder = run_trainer(tmp_path / where, run, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [record["loss"] for record in steps_of(folder).values()]

    with serving(ModelHub, {path.name: path.read_bytes() for path in model_folder.iterdir()}) as hub:
        there = losses("hub", "acme/tiny-llama", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"))
        assert any("model.safetensors" in one for one in hub.requests)
    assert there == losses("folder", str(model_folder))


def test_a_hub_id_that_is_not_there_is_one_clear_error(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, model={"path": "acme/no-such-model"}, data__tokenizer="tiny")
    with serving(ModelHub, {}) as hub:
        done, folder = run_trainer(tmp_path / "x", run, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 2
    assert "error: the model acme/no-such-model cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert not folder.path.exists()
