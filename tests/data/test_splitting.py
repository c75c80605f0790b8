"""Duplicates and the validation split: by the text of a document, in whatever order and with whatever workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import json_lines, texts
from windlass.data import open_sequences
from windlass.data.build.duplicates import SeenDigests
from windlass.data.build.tokenizing import tokenize
from windlass.data.shards.folder import TokenShards
from windlass.data.sources import reading
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40), max_size=6))
def test_a_set_of_digests_is_a_set(batches: list[list[tuple[int, int]]]) -> None:
    """Also for digests that want the same slot, come twice in a batch, or are zero."""
    seen, known = SeenDigests(), set[tuple[int, int]]()
    for batch in batches:
        expected = []
        for one in batch:
            expected.append(one not in known)
            known.add(one)
        # Multiples of the number of slots: all of them want the first one.
        digests = np.array([(low * 1024, high) for low, high in batch], dtype=np.uint64).reshape(-1, 2)
        assert seen.add(digests).tolist() == expected
    assert len(seen) == len(known)


def test_it_grows() -> None:
    draw = np.random.default_rng(0)
    digests = draw.integers(0, 2**63, size=(20_000, 2), dtype=np.uint64)
    seen = SeenDigests()
    for part in np.array_split(digests, 7):
        assert seen.add(part).all()
    assert not seen.add(digests[::3]).any()
    assert len(seen) == 20_000


def made(path: Path, out: Path, tiny: Tokenizer, **options: Any) -> TokenShards:
    tokenize([FileSource((path,), "text", "text")], out, tiny, shard_tokens=2000, **options)
    return TokenShards.open(out)


def contents(shards: TokenShards, tiny: Tokenizer) -> list[str]:
    return [tiny.decode(shards.document(i)[:-1]) for i in range(shards.num_documents)]


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    some = texts(200)
    path = tmp_path / "text.jsonl"
    path.write_bytes(json_lines([*some, *some[50:120], "new", *some[:10], "new"]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_equal_documents_stays(
    repeated: Path, tmp_path: Path, tiny: Tokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNIT_BYTES", 3000)
    shards = made(repeated, tmp_path / "out", tiny, workers=workers, dedup=True)
    assert contents(shards, tiny) == [*texts(200), "new"]
    assert shards.index.left_out == {"duplicates": 81}
    assert made(repeated, tmp_path / "all", tiny, workers=workers).num_documents == 282


@pytest.mark.slow
def test_the_validation_split_goes_by_the_text(repeated: Path, tmp_path: Path, tiny: Tokenizer) -> None:
    first = made(repeated, tmp_path / "one", tiny, workers=1, validation=0.2)
    kept, held = contents(first, tiny), contents(TokenShards.open(tmp_path / "one" / "validation"), tiny)
    assert not set(kept) & set(held)  # though some come twice
    assert len(kept) + len(held) == 282
    assert 0.1 < len(held) / 282 < 0.3
    turned = tmp_path / "turned.jsonl"
    turned.write_bytes(json_lines([*reversed(texts(200)), *texts(50, seed=7)]))
    made(turned, tmp_path / "two", tiny, workers=1, validation=0.2)
    again = set(contents(TokenShards.open(tmp_path / "two" / "validation"), tiny))
    assert again & set(texts(200)) == set(held) & set(texts(200))  # the same ones, whatever stands beside them
    smaller = made(repeated, tmp_path / "three", tiny, workers=1, validation=0.1)
    assert set(contents(smaller, tiny)) >= set(kept)


def test_it_is_what_a_run_validates_on(repeated: Path, tmp_path: Path, tiny: Tokenizer) -> None:
    from tests.data.conftest import run_on

    made(repeated, tmp_path / "out", tiny, workers=1, validation=0.2)
    run = run_on(str(tmp_path / "out"), validation_source=str(tmp_path / "out" / "validation"))
    validation = open_sequences(run, "validation", tokenizer="tiny")
    assert validation
    assert validation.num_sequences


def test_a_split_that_leaves_nothing(tmp_path: Path, tiny: Tokenizer) -> None:
    path = tmp_path / "one.txt"
    path.write_text("one document")
    with pytest.raises(UserError, match="leaves no document for"):
        made(path, tmp_path / "out", tiny, workers=1, validation=0.5)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["one.txt"]
