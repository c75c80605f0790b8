"""What is wrong with the input is said once, before training starts, and leaves nothing behind."""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, start, train

pytestmark = pytest.mark.train

NO_GPU = "resources.gpus_per_node=4"


def assert_refused(result: Result, *said: str) -> None:
    assert set(result.codes) == {2}, result.output
    assert result.output.count("error: ") == 1, result.output
    assert "Traceback" not in result.output
    for words in said:
        assert words in result.output
    assert not result.folder.path.exists()


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "unknown key": ({"train__lerning_rate": 1e-3}, [], ["unknown key train.lerning_rate", "train.learning_rate?"]),
    "unknown section": ({"trian": {"steps": 3}}, [], ["unknown key trian", "did you mean train?"]),
    "wrong value": ({"train__steps": "many"}, [], ["train.steps", "'many'"]),
    "sequence too long": ({"data__sequence_length": 10_000}, [], ["10000", "8192", "data.sequence_length=8192"]),
    "heads": ({"model__config": {"num_attention_heads": 6, "num_key_value_heads": 4}}, [], ["6", "4", "divisible"]),
    "hidden size": ({"model": {"preset": "llama-tiny", "config": {"hidden_size": 130}}}, [], ["130", "divisible"]),
    "preset": ({"model": {"preset": "llama3.2-tinny"}}, [], ["llama3.2-tinny", "model.preset=llama3.2-tiny"]),
    "missing data": ({"data__source": "/nowhere/data.jsonl"}, [], ["/nowhere"]),
    "missing model": ({"model": {"path": "/nowhere/model"}}, [], ["/nowhere/model", "missing"]),
    "no gpu": ({}, [NO_GPU], ["4 GPUs per node are asked for", "resources.gpus_per_node=0"]),
    "vocabulary": ({"model__config": {"vocab_size": 100}}, [], ["1,024 tokens", "the model 100"]),
    "bad override": ({}, ["train.steps"], ["'train.steps' is not of the form"]),
    "unknown override": ({}, ["stepz=3"], ["unknown key stepz", "train.steps?"]),
    "batch too small": ({"train__global_batch": 1}, [], ["global batch of 1", "train.global_batch=2"]),
    "one rank only": ({"parallel": {"sharding": "none"}}, [], ["2 ranks", "parallel.sharding=full"]),
    "groups": ({"parallel": {"sharding": "hybrid", "shard_group": 3}}, [], ["groups of 3"]),
    "holdout": ({"data__holdout": 0.1, "data__validation_source": "corpus:austen"}, [], ["not both"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, corpus: Path, tmp_path: Path) -> None:
    changes, overrides, said = CASES[case]
    assert_refused(train(tmp_path, tiny_run(corpus, **changes), ranks=2, overrides=overrides), *said)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_an_empty_dataset(content: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    assert_refused(train(tmp_path, tiny_run(tmp_path / "empty.jsonl"), ranks=2), "empty.jsonl")


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "a few words"}\n')
    assert_refused(train(tmp_path, tiny_run(tmp_path / "short.jsonl"), ranks=2), "fewer than one sequence")


def test_an_unknown_fault(corpus: Path, tmp_path: Path) -> None:
    assert_refused(train(tmp_path, tiny_run(corpus), ranks=2, faults="explode:rank=1"), "explode", "kill:rank=1")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_a_shard(folder: Path) -> None:
    next(iter(folder.glob("model-00002*.safetensors"))).unlink()


def not_a_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-family"}')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_weights, "model.safetensors"),
        (without_a_shard, "model-00002"),
        (not_a_config, "not valid JSON"),
        (unknown_family, "no-such-family"),
    ],
)
def test_a_model_folder_that_lacks_something(
    damage: Callable[[Path], None], said: str, corpus: Path, tmp_path: Path
) -> None:
    shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2))
    model.save_pretrained(tmp_path / "model", max_shard_size="100kB" if damage is without_a_shard else "5GB")
    damage(tmp_path / "model")
    run = tiny_run(corpus, model={"path": str(tmp_path / "model"), "init": "pretrained"}, data__tokenizer="tiny")
    assert_refused(train(tmp_path, run, ranks=2), said)


def test_weights_that_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    """Found out while loading: said as clearly, though the run folder is there by then."""
    shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    run = tiny_run(corpus, model={"path": str(tmp_path / "model"), "init": "pretrained"}, data__tokenizer="tiny")
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [2, 2], result.output
    assert result.output.count("error: the weights of ") == 1
    assert "Traceback" not in result.output


def elsewhere(folder: Path, rank: int) -> None:
    """In rank 1, before it trains: the relative path of the data leads nowhere."""
    os.chdir(folder / "elsewhere" if rank else folder)


def test_only_one_node_lacks_the_data(corpus: Path, tmp_path: Path) -> None:
    """It is that node which says so: the first one knows nothing of it, and is ended by the launcher."""
    (tmp_path / "data.jsonl").write_bytes(corpus.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    run = tiny_run(Path("data.jsonl"))
    job = start(tmp_path, run, ranks=2, nodes=2, prelude=functools.partial(elsewhere, tmp_path))
    job.processes[1].join(60)
    job.signal(0, signal.SIGKILL)
    assert job.result().codes[1] == 2
    assert "error: there is no file or folder data.jsonl" in job.logs[1].read_text()
    assert not job.folder.path.exists()


def test_a_name_that_leads_out_of_the_runs_folder(tmp_path: Path, corpus: Path) -> None:
    result = train(tmp_path, tiny_run(corpus), ranks=1, overrides=["name=../escape"])
    assert_refused(result, "name '../escape' is not usable")
    assert not (tmp_path / "escape").exists()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_the_port_is_taken(taken_port: int, corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus), ranks=1, port=taken_port)
    assert_refused(result, "the ranks could not meet", f"127.0.0.1:{taken_port}", "port is taken")
