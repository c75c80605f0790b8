"""What people do with a trained model: evaluate it, read its card, push it. One run is trained for all of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.data.servers import Served, serving
from tests.hub import WritableHub
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder

pytestmark = pytest.mark.train

QUESTIONS = [
    {"question": "It is a truth universally", "choices": [" acknowledged", " the of and", " zebra"], "answer": 0},
    {"question": "a single man in possession of a good", "choices": [" the", " fortune", " he"], "answer": 1},
    {"question": "must be in want of", "choices": [" was", " a", " a wife, she said and went"], "answer": 2},
    {"question": "Mr. Bennet was so odd", "choices": [" a mixture", " mixture a", " it"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
num_fewshot: 0
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("trained")
    run = tiny_run(corpus, train__steps=6, checkpoint__every=6, data__holdout=0.1, train__validate_every=3)
    result = train(root, {**run, "name": "little"})
    assert result.codes == [0], result.output
    return result.folder


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, kind in (("little_choice", CHOICE), ("little_text", PERPLEXITY)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data).lstrip() + kind)
    return folder


def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    """By hand: the sum over the continuation's tokens; an empty context is one begin-of-text token."""
    whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    begin = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    if not begin:
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        whole, begin = [prefix, *whole], 1
    with torch.no_grad():
        logs = model(torch.tensor([whole])).logits[0].log_softmax(dim=-1)
    return sum(logs[place - 1, whole[place]].item() for place in range(begin, len(whole)))


