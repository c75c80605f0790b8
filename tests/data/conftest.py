"""Text to read, and a cache of its own for every test."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windlass.data.checks import check_data
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import ExitCode, UserError
from windlass.spec import Run, parse_run

WORDS = [
    "the",
    "of",
    "and",
    "was",
    "I",
    "that",
    "had",
    "she",
    "Elizabeth,",
    "naïve",
    "—",
    "1813",
    "«été»",
    "漢字",
    "on",
]


def texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    choose = random.Random(seed)
    return [f"{seed}/{i} " + " ".join(choose.choices(WORDS, k=choose.randrange(1, longest))) for i in range(count)]


def json_lines(some: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(some)).encode()


def refusal(source: Path | str, *, thorough: bool = False, **data: Any) -> str:
    """What is said of a run's data that cannot be what it says."""
    with pytest.raises(UserError) as caught:
        check_data(run_on(str(source), **data), thorough=thorough)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return str(caught.value)


def run_on(source: str, *, seed: int = 0, steps: int = 1, **data: Any) -> Run:
    values = {"source": source, "sequence_length": 16, **data}
    return parse_run(
        {"name": "test", "model": {"preset": "any"}, "data": values, "train": {"seed": seed, "steps": steps}}
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return load_tokenizer("tiny")


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[..., list[Path]]:
    """Write JSONL files with the given numbers of documents."""

    def write(*counts: int, compressed: bool = False) -> list[Path]:
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        paths = []
        for number, count in enumerate(counts):
            path = folder / f"part-{number:03d}.jsonl{'.gz' * compressed}"
            plain = json_lines(texts(count, seed=number))
            path.write_bytes(gzip.compress(plain) if compressed else plain)
            paths.append(path)
        return paths

    return write
