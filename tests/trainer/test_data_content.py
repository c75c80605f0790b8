"""A run goes on with the data and the tokenizer it was trained on; other content under the same names is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.data.tokenizer import load_tokenizer

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
    manifest = other.folder.checkpoints / "step-00000002" / "manifest.json"
    kept = json.loads(manifest.read_text())
    for key in ("data_fingerprint", "tokenizer_fingerprint"):
        assert kept["order"].pop(key)
    manifest.write_text(json.dumps(kept))
    resumed = train(tmp_path, longer, ranks=1, attempt=4)
    assert resumed.codes == [0], resumed.output
    assert max(resumed.losses) == 3
    assert "is not known: it has no" in other.folder.rank_log(0).read_text() + resumed.output
