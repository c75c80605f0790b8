"""Streams over HTTP and from a Hub, with connections that drop and servers that are busy."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import json_lines, run_on, texts
from tests.data.servers import FileHandler, HubHandler, Served, serving
from tests.data.test_stream import GLOBAL_BATCH, Readers, Texts, plain, whole
from windlass.data import Sequences, open_sequences
from windlass.data.sources import hub
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError

COUNTS = (40, 25, 60)
STEPS = 10
CARD = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/c4-train.*.json.gz"}
  - {split: validation, path: "en/c4-validation.*.json.gz"}
- config_name: realnewslike
  data_files: "realnewslike/*.json.gz"
---
# Colossal
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_DELAY_S", 0.01)


def compressed(count: int, seed: int) -> bytes:
    return gzip.compress(json_lines(texts(count, seed)), mtime=0)


@pytest.fixture
def server() -> Iterator[Served]:
    files = {f"part-{i}.jsonl.gz": compressed(count, i) for i, count in enumerate(COUNTS)}
    with serving(FileHandler, files) as served:
        yield served


def opened(server: Served, **data: Any) -> Sequences:
    run = run_on("hf:json", files=[f"{server.url}/{name}" for name in server.files], **{"shuffle_window": 5, **data})
    found = open_sequences(run, "train", tokenizer="tiny")
    assert found
    return found


def expected(tiny: Tokenizer) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    return whole(Texts(*[texts(count, i) for i, count in enumerate(COUNTS)]), tiny, STEPS)


def test_http(server: Served, tiny: Tokenizer) -> None:
    windows, states = expected(tiny)
    readers = Readers(lambda: opened(server), 2)
    for step in range(STEPS):
        if step in (3, 4, 8):
            readers.restore(step, readers.state)
        assert readers.step(step) == windows[step]
        assert readers.state == states[step]


@pytest.mark.parametrize("fault", ["cut", "503"])
def test_http_with_faults(server: Served, tiny: Tokenizer, fault: str) -> None:
    windows, _ = expected(tiny)
    stream = opened(server)
    server.fault = lambda path, times: fault if times % 3 == 0 else None
    server.counts.clear()
    for step in range(STEPS):
        batch = stream.batch(step, GLOBAL_BATCH, list(range(GLOBAL_BATCH)))
        assert [plain(sequence) for sequence in batch.sequences] == windows[step]
    assert server.faults >= 3


def test_http_that_stays_down(server: Served, tiny: Tokenizer) -> None:
    stream = opened(server)
    server.fault = lambda path, times: "503"
    with pytest.raises(UserError, match=r"cannot be read .* after 7 tries") as caught:
        stream.batch(0, GLOBAL_BATCH, [0])
    assert "503" in str(caught.value)


def test_http_file_that_is_not_there(server: Served) -> None:
    server.files["gone.jsonl.gz"] = b""
    run = run_on("hf:json", files=[f"{server.url}/nothing.jsonl.gz"])
    with pytest.raises(UserError, match="cannot be"):
        open_sequences(run, "train", tokenizer="tiny")


RANKS = """
import json, sys
from tests.data.conftest import run_on
from tests.data.test_stream import plain
from windlass.data import open_sequences
from windlass.data.sources import hub
hub.FIRST_DELAY_S = 0.01
answers = []
for task in json.load(sys.stdin):
    run = run_on(task.get("source", "hf:allenai/c4"), **{"shuffle_window": 5, **task.get("data", {})})
    stream = open_sequences(run, task.get("part", "train"), tokenizer="tiny")
    stream.restore(task["first"], answers[task["after"]]["state"] if "after" in task else None)
    read = []
    for step in range(task["first"], task["first"] + task["steps"]):
        batch = stream.batch(step, 6, task.get("positions", list(range(6))))
        read.append([plain(one) for one in batch.sequences])
    answers.append({"read": read, "state": batch.state, "description": stream.description})
print(json.dumps(answers))
"""


def c4_files(counts: tuple[int, ...]) -> dict[str, bytes]:
    """The repository of C4 on the Hub, with so many documents in the files of its training split."""
    train = {f"en/c4-train.{i:05d}-of-00003.json.gz": compressed(count, i) for i, count in enumerate(counts)}
    others = {"en/c4-validation.00000-of-00001.json.gz": compressed(20, 9)}
    return {"README.md": CARD, **train, **others, "realnewslike/c4-train.json.gz": compressed(5, 8)}


@pytest.fixture
def c4() -> Iterator[Served]:
    with serving(HubHandler, c4_files(COUNTS)) as served:
        yield served


def read_c4(server: Served, home: Path, *tasks: dict[str, Any]) -> Any:
    """What ranks read, each from a stream opened anew, in a process for which the Hub is at the server."""
    environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", RANKS]
    given = json.dumps([{"first": 0, **task} for task in tasks])
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.slow
def test_c4_from_a_hub(c4: Served, tiny: Tokenizer, tmp_path: Path) -> None:
    """The default source, resumed twice, the second time by two ranks; and its validation split."""
    windows, states = as_json(expected(tiny))
    first, second, even, odd, validation = read_c4(
        c4,
        tmp_path,
        {"steps": 4},
        {"first": 4, "steps": 3, "after": 0},
        {"first": 7, "steps": 3, "after": 1, "positions": [0, 2, 4]},
        {"first": 7, "steps": 3, "after": 1, "positions": [1, 3, 5]},
        {"steps": 2, "part": "validation", "data": {"validation_source": "hf:allenai/c4"}},
    )
    assert first["description"] == "hf:allenai/c4 (en), split train, 3 files, sequences of 16"
    assert first["read"] == windows[:4]
    assert second["read"] == windows[4:7]
    assert even["read"] == [step[::2] for step in windows[7:]]
    assert odd["read"] == [step[1::2] for step in windows[7:]]
    assert {**even["state"]["lanes"], **odd["state"]["lanes"]} == states[-1]["lanes"]
    assert validation["read"] == as_json(whole(Texts(texts(20, 9)), tiny, 2, seed=None)[0])


@pytest.mark.slow
def test_c4_from_a_hub_with_faults(c4: Served, tiny: Tokenizer, tmp_path: Path) -> None:
    faults = {0: "cut", 2: "503", 3: "cut"}
    c4.fault = lambda path, times: faults.get(times) if path.startswith("en/") else None
    (found,) = read_c4(c4, tmp_path, {"steps": STEPS})
    assert found["read"] == as_json(expected(tiny)[0])
    assert c4.faults >= 4


@pytest.mark.slow
def test_a_dataset_the_hub_does_not_have(c4: Served, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="hf:here/nothing, split train cannot be opened"):
        read_c4(c4, tmp_path, {"source": "hf:here/nothing", "steps": 1})
