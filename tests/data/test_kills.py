"""kill -9 at any moment of a fetch or of tokenizing, as often as you like: the result is that of an undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.data.conftest import json_lines, texts
from tests.data.killing import killed_until_done, num_steps
from tests.data.test_store_shards import in_store
from tests.store.s3_server import Fault, FaultyS3

pytestmark = pytest.mark.slow


def fetch_lines(files: list[str], out: str, compress: bool, samples: int | None, num_bytes: int | None) -> None:
    from windlass.data.build.fetching import Wanted, fetch, fetch_destination
    from windlass.data.sources.source import hub_source

    source = hub_source("hf:json", config=None, split="train", files=tuple(files), text_field="text")
    fetch(source, fetch_destination(out), Wanted(samples, num_bytes, compress=compress, part_bytes=2000))


def tokenize_files(files: list[str], out: str, options: dict[str, Any]) -> None:
    from windlass.data.build import assembling
    from windlass.data.build.tokenizing import tokenize
    from windlass.data.shards import writing
    from windlass.data.sources import reading
    from windlass.data.sources.source import FileSource
    from windlass.data.tokenizers.tokenizer import load_tokenizer

    reading.UNIT_BYTES = 4000
    writing.BLOCK_BYTES = 512
    assembling.SAVE_SECONDS = 0.0
    source = FileSource(tuple(map(Path, files)), "text", "text")
    tokenize([source], out, load_tokenizer("tiny"), workers=1, shard_tokens=1500, **options)


def content(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Text in a few files, some of it twice."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, count in enumerate((60, 0, 45, 30)):
        some = texts(count, seed=number % 3)
        (folder / f"{number}.jsonl").write_bytes(json_lines(some + some[: count // 5]))
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("seeds", campaign([[3], [4, 5, 6]], always=1))
@pytest.mark.parametrize(
    ("name", "compress", "samples", "num_bytes"),
    campaign(
        [("folder", True, 120, None), ("lines.jsonl", False, None, 20_000), ("folder", False, None, None)], always=2
    ),
)
def test_fetch(
    files: list[str],
    tmp_path: Path,
    name: str,
    compress: bool,
    samples: int | None,
    num_bytes: int | None,
    seeds: list[int],
) -> None:
    work, options = tmp_path / "out", (compress, samples, num_bytes)
    work.mkdir()
    (tmp_path / "whole").mkdir()
    steps = num_steps(fetch_lines, (files, str(tmp_path / "whole" / name), *options), tmp_path / "whole")
    expected = content(tmp_path / "whole" / name)
    kills = 0
    for seed in seeds:
        out = work / str(seed) / name
        out.parent.mkdir()
        kills += killed_until_done(fetch_lines, (files, str(out), *options), out.parent, seed=seed, longest=steps).kills
        assert content(out) == expected, f"seed {seed}"
        assert [path.name for path in out.parent.iterdir()] == [name]  # nothing left beside it
    print(f"{kills} kills of {len(seeds)} fetches of {steps} steps")
    assert kills >= len(seeds)


@pytest.mark.parametrize("seeds", campaign([[0], [1, 2, 3, 4]], always=1))
@pytest.mark.parametrize(
    "options", campaign([{"dedup": True, "validation": 0.2}, {"dedup": True, "limit": 100}, {}], always=2)
)
def test_tokenize(files: list[str], tmp_path: Path, options: dict[str, Any], seeds: list[int]) -> None:
    (tmp_path / "whole").mkdir()
    steps = num_steps(tokenize_files, (files, str(tmp_path / "whole" / "out"), options), tmp_path / "whole")
    expected = content(tmp_path / "whole" / "out")
    assert ("validation/index.json" in expected) == ("validation" in options)
    kills = 0
    for seed in seeds:
        out = tmp_path / str(seed) / "out"
        out.parent.mkdir()
        arguments = (files, str(out), options)
        kills += killed_until_done(tokenize_files, arguments, out.parent, seed=seed, longest=steps).kills
        assert content(out) == expected, f"seed {seed}"
        assert [path.name for path in out.parent.iterdir()] == ["out"]
    print(f"{kills} kills of {len(seeds)} runs of {steps} steps")
    assert kills >= len(seeds)


@pytest.mark.parametrize("seeds", campaign([[1], [2, 3]], always=1))
@pytest.mark.parametrize("what", ["fetch", "tokenize"])
def test_straight_to_a_store(files: list[str], tmp_path: Path, what: str, s3: FaultyS3, seeds: list[int]) -> None:
    """Killed before, between and after requests, with requests that fail on top."""
    cache = Path(os.environ["WINDLASS_CACHE"])

    def work(url: str) -> tuple[Any, tuple[Any, ...]]:
        if what == "fetch":
            return fetch_lines, (files, url, False, None, None)
        return tokenize_files, (files, url, {"dedup": True, "validation": 0.2})

    steps = num_steps(*work("s3://bucket/whole"), cache)
    expected = in_store(s3, "whole/")
    kills = 0
    for seed in seeds:
        s3.inject(*(Fault(kind, path=f"/{seed}/", times=2) for kind in ("500", "SlowDown", "truncated", "dropped")))
        kills += killed_until_done(*work(f"s3://bucket/{seed}"), cache, seed=seed, longest=steps).kills
        assert in_store(s3, f"{seed}/") == expected, f"seed {seed}"
        assert not list((cache / "work").iterdir())
    print(f"{kills} kills of {len(seeds)} runs of {steps} steps")
    assert kills >= len(seeds)


def test_damaged_leftovers_are_not_believed(files: list[str], tmp_path: Path) -> None:
    """What a killed process left and something else then changed is made again."""
    from tests.data.killing import be_killed, context

    whole, out = tmp_path / "whole", tmp_path / "0" / "out"
    tokenize_files(files, str(whole), {})
    out.parent.mkdir()
    damaged = 0
    for step in (60, 90, 120):
        process = context.Process(
            target=be_killed,
            args=(tokenize_files, (files, str(out), {}), str(out.parent), step, dict(os.environ)),
        )
        process.start()
        process.join(60)
        for path in (out.parent / ".out.partial").rglob("*.tokens"):
            data = bytearray(path.read_bytes())
            if data:
                data[0] ^= 1
                path.write_bytes(data)
                damaged += 1
    assert damaged
    tokenize_files(files, str(out), {})
    assert content(out) == content(whole)
