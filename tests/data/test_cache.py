"""Text is tokenized once per host, however many ranks ask, and again when it changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.conftest import json_lines, run_on, texts
from windlass.common.files import cache_root
from windlass.data import open_sequences

RANK = """
import sys
from tests.data.conftest import run_on
from windlass.data import open_sequences
calls = []
found = open_sequences(run_on(sys.argv[1]), "train", tokenizer="tiny", progress=lambda done, total: calls.append(done))
print(bool(calls), found.num_sequences)
"""


def entries() -> list[Path]:
    return [path for path in (cache_root() / "tokens").iterdir() if path.is_dir()]


def count(source: str, **data: object) -> int | None:
    found = open_sequences(run_on(source, **data), "train", tokenizer="tiny")
    return found and found.num_sequences


@pytest.mark.slow
def test_ranks_that_come_together_tokenize_once(write_files: Callable[..., list[Path]]) -> None:
    folder = str(write_files(500, 300)[0].parent)
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, folder], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert sorted(made for made, _ in answers) == ["False", "False", "False", "True"]
    assert len({number for _, number in answers}) == 1
    assert len(entries()) == 1


def test_a_changed_file_or_field_is_tokenized_again(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(json_lines(texts(30)))
    before = count(str(path))
    assert count(str(path)) == before
    assert len(entries()) == 1
    path.write_bytes(json_lines(texts(60)))
    assert count(str(path)) != before
    assert len(entries()) == 2


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_bytes(json_lines(texts(30)))
    before = count(str(path))
    (entries()[0] / "shard-00000.tokens").write_bytes(b"")
    assert count(str(path)) == before


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("WINDLASS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "windlass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "windlass"
