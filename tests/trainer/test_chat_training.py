"""Trained on chats, a model learns the answers and nothing else; packing changes no number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.campaign import campaign
from tests.data.test_chat import MARKED, PLAIN, tokenizer
from tests.trainer.conftest import WORDS, tiny_run
from tests.trainer.fine_tuning import SHAPE, lora_run, save_model
from tests.trainer.harness import resume, train
from tests.trainer.states import first_weights, weights_of
from tests.trainer.test_bad_input import assert_refused
from windlass.checkpoint import CheckpointFolder
from windlass.data.sources.records import example_text
from windlass.data.tokenizers.chat import TRAINED, encoder
from windlass.spec.data import DataSection

pytestmark = pytest.mark.train

LENGTH = 160


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions whose answer is a fixed word for each: one to three turns, with and without a system message."""
    draw = random.Random(3)
    answers = {word: draw.choice(WORDS) for word in sorted(set(WORDS))}
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for _ in range(200):
            messages = [{"role": "system", "content": "answer"}] if draw.random() < 0.5 else []
            for _ in range(draw.randint(1, 3)):
                word = draw.choice(sorted(answers))
                messages += [
                    {"role": "user", "content": " ".join(draw.choices(WORDS, k=3)) + f" {word}"},
                    {"role": "assistant", "content": answers[word]},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model") / "chatty")
    tokenizer(MARKED).save(folder)
    return folder


def chat_run(chats: Path, model: Path, **changes: Any) -> dict[str, Any]:
    return tiny_run(
        chats,
        **{
            "model": {"path": str(model), "init": "pretrained"},
            "data__format": "chat",
            "data__sequence_length": LENGTH,
            **changes,
        },
    )


def documents(chats: Path, template: str = MARKED) -> list[list[int]]:
    one = encoder(tokenizer(template), DataSection(format="chat"))
    texts = [example_text(json.loads(line), "@chat:messages", "here") for line in chats.read_text().splitlines()]
    return one.encode_documents(texts)


def test_packed_loss_is_that_of_every_example_by_itself(chats: Path, model: Path, tmp_path: Path) -> None:
    """The first step over all data at once, against transformers on one example at a time."""
    rows = chat_run(chats, model, data__shuffle=False)
    probe = train(tmp_path / "probe", rows, ranks=1)
    count = int(probe.output.split(" examples, ")[1].split(" sequences")[0])
    run = chat_run(chats, model, data__shuffle=False, train__steps=1, train__warmup_steps=0)
    run["train"] |= {"global_batch": count, "micro_batch": 4}
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, labels = 0.0, 0
    for ids in documents(chats):
        tokens = torch.tensor([number & ~TRAINED for number in ids])
        trained = torch.tensor([number & TRAINED != 0 for number in ids])[1:]
        with torch.no_grad():
            logits = plain(tokens[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        total, labels = total + float(each[trained].sum()), labels + int(trained.sum())
    assert result.losses[1] == pytest.approx(total / labels, rel=1e-5)
    assert result.records("step")[0]["tokens"] == labels
    assert "% full" in result.output


@pytest.mark.campaign
@pytest.mark.campaign_only  # test_instructions_train learns in fewer steps, test_lora.py in adapters alone
def test_lora_learns_to_answer(chats: Path, model: Path, corpus: Path, tmp_path: Path) -> None:
    """A real small task: a model that knows the words learns which one answers which, in its adapters alone."""
    knowing = tiny_run(corpus, model={"path": str(model), "init": "pretrained"}, checkpoint={"export": True})
    knowing["train"] |= {"steps": 150, "learning_rate": 5e-3}
    taught = train(tmp_path / "taught", knowing, timeout=600).folder.export
    tokenizer(MARKED).save(taught)
    run = lora_run(chats, taught, {"rank": 16}, data__holdout=0.1, train__steps=200, checkpoint={"every": 200})
    run["data"] |= {"format": "chat", "sequence_length": LENGTH}
    run["train"] |= {"learning_rate": 5e-3, "global_batch": 16, "weight_decay": 0.0, "validate_every": 20}
    result = train(tmp_path, run, timeout=600)
    assert result.codes == [0], result.output
    losses = list(result.losses.values())
    assert sum(losses[-10:]) / 10 < 0.5 * sum(losses[:3]) / 3
    assert min(record["loss"] for record in result.records("validation")) < 0.6 * losses[0]
    assert result.records("validation")[-1]["accuracy"] > 0.5
    names = weights_of(CheckpointFolder(result.folder.checkpoints).at(200).path)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)


@pytest.mark.parametrize("sharding", campaign(["full", "ddp"], always=1))
def test_any_ranks_read_the_same_rows(sharding: str, chats: Path, model: Path, tmp_path: Path) -> None:
    one = train(tmp_path / "one", chat_run(chats, model), ranks=1)
    run = chat_run(chats, model, parallel={"sharding": sharding}, train__fused_head=True)
    other = train(tmp_path / "other", run, ranks=3)
    assert set(one.codes + other.codes) == {0}, one.output + other.output
    assert list(other.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)


def test_a_kill_changes_nothing(chats: Path, model: Path, tmp_path: Path) -> None:
    run = chat_run(chats, model, checkpoint={"every": 3, "background": False})
    whole = train(tmp_path / "whole", run, ranks=2)
    train(tmp_path / "killed", run, ranks=2, faults="kill:rank=0,step=6")
    assert resume(tmp_path / "killed", run, ranks=2).losses == whole.losses


def test_templates_without_marks_train_on_the_same_answers(chats: Path, tmp_path: Path) -> None:
    """The plain template is rendered turn by turn; what it marks differs from the marked one by line ends alone."""
    plain, marked = documents(chats, PLAIN), documents(chats, MARKED)
    for one, other in zip(plain, marked, strict=True):
        newline = [number & ~TRAINED for number in one if number not in other]
        assert len({*newline}) <= 1
        assert sum(number & TRAINED != 0 for number in one) >= sum(number & TRAINED != 0 for number in other)


def test_instructions_train(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"q": f"{n} and one is ", "a": str(n + 1)}) + "\n" for n in range(200)))
    run = chat_run(file, model, data__format="instruction", train__steps=60, train__learning_rate=3e-3)
    run["data"] |= {"prompt_field": "q", "completion_field": "a"}
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    assert result.losses[60] < 0.6 * result.losses[1]


