"""Preference tuning: the loss is TRL's, step by step; pairs are packed whole; a kill changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.conftest import WORDS, tiny_run
from tests.trainer.fine_tuning import save_model
from tests.trainer.harness import Result, resume, train
from windlass.data.tokenizers.chat import TRAINED, encoder
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import UserError
from windlass.plan import check, resolve
from windlass.spec import parse_run
from windlass.spec.data import DataSection

BETA, RATE, STEPS = 0.3, 1e-3, 5
# Losses and norms of the gradient before clipping, of TRL 1.16.0 (DPOTrainer, fp32, this model and these pairs);
# `test_trl_computes_what_was_recorded` computes them again where TRL is installed.
RECORDED = {
    "losses": [0.6931471824645996, 0.222708597779274, 0.08564508706331253, 0.03766299784183502, 0.01850050315260887],
    "norms": [5.014896392822266, 1.589161992073059, 0.6279234290122986, 0.32576024532318115, 0.1750430017709732],
}


def pairs() -> list[dict[str, str]]:
    draw = random.Random(11)
    return [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(2, 6))),
            "chosen": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 5))),
            "rejected": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 5))),
        }
        for _ in range(6)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs()))
    return path


def dpo_run(source: Path, model: Path, *, length: int, rows: int, **changes: Any) -> dict[str, Any]:
    run = tiny_run(source, model={"path": str(model), "init": "pretrained"})
    run["data"] |= {"format": "preference", "sequence_length": length, "shuffle": False}
    run["train"] |= {"objective": "dpo", "dpo_beta": BETA, "steps": STEPS, "global_batch": rows, "learning_rate": RATE}
    run["train"] |= {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "log_every": 1, **changes}
    return run


def numbers(result: Result) -> dict[str, list[float]]:
    return {"losses": list(result.losses.values()), "norms": list(result.grad_norms.values())}


def trl_numbers(folder: Path, model: Path) -> dict[str, list[float]]:
    trl = pytest.importorskip("trl", reason="pip install trl: this compares with it itself")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = trl.DPOConfig(
        output_dir=str(folder), beta=BETA, learning_rate=RATE, max_steps=STEPS, per_device_train_batch_size=6,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, logging_steps=1,
        use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=options,
        train_dataset=Dataset.from_list(pairs()),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    logged = [record for record in trainer.state.log_history if "loss" in record]
    return {"losses": [one["loss"] for one in logged], "norms": [one["grad_norm"] for one in logged]}


@pytest.mark.campaign_only
@pytest.mark.campaign
def test_trl_computes_what_was_recorded(tmp_path: Path, model: Path) -> None:
    computed = trl_numbers(tmp_path, model)
    for name, values in RECORDED.items():
        assert computed[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.train
@pytest.mark.parametrize(("length", "rows", "ranks"), [(256, 1, 1), (64, 4, 2)])
def test_every_step_is_trls(length: int, rows: int, ranks: int, source: Path, model: Path, tmp_path: Path) -> None:
    """All pairs in one row, and in four on two ranks: neither packing nor sharding changes a number."""
    result = train(tmp_path, dpo_run(source, model, length=length, rows=rows), ranks=ranks)
    assert result.codes == [0] * ranks, result.output
    for name, values in RECORDED.items():
        assert numbers(result)[name] == pytest.approx(values, rel=2e-5)


@pytest.mark.train
def test_an_adapter_switched_off_is_the_reference_and_a_kill_changes_nothing(
    source: Path, model: Path, tmp_path: Path
) -> None:
    run = dpo_run(source, model, length=64, rows=4, validate_every=5)
    run["model"]["lora"] = {"rank": 4, "dropout": 0.1}
    run["data"]["validation_source"] = str(source)
    run["checkpoint"] = {"every": 2}
    whole = train(tmp_path / "whole", run, ranks=2)
    assert whole.codes == [0, 0], whole.output
    assert whole.losses[1] == pytest.approx(np.log(2), abs=1e-6)  # matrices B begin as zeros: both models are one
    assert whole.losses[STEPS] < 0.6
    measured = whole.records("validation")[-1]
    assert measured["accuracy"] == 1.0  # of the pairs, all are ranked as they should be
    assert 0 < measured["loss"] < 0.6

    killed = train(tmp_path / "killed", run, ranks=2, faults="kill:rank=0,step=4")
    assert -9 in killed.codes
    assert numbers(resume(tmp_path / "killed", run, ranks=2)) == numbers(whole)


def test_margins_are_sums_over_pairs() -> None:
    from windlass.trainer.step import dpo_losses, pair_margins

    values = torch.tensor([[0.0, -1.0, -2.0, 0.0, -4.0, 0.0], [0.0, -1.0, 0.0, -2.0, 0.0, -8.0]])
    labels = torch.where(values == 0, -100, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 0, 1]])  # the last document has no pair: padding
    margins, exist = pair_margins(values, labels, positions)
    assert exist.tolist() == [[True, False, False], [True, False, False]]
    assert margins[exist].tolist() == [-3.0 - -4.0, -1.0 - -2.0]
    assert dpo_losses(margins[exist], 0.5).tolist() == pytest.approx([np.log(1 + np.exp(-0.5))] * 2)


def test_pairs_are_one_example_whose_halves_can_be_told_apart() -> None:
    from windlass.data.sequences.sequences import Sequence
    from windlass.trainer.batches import with_answers_apart

    tokenizer = encoder(load_tokenizer("tiny"), DataSection(format="preference"))
    first, second = {"prompt": "so", "completion": " it is"}, {"prompt": "so", "completion": " not"}
    (ids,) = tokenizer.encode_documents([json.dumps({"chosen": first, "rejected": second})])
    eos = tokenizer.require_eos()
    tokens = np.array(ids, dtype=np.int64)
    trained = (tokens & TRAINED).astype(bool)
    boundary = 1 + int(np.flatnonzero(tokens & ~TRAINED == eos)[0])
    padded = np.concatenate([tokens & ~TRAINED, [0, 0]])
    row = Sequence("row:0", padded, np.array([0, len(ids)]), np.concatenate([trained, [False, False]]))
    assert with_answers_apart(row).document_starts.tolist() == [0, boundary, len(ids)]
    assert not trained[0]
    assert not trained[boundary]
    assert trained[boundary - 1]
    assert trained[-1]

    chat = Sequence("row:1", padded[:boundary], np.array([0]), trained[:boundary])
    with pytest.raises(UserError, match="holds no pairs"):
        with_answers_apart(chat)


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("data", {"format": "text"}, "data.format=preference"),
        ("train", {"objective": "next_token"}, "train.objective=dpo"),
        ("model", {"init": "random"}, "model.init=pretrained"),
        ("data", {"document_mask": False}, "document_mask"),
        ("train", {"fused_head": True}, "computes its own loss"),
        ("checkpoint", {"branch_from": "tuned@20"}, "model.path=runs/tuned/export"),
    ],
)
def test_what_does_not_go_together_is_refused(source: Path, model: Path, section, changes, words) -> None:
    run = dpo_run(source, model, length=64, rows=4)
    run.setdefault(section, {}).update(changes)
    with pytest.raises(UserError) as told:
        check(resolve(parse_run(run)), 1)
    assert words in str(told.value)


def test_records_without_an_answer_are_named() -> None:
    from windlass.data.sources.records import example_text

    field = "@preference:prompt:chosen:rejected"
    said = [{"role": "assistant", "content": "yes"}]
    record = {"prompt": "so?", "chosen": said, "rejected": [{"role": "assistant", "content": "no"}]}
    messages = json.loads(example_text(record, field, "here"))["chosen"]["messages"]
    assert messages == [{"role": "user", "content": "so?"}, *said]
    for bad, words in (
        ({"prompt": "so?", "chosen": "yes"}, "no field 'rejected'"),
        ({"chosen": "yes", "rejected": "no"}, "the prompt 'prompt' is none"),
        ({"prompt": "so?", "chosen": " ", "rejected": "no"}, "is empty"),
        ({"chosen": said, "rejected": said}, "to something"),
    ):
        with pytest.raises(UserError) as told:
            example_text(bad, field, "here")
        assert words in str(told.value)
