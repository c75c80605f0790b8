"""What people do with a trained model: evaluate it, read its card, push it. One run is trained for all of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hub import writable_hub
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of

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


def test_pushed_with_its_card_and_again_without_a_second_export(trained, windlass, tmp_path, monkeypatch) -> None:
    from huggingface_hub import ModelCard

    words = ("ckpt", "export", trained.path, "--push", "ann/little", "--to", tmp_path / "out", "--dtype", "float32")
    with writable_hub(monkeypatch) as (hub, served):
        request = windlass(*words, "--private", "--dry-run", "--json").json
        assert (request["exists"], request["private"], request["url"]) == (False, True, f"{served.url}/ann/little")
        assert not hub.repositories
        assert not (tmp_path / "out").exists()
        (tmp_path / "taken").mkdir()
        for more in (("--dry-run",), ()):  # a dry run refuses what the command refuses
            occupied = windlass(*words, "--to", tmp_path / "taken", *more)
            assert (occupied.code, f"{tmp_path / 'taken'} exists" in occupied.err) == (2, True)
        assert not hub.repositories

        hub.fault = lambda _, method, path: 403 if "/commit/" in path else None
        refused = windlass(*words, "--private", "--json")
        assert refused.json["error"] == "the token may not write to ann/little"
        del hub.fault
        begun = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
        answer = windlass(*words, "--private", "--json").json
        assert (answer["url"], answer["step"]) == (f"{served.url}/ann/little", 6)
        assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == begun
        assert hub.repositories["ann/little"].private
        files = hub.repositories["ann/little"].branches["main"]
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    private = (str(trained.path.parent), str(Path(__file__).parents[2]), str(Path.home()), "/tmp")
    assert not [name for name, content in files.items() for path in private if path.encode() in content]
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("unknown", "transformers", None)
    for fact in ("| steps | 6 of 6 |", "| tokens | 1,536 |", "| validation loss | ", "AutoModelForCausalLM"):
        assert fact in card.text, card.text
    loss = f"| loss | {steps_of(trained)[6]['loss']:.4f} |"
    assert loss in card.text
