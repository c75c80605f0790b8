"""`windlass data fetch` as a user types it, from a server that speaks the Hub's protocol."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import texts
from tests.data.servers import COMMIT, HubHandler, Served, serving
from tests.data.test_store_shards import in_store
from tests.data.test_stream_remote import c4_files
from tests.store.s3_server import FaultyS3
from windlass.data.shards.folder import TokenShards

pytestmark = pytest.mark.slow

COUNTS = (300, 200, 400)


@pytest.fixture
def hub() -> Iterator[Served]:
    with serving(HubHandler, c4_files(COUNTS)) as served:
        yield served


def command(hub: Served, home: Path, *arguments: Any, **environment: str) -> tuple[list[str], dict[str, str]]:
    values = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return [sys.executable, "-m", "windlass.cli.main", "data", "fetch", *map(str, arguments)], {**os.environ, **values}


def fetch(hub: Served, home: Path, *arguments: Any, code: int = 0, **environment: str) -> Any:
    """What the command printed as JSON."""
    words, values = command(hub, home, *arguments, "--json", **environment)
    done = subprocess.run(words, env=values, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def expected(count: int) -> list[dict[str, Any]]:
    every = [text for i, count in enumerate(COUNTS) for text in enumerate(texts(count, i))]
    return [{"text": text, "id": i} for i, text in every[:count]]


def lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def test_samples_bytes_and_kinds_of_output(hub: Served, tmp_path: Path) -> None:
    made = fetch(hub, tmp_path, "allenai/c4", "--samples", 600, "-o", tmp_path / "out")
    assert (made["records"], made["parts"]) == (600, 1)
    assert lines((tmp_path / "out" / "part-00000.jsonl").read_bytes()) == expected(600)
    manifest = json.loads((tmp_path / "out" / "fetched.yaml").read_text())
    assert (manifest["dataset"], manifest["config"], manifest["revision"]) == ("allenai/c4", "en", COMMIT)
    made = fetch(hub, tmp_path, "allenai/c4", "--bytes", "10KB", "-o", tmp_path / "some.jsonl.gz", "--field", "text")
    found = lines(gzip.decompress((tmp_path / "some.jsonl.gz").read_bytes()))
    assert found == [{"text": one["text"]} for one in expected(len(found))]
    assert 9_000 < made["bytes"] <= 10_000
    made = fetch(hub, tmp_path, "allenai/c4", "--split", "validation", "-o", tmp_path / "v.jsonl")
    assert made["records"] == 20  # all there is
    made = fetch(hub, tmp_path, "allenai/c4", "--samples", 350, "--shards", "--workers", 1, "-o", tmp_path / "shards")
    shards = TokenShards.open(tmp_path / "shards")
    assert shards.num_documents == made["records"] == 350
    assert not list((Path(os.environ["WINDLASS_CACHE"]) / "fetched").iterdir())
    error = fetch(hub, tmp_path, "allenai/c4", "--samples", 1, "-o", tmp_path / "out", code=2)
    assert "exists" in error["error"]


def test_to_a_store(hub: Served, tmp_path: Path, s3: FaultyS3) -> None:
    fetch(hub, tmp_path, "allenai/c4", "--samples", 500, "-o", "s3://bucket/c4", **s3.environment)
    assert lines(in_store(s3, "c4/")["part-00000.jsonl"]) == expected(500)
    fetch(hub, tmp_path, "allenai/c4", "--samples", 9, "-o", "s3://bucket/one/c4.jsonl", **s3.environment)
    assert lines(in_store(s3, "one/")["c4.jsonl"]) == expected(9)
    error = fetch(hub, tmp_path, "allenai/c4", "--samples", 9, "-o", "s3://bucket/c4", code=2, **s3.environment)
    assert "is there already" in error["error"]


def test_a_busy_hub_is_waited_for(hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubHandler, "impatience", [1, 1])
    faults = {0: "503", 1: "cut", 3: "cut"}
    hub.fault = lambda path, times: faults.get(times) if path.startswith("en/") else None
    fetch(hub, tmp_path, "allenai/c4", "--samples", 900, "-o", tmp_path / "c4.jsonl")
    assert lines((tmp_path / "c4.jsonl").read_bytes()) == expected(900)
    assert hub.faults >= 3
    assert not HubHandler.impatience


def test_killed_while_the_hub_answers(hub: Served, tmp_path: Path) -> None:
    """SIGKILL at moments that the server sees, each further on; the same command then ends with the same bytes."""
    out = tmp_path / "out"
    words, values = command(hub, tmp_path, "allenai/c4", "--samples", 900, "-o", out)
    for file in (0, 1, 2):
        name = f"en/c4-train.{file:05d}-of-00003.json.gz"
        process = subprocess.Popen(words, env=values, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not any(name in request and request.startswith("GET") for request in hub.requests):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        hub.requests.clear()
        assert not out.exists()
    fetch(hub, tmp_path, "allenai/c4", "--samples", 900, "-o", out)
    assert lines((out / "part-00000.jsonl").read_bytes()) == expected(900)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_mistakes_are_one_message(hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, code: int = 2, **environment: str) -> str:
        words, values = command(hub, tmp_path, *arguments, "-o", tmp_path / "out", **environment)
        done = subprocess.run(words, env=values, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stderr.count("error:") == 1, done.stderr
        assert done.stderr.startswith("error:"), done.stderr
        assert [path.name for path in tmp_path.iterdir() if path.name != "hf"] == []
        return done.stderr

    assert "there is no dataset allenai/c5" in fails("allenai/c5", "--samples", 5)
    assert "Available: ['en', 'realnewslike']" in fails("allenai/c4", "--config", "eng", "--samples", 5)
    assert "Available splits: ['train', 'validation']" in fails("allenai/c4", "--split", "test", "--samples", 5)
    assert "has no field 'body'" in fails("allenai/c4", "--field", "body", "--samples", 5)
    assert "HF_HUB_OFFLINE" in fails("allenai/c4", "--samples", 5, HF_HUB_OFFLINE="1")
    assert "is not a size" in fails("allenai/c4", "--bytes", "much")
    assert "is not a count" in fails("allenai/c4", "--samples", "0")
    assert "--tokenizer is for --shards" in fails("allenai/c4", "--tokenizer", "tiny")
    assert "names no dataset" in fails("a/b/c")
    monkeypatch.setattr(HubHandler, "gated", "manual")
    assert "does not give the dataset allenai/c4 to you" in fails("allenai/c4", "--samples", 5)


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    """One message at the end, with what was tried."""
    gone = Served(url="http://127.0.0.1:9")
    words, values = command(gone, tmp_path, "allenai/c4", "--samples", 5, "-o", tmp_path / "out")
    quick = (
        "import windlass.common.hub as hub; hub.FIRST_DELAY_S = 0.01\n"
        "import sys; from windlass.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", quick, *words[3:]], env=values, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (1, 2)
    assert "cannot be fetched from the hub" in done.stderr
    assert not (tmp_path / "out").exists()