def test_evaluated_as_by_hand_from_a_checkpoint_and_from_its_export(trained, tasks, windlass, tmp_path) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'windlass[eval]'")
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = tmp_path / "out"
    words = ("--tasks", "little_*", "--include-path", tasks)
    answer = windlass("eval", trained.path, *words, "--json").json
    assert windlass("ckpt", "export", trained.path, "--to", export, "--dtype", "float32").code == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    right, total = 0, 0.0
    for question in QUESTIONS:
        scores = [log_likelihood(model, tokenizer, question["question"], choice) for choice in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
        total += log_likelihood(model, tokenizer, "", question["question"])
    texts = [question["question"] for question in QUESTIONS]
    expected = {
        ("little_choice", "acc"): right / len(QUESTIONS),
        ("little_text", "word_perplexity"): math.exp(-total / sum(len(text.split()) for text in texts)),
        ("little_text", "byte_perplexity"): math.exp(-total / sum(len(text.encode()) for text in texts)),
    }
    values = {(row["task"], row["metric"]): row["value"] for row in answer["results"]}
    assert values == pytest.approx(expected, rel=1e-4)
    assert (answer["step"], {row["samples"] for row in answer["results"]}) == (6, {len(QUESTIONS)})

    of_export = windlass("eval", export, *words, "--json").json
    assert {(row["task"], row["metric"]): row["value"] for row in of_export["results"]} == pytest.approx(values)
    assert (of_export["step"], of_export["path"]) == (None, None)
    shown = windlass("eval", trained.path, "--tasks", "little_choice", "--include-path", tasks, "--limit", 2)
    assert "little_choice" in shown.out
    assert str(trained.evaluations) in shown.out
    kept = list(read_json_lines(trained.evaluations))
    assert [record["limit"] for record in kept] == [None, 2]

    unknown = windlass("eval", trained.path, "--tasks", "little_choise", "--include-path", tasks, "--json")
    assert (unknown.code, unknown.json["fix"]) == (2, "--tasks little_choice")
    (tasks / "far.yaml").write_text("task: far\ndataset_path: acme/nowhere\ntest_split: test\n" + CHOICE)
    far = subprocess.run(
        [sys.executable, "-m", "windlass.cli.main", "eval", trained.path, "--tasks", "far", "--include-path", tasks],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert far.returncode == 1
    assert "the data of the task far cannot be fetched" in far.stderr

    assert windlass("ckpt", "export", trained.path, "--to", export, "--force", "--license", "apache-2.0").code == 0
    card = ModelCard.load(export / "README.md")
    assert {result.metric_type for result in card.data.eval_results} == {"acc", "word_perplexity", "byte_perplexity"}
    assert card.data.license == "apache-2.0"


def test_without_the_extra_it_says_what_to_install(trained) -> None:
    hidden = "import sys; sys.modules['lm_eval'] = None\nfrom windlass.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "eval", str(trained.path), "--tasks", "x", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["fix"] == "pip install 'windlass[eval]'"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[type[WritableHub], Served]]:
    kind = WritableHub.fresh()
    with serving(kind, {}) as served:
        for name, value in {
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "hf_writer",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the Hub's other protocol, which has no open server
        yield kind, served


def push(folder: RunFolder, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the Hub's client reads its settings when it is imported."""
    command = [sys.executable, "-m", "windlass.cli.main", "ckpt", "export", folder.path, "--push", *words]
    environment = {**os.environ, **environment}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)


def test_pushed_killed_half_way_and_pushed_again(trained, hub, tmp_path) -> None:
    kind, served = hub
    to = ("--to", tmp_path / "out", "--dtype", "float32")
    planned = push(trained, "ann/little", "--private", *to, "--dry-run", "--json")
    request = json.loads(planned.stdout)
    assert (request["exists"], request["private"], request["url"]) == (False, True, f"{served.url}/ann/little")
    assert not kind.repositories
    assert not (tmp_path / "out").exists()

    def first_put(self: WritableHub, method: str, path: str) -> int | None:
        if len(self.puts) == 1:  # one part is there: the client is killed while it sends the next
            os.kill(victim.pid, signal.SIGKILL)
        if method == "GET" and path == "/api/whoami-v2" and not throttled.is_set():
            throttled.set()
            return 429
        return None

    throttled = threading.Event()
    kind.fault = first_put  # type: ignore[method-assign]
    command = [sys.executable, "-m", "windlass.cli.main", "ckpt", "export", trained.path, "--push", "ann/little"]
    with subprocess.Popen(list(map(str, [*command, "--private", *to])), stderr=subprocess.PIPE, text=True) as victim:
        said = victim.stderr.read() if victim.stderr else ""
    assert victim.returncode == -signal.SIGKILL, said
    assert throttled.is_set()
    assert kind.repositories["ann/little"].private
    assert kind.repositories["ann/little"].branches == {"main": {}}
    del kind.fault
    kind.repositories["ann/little"].branches["main"] = {
        "model-00002-of-00002.safetensors": b"old",
        "notes.txt": b"mine",
    }

    begun = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    done = push(trained, "ann/little", "--private", *to, "--json")
    assert done.returncode == 0, done.stderr
    assert "hf_writer" not in done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["url"], answer["step"]) == (f"{served.url}/ann/little", 6)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == begun  # not exported again
    files = kind.repositories["ann/little"].branches["main"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {**written, "notes.txt": b"mine"}
    for name, content in files.items():  # nothing of this machine
        assert str(trained.path.parent).encode() not in content, name
        assert b"/work" not in content, name
        assert b"/tmp" not in content, name
    sent = len(kind.puts)
    again = push(trained, "ann/little", *to, "--revision", "v1")
    assert again.returncode == 0, again.stderr
    assert f"{served.url}/ann/little/tree/v1" in again.stdout
    assert len(kind.puts) == sent  # the hub has the weights
    assert [commit["revision"] for commit in kind.repositories["ann/little"].commits] == ["main", "v1"]


@pytest.mark.parametrize(
    ("token", "words", "what"),
    [
        ("", ["ann/new"], "needs a token"),
        ("hf_unknown", ["ann/new"], "does not accept the token"),
        ("hf_reader", ["ann/new"], "may not write"),
        ("hf_writer", ["bob/new"], "may not make it"),
        ("hf_stranger", ["ann/public"], "may not write"),
        ("hf_writer", ["ann/public", "--private"], "is public"),
        ("hf_writer", ["little"], "no name of a repository"),
    ],
)
def test_what_may_not_be_pushed_is_refused_before_the_export(trained, hub, tmp_path, token, words, what) -> None:
    from tests.hub import Repository

    kind, _ = hub
    kind.repositories["ann/public"] = Repository(private=False)
    done = push(trained, *words, "--to", tmp_path / "out", HF_TOKEN=token)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert what in done.stderr
    assert not (tmp_path / "out").exists()
    assert not token or token not in done.stderr
    assert list(kind.repositories) == ["ann/public"]