def test_what_is_too_long_is_said(chats: Path, model: Path, tmp_path: Path) -> None:
    run = chat_run(chats, model, data__sequence_length=24, data__too_long="drop", train__steps=2)
    result = train(tmp_path, run)
    assert result.codes == [0], result.output
    assert "too long: left out" in result.output


# Special tokens


ROWS = [("tied", 2, "full", True), ("untied", 2, "ddp", False), ("untied", 1, "none", False)]
ROWS += [("untied", 2, "full", True), ("tied", 2, "ddp", False), ("tied", 1, "none", False)]


@pytest.mark.parametrize(("kind", "ranks", "sharding", "fused"), campaign(ROWS, always=2))
def test_rows_of_special_tokens_train_beside_frozen_ones(
    kind: str, ranks: int, sharding: str, fused: bool, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", kind)
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps({"text": f"<|call|> {word} <|done|> " * 6}) + "\n" for word in WORDS))
    run = lora_run(file, model, train__steps=4, parallel={"sharding": sharding}, train__fused_head=fused)
    run["data"]["special_tokens"] = ["<|call|>", "<|done|>"]
    result = train(tmp_path, run, ranks=ranks)
    assert set(result.codes) == {0}, result.output
    weights = weights_of(CheckpointFolder(result.folder.checkpoints).at(4).path)
    rows = {name: tensor for name, tensor in weights.items() if name.endswith("new_rows")}
    assert {tuple(tensor.shape) for tensor in rows.values()} == {(2, 64)}
    assert len(rows) == (1 if kind == "tied" else 2)
    assert not [name for name in weights if "embed" in name and not name.endswith("new_rows")]
    first = first_weights(tmp_path / "first", run, ranks)
    held = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    for row in first["model.embed_tokens.new_rows"]:
        assert torch.allclose(row, held.mean(0), atol=1e-6), "a new row begins as the mean of the others"
    for name, tensor in rows.items():
        assert not torch.allclose(tensor, first[name], atol=1e-4)
    reference = train(tmp_path / "one", {**run, "parallel": {}}, ranks=1) if ranks > 1 else result
    assert list(result.losses.values()) == pytest.approx(list(reference.losses.values()), rel=1e-5)


