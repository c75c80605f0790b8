"""A fingerprint follows the content of the data: other words, order or tokenizer; not names, not times."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import json_lines, run_on, texts
from windlass.data import Sequences, open_sequences
from windlass.data.build.tokenizing import tokenize
from windlass.data.sequences import fingerprints as module
from windlass.data.sequences.fingerprints import data_fingerprint, file_digest, tokenizer_fingerprint
from windlass.data.sources.hub import DataFile
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.spec import Run, parse_run


def opened(run: Run) -> Sequences:
    found = open_sequences(run, "train", tokenizer=run.data.tokenizer or "tiny")
    assert found is not None
    return found


def prints(run: Run) -> tuple[Any, Any]:
    sequences = opened(run)
    return data_fingerprint(sequences, run.data), tokenizer_fingerprint(sequences)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "shards", "stream"])
def test_the_same_names_with_other_content(kind: str, tmp_path: Path, tiny: Tokenizer) -> None:
    path, shards = tmp_path / "novel.jsonl", tmp_path / "shards"

    def made_of(some: list[str]) -> tuple[Any, Any]:
        path.write_bytes(json_lines(some))
        if kind == "shards":
            tokenize([FileSource((path,), "text", "novel")], shards, tiny, workers=1, overwrite=True)
        source = {"file": str(path), "shards": str(shards), "stream": "hf:json"}[kind]
        return prints(run_on(source, **({"files": [str(path)]} if kind == "stream" else {})))

    some = texts(30)
    first = made_of(some)
    assert all(isinstance(one, str) for one in first)
    assert made_of(some[::-1]) != first  # the same documents, the same counts, another order
    changed = [" ".join(reversed(text.split())) for text in some]
    assert len(json_lines(changed)) == len(json_lines(some))
    assert made_of(changed) != first
    assert made_of(some) == first  # written again: another time, the same content


def test_another_tokenizer_of_the_same_name(tmp_path: Path, tiny: Tokenizer) -> None:
    folder = tmp_path / "tokenizer"
    tiny.save(folder)
    (tmp_path / "novel.jsonl").write_bytes(json_lines(texts(30)))
    run = run_on(str(tmp_path / "novel.jsonl"), tokenizer=str(folder))
    first = prints(run)
    definition = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    moved = [token for token, number in vocabulary.items() if number >= 300]
    numbers = [vocabulary[token] for token in moved]
    vocabulary |= dict(zip(moved, reversed(numbers), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert prints(run)[1] != first[1]


@pytest.mark.slow
def test_of_several_sources_the_one_that_changed_is_named(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(texts(20, seed=number)))
    sources = [{"source": str(tmp_path / f"{number}.jsonl")} for number in range(2)]
    values = {"sources": sources, "sequence_length": 16}
    run = parse_run({"name": "mixed", "model": {"preset": "any"}, "data": values})
    first, _ = prints(run)
    (tmp_path / "1.jsonl").write_bytes(json_lines(texts(20, seed=5)))
    second, _ = prints(run)
    assert [key for key in first if first[key] != second[key]] == [f"1 {tmp_path / '1.jsonl'}"]


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 100)
    hashed: list[Path] = []
    content = module.content_digest
    monkeypatch.setattr(module, "content_digest", lambda path, size: (hashed.append(path), content(path, size))[1])
    first = file_digest(path)
    assert file_digest(path) == first
    assert len(hashed) == 1
    os.utime(path, ns=(0, 0))
    assert file_digest(path) == first
    assert len(hashed) == 2
    shutil.copy(path, tmp_path / "b.jsonl")
    assert file_digest(tmp_path / "b.jsonl") == first
    # Large files count by blocks over all of their length.
    monkeypatch.setattr(module, "WHOLE_BYTES", 10)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    large = file_digest(path)
    assert large != first
    for place in (0, 99):
        data = bytearray(b"x" * 100)
        data[place] = 0
        path.write_bytes(data)
        assert file_digest(path) != large


def test_files_behind_urls_count_by_what_is_known_of_them() -> None:
    one, other = DataFile("https://host/a.jsonl", ("etag-1",)), DataFile("https://host/a.jsonl", ("etag-2",))
    assert module.files_fingerprint([one]) == module.files_fingerprint([one])
    assert module.files_fingerprint([one]) != module.files_fingerprint([other])
    assert module.files_fingerprint([one, DataFile("https://host/b.jsonl", ())]) is None  # nothing is known: no claim
