"""Small data and run files for training tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.harness import Result, train

TEXT = (
    "the quick brown fox jumps over lazy dogs while many ships sail into harbours of gold and silver under pale moons "
    "and nobody counts how often a windlass turns before its chain comes up from the dark green water"
)
WORDS = TEXT.split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred short documents."""
    draw = random.Random(7)
    path = tmp_path_factory.mktemp("corpus") / "toy.jsonl"
    with path.open("w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 80)))}) + "\n")
    return path


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenized data of tests stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDLASS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """The result of a run nobody interfered with; trained once per session, whoever asks."""
    known: dict[tuple[str, int], Result] = {}

    def find(run: dict[str, Any], ranks: int = 2) -> Result:
        key = (json.dumps(run, sort_keys=True), ranks)
        if key not in known:
            known[key] = train(tmp_path_factory.mktemp("undisturbed"), run, ranks=ranks)
            assert known[key].codes == [0] * ranks, known[key].output
        return known[key]

    return find


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text().splitlines()]


@pytest.fixture(scope="session")
def sources(corpus: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The data section of a run for every kind of source, over much the same text."""
    from windlass.data.build.tokenizing import tokenize
    from windlass.data.sources.source import source_named
    from windlass.data.tokenizers.tokenizer import load_tokenizer

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = tmp_path_factory.mktemp("sources")
    tokenize([source_named(str(corpus))], root / "shards", load_tokenizer("tiny"), workers=1)
    (root / "all.txt").write_text("\n\n".join(texts))
    parquet.write_table(pyarrow.table({"text": texts}), root / "all.parquet")
    for part in range(3):
        with (root / f"part-{part}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[part::3])
    return {
        "shards": {"source": str(root / "shards")},
        "jsonl": {"source": str(corpus)},
        "text": {"source": str(root / "all.txt")},
        "parquet": {"source": str(root / "all.parquet")},
        "austen": {"source": "corpus:austen"},
        "stream": {
            "source": "hf:json",
            "files": [str(root / f"part-{part}.jsonl") for part in range(3)],
            "shuffle_window": 3,  # so that blocks end within a run
        },
    }


def tiny_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    """A run of a tiny Llama in fp32; `changes` are dotted keys with `__` for the dot."""
    run: dict[str, Any] = {
        "model": {
            "preset": "llama3.2-tiny",
            "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
        },
        "data": {"source": str(corpus), "sequence_length": 32},
        "train": {"steps": 8, "global_batch": 8, "precision": "fp32", "warmup_steps": 2, "learning_rate": 1e-3},
        "checkpoint": {"every": 4},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        if leaf:
            run.setdefault(section, {})[leaf] = value
        else:
            run[section] = value
    return run
