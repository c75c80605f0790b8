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
