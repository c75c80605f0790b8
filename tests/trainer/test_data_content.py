"""A run goes on with the data and the tokenizer it was trained on; other content under the same names is refused."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from tests.trainer.test_data_order import alone_in_order, in_order, note_ids, read_by_ranks
from windlass.checkpoint import Manifest
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import parse_run

pytestmark = pytest.mark.train


def test_a_resume_with_other_content_is_refused(texts: list[str], tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "data.jsonl", tmp_path / "tokenizer"
    load_tokenizer("tiny").save(tokenizer)

    def write(some: list[str]) -> None:
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))

    write(texts)
    run = tiny_run(data, train__steps=2, data__tokenizer=str(tokenizer))
    assert train(tmp_path, run, ranks=1).codes == [0]
    longer = tiny_run(data, train__steps=3, data__tokenizer=str(tokenizer))
    # The same words and counts in another order.
    write([" ".join(reversed(text.split())) for text in reversed(texts)])
    other = train(tmp_path, longer, ranks=1, attempt=2)
    assert other.codes == [2], other.output
    assert "was made with other data" in other.output
    assert "data_fingerprint: " in other.output
    assert "the content of the files has changed" in other.output
    write(texts)
    # The same tokens with other numbers.
    definition = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    moved = [token for token, number in vocabulary.items() if number >= 300]
    numbers = [vocabulary[token] for token in moved]
    changed = {**definition, "model": {**definition["model"]}}
    changed["model"]["vocab"] = {**vocabulary, **dict(zip(moved, reversed(numbers), strict=True))}
    (tokenizer / "tokenizer.json").write_text(json.dumps(changed))
    other = train(tmp_path, longer, ranks=1, attempt=3)
    assert other.codes == [2], other.output
    assert "tokenizer_fingerprint: " in other.output
    (tokenizer / "tokenizer.json").write_text(json.dumps(definition))
    # A checkpoint of an earlier version does not say what its content was: it is gone on from, with a word.
    checkpoint = other.folder.checkpoints / "step-00000002"
    manifest = Manifest.parse((checkpoint / "manifest.json").read_text())
    order = {key: value for key, value in manifest.order.items() if not key.endswith("_fingerprint")}
    assert len(order) == len(manifest.order) - 2
    (checkpoint / "manifest.json").write_text(replace(manifest, order=order).to_json())
    resumed = train(tmp_path, longer, ranks=1, attempt=4)
    assert resumed.codes == [0], resumed.output
    assert max(resumed.losses) == 3
    assert "is not known: it has no" in other.folder.rank_log(0).read_text() + resumed.output


def test_ranks_agree_on_who_reads_which_file_of_a_stream(texts: list[str], tmp_path: Path) -> None:
    """Files of a few documents each, so that lanes come to their ends all the time, at different steps."""
    for number in range(7):
        some = texts[20 * number : 20 * number + 2 + 2 * number]
        (tmp_path / f"part-{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    run = tiny_run(Path("-"), train__steps=24, train__global_batch=5, train__validate_every=20)
    files = [str(path) for path in sorted(tmp_path.glob("part-*.jsonl"))]
    run["data"] = {"source": "hf:json", "files": files, "sequence_length": 32, "validation_source": files[0]}
    result = train(tmp_path, run, ranks=2, prelude=functools.partial(note_training_ids, tmp_path))
    assert result.codes == [0, 0], result.output
    read = read_by_ranks(tmp_path)
    order = [name for step in range(24) for name in in_order(read[step])]
    assert order == alone_in_order(resolve(parse_run(run)), 24)
    assert {name.split(":")[3] for name in order} >= {"0", "1"}  # into a second epoch


def note_training_ids(folder: Path, rank: int) -> None:
    from windlass.trainer.batches import Batches

    read = Batches.read
    note_ids(folder, rank)
    noted = Batches.read
    Batches.read = lambda self, step: noted(self, step) if self.global_batch == 5 else read(self, step)  # type: ignore[method-assign]


def test_a_model_with_code_of_its_own_is_refused_in_words(tmp_path: Path) -> None:
    from windlass.trainer.model.structure import model_config

    values = {"model_type": "strange", "auto_map": {"AutoConfig": "strange.StrangeConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "strange.py").write_text("raise SystemExit('this code was run')\n")
    run = parse_run({"name": "x", "model": {"path": str(tmp_path)}, "data": {"source": "corpus:austen"}})
    with pytest.raises(UserError, match="brings code of its own") as caught:
        model_config(run, folder=tmp_path)
    assert "model.trust_remote_code=true" in str(caught.value)
    assert "HF_TOKEN" not in str(caught.value)