@pytest.mark.parametrize("kind", campaign(["tied", "untied"], always=1))
def test_rows_of_special_tokens_leave_with_the_adapter(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tests.trainer.test_lora_adapters import exported, logits_of

    model = save_model(tmp_path / "model", kind)
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps({"text": f"<|call|> {word} <|done|> " * 6}) + "\n" for word in WORDS))
    run = lora_run(file, model)
    run["data"]["special_tokens"] = ["<|call|>", "<|done|>"]
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    tokens = torch.tensor([[5, 1024, 7, 1025, 9, 1024]])
    merged = AutoModelForCausalLM.from_pretrained(exported(tmp_path, tmp_path / "merged", "--merge"))
    assert merged.config.vocab_size == 1026
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.resize_token_embeddings(1026)
    beside = peft.PeftModel.from_pretrained(plain, exported(tmp_path, tmp_path / "adapter"))
    assert torch.allclose(logits_of(beside, tokens)[..., :1024], logits_of(merged, tokens)[..., :1024], atol=1e-5)
    assert torch.allclose(logits_of(beside, tokens)[..., 1024:], logits_of(merged, tokens)[..., 1024:], atol=1e-5)
    again = lora_run(file, model, {"rank": None, "adapter": str(tmp_path / "adapter")})
    again["data"]["special_tokens"] = ["<|call|>", "<|done|>"]
    first = first_weights(tmp_path / "again", again, 2)
    last = weights_of(CheckpointFolder(result.folder.checkpoints).at(8).path)
    assert all(torch.equal(first[name], last[name]) for name in last)


def test_special_tokens_in_full_fine_tuning(chats: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "tied")
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps({"text": f"<|call|> {word} <|done|> " * 6}) + "\n" for word in WORDS))
    run = tiny_run(file, model={"path": str(model), "init": "pretrained"}, checkpoint={"export": True})
    run["data"]["special_tokens"] = ["<|call|>", "<|done|>"]
    result = train(tmp_path, run, ranks=3)
    assert result.codes == [0, 0, 0], result.output
    loaded = AutoModelForCausalLM.from_pretrained(result.folder.export)
    assert loaded.get_input_embeddings().weight.shape == (SHAPE["vocab_size"] + 2, 64)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(result.folder.export).encode("<|done|>")[-1] == 1025


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "role": ({}, '{"messages": [{"role": "bot", "content": "x"}]}', "has the role 'bot'"),
    "empty answer": ({}, '{"messages": [{"role": "assistant", "content": ""}]}', "is empty"),
    "text": ({}, '{"text": "x"}', "no field 'messages'"),
    "template": ({"tokenizer": "TOKENIZER"}, "", "has no chat template"),
    "stream": ({"source": "hf:acme/chats"}, "", "cannot be read from the stream"),
    "empty completion": ({"format": "instruction"}, '{"prompt": "x", "completion": " "}', "is empty"),
    "no completion": ({"format": "instruction"}, '{"prompt": "x"}', "no field 'completion'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, chats: Path, model: Path, tmp_path: Path) -> None:
    changes, line, said = BAD[case]
    file = tmp_path / "bad.jsonl"
    file.write_text(chats.read_text() + line + "\n" if line else chats.read_text())
    if case == "empty completion" or case == "no completion":
        file.write_text('{"prompt": "x", "completion": "y"}\n' + line + "\n")
    run = chat_run(file, model)
    tokenizer(None).save(tmp_path / "no-template")
    run["data"] |= {key: value.replace("TOKENIZER", str(tmp_path / "no-template")) for key, value in changes.items()}
    assert_refused(train(tmp_path, run, ranks=2), said)
