"""Shards come out the same whatever the workers, whole or not at all; bad input is named by file and line."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.conftest import json_lines, texts
from windlass.data.build.tokenizing import tokenize
from windlass.data.shards.folder import TokenShards
from windlass.data.sources import reading
from windlass.data.sources.source import FileSource, hub_source, local_source
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError


def made(source: str, out: Path, tiny: Tokenizer, workers: int = 1, **options: object) -> TokenShards:
    found = local_source(source, "text")
    assert isinstance(found, FileSource)
    tokenize([found], out, tiny, workers=workers, **options)  # type: ignore[arg-type]
    return TokenShards.open(out)


def contents(shards: TokenShards, tiny: Tokenizer) -> list[str]:
    return [tiny.decode(shards.document(i)[:-1]) for i in range(shards.num_documents)]


@pytest.fixture
def all_kinds(tmp_path: Path) -> Path:
    """A folder with every kind of text file."""
    folder = tmp_path / "kinds"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(json_lines(texts(300, 1)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts(50, 2))))
    (folder / "c.txt").write_text("one\n\ndocument\n")
    (folder / "deep" / "d.txt.gz").write_bytes(gzip.compress("naïve".encode()))
    table = pyarrow.table({"text": [*texts(100, 3), None, ""], "n": list(range(102))})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=16)
    (folder / "f.json.gz").write_bytes(gzip.compress(json_lines(["", *texts(5, 4)])))
    (folder / "notes.md").write_text("not read")
    return folder


def expected() -> list[str]:
    return [*texts(300, 1), *texts(50, 2), "one\n\ndocument\n", "naïve", *texts(100, 3), *texts(5, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_kind_of_file(
    all_kinds: Path, tmp_path: Path, tiny: Tokenizer, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNIT_BYTES", 700)  # many units, cut inside lines
    shards = made(str(all_kinds), tmp_path / "out", tiny, workers, shard_tokens=3000)
    assert contents(shards, tiny) == expected()
    assert len(shards.index.shards) > 3
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.slow
def test_the_same_bytes_from_any_number_of_workers(
    all_kinds: Path, tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNIT_BYTES", 500)
    one = made(str(all_kinds), tmp_path / "one", tiny, 1, shard_tokens=2000)
    monkeypatch.setattr(reading, "UNIT_BYTES", 900)
    three = made(str(all_kinds), tmp_path / "three", tiny, 3, shard_tokens=2000)
    assert one.index == three.index
    for name in sorted(os.listdir(tmp_path / "one")):
        if name.startswith("shard"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


@pytest.mark.parametrize("limit", [1, 7, 301])
def test_limit(all_kinds: Path, tmp_path: Path, tiny: Tokenizer, limit: int) -> None:
    shards = made(str(all_kinds), tmp_path / "out", tiny, 2, limit=limit)
    assert contents(shards, tiny) == expected()[:limit]


def test_datasets_source(write_files: Callable[..., list[Path]], tmp_path: Path, tiny: Tokenizer) -> None:
    files = tuple(str(path) for path in write_files(5, 0, 7))
    source = hub_source("hf:json", config=None, split="train", files=files, text_field="text")
    tokenize([source], tmp_path / "out", tiny, workers=1)
    assert contents(TokenShards.open(tmp_path / "out"), tiny) == [*texts(5, 0), *texts(7, 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "torn', r"bad\.jsonl:212 is not valid JSON"),
        (b'{"body": "x", "n": 1}', r"bad\.jsonl:212 has no field 'text'"),
        (b'{"text": 5}', r"bad\.jsonl:212: the field 'text' is no text"),
        (b'["x"]', r"bad\.jsonl:212 is list, not a JSON object"),
        (b'{"text": "\xff"}', r"bad\.jsonl:212 is not UTF-8 text"),
    ],
)
def test_bad_lines_are_named(
    tmp_path: Path, tiny: Tokenizer, line: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNIT_BYTES", 400 if b"body" in line else 1 << 20)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json_lines(texts(211)) + line + b"\n" + json_lines(texts(50)))
    with pytest.raises(UserError, match=message):
        made(str(path), tmp_path / "out", tiny)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_other_bad_files(tmp_path: Path, tiny: Tokenizer) -> None:
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": "x"}], indent=1))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json_lines(texts(400)))[:-200])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing more")
    for path, message in (
        (array, "one JSON object per line"),
        (latin, "not UTF-8"),
        (cut, "cannot be read"),
        (broken, "not a parquet file"),
    ):
        with pytest.raises(UserError, match=message):
            made(str(path), tmp_path / "out", tiny)


def test_nothing_in_it(tmp_path: Path, tiny: Tokenizer) -> None:
    path = tmp_path / "blank.jsonl"
    path.write_text('\n{"text": ""}\n{"text": null}\n')
    with pytest.raises(UserError, match="holds no text"):
        made(str(path), tmp_path / "out", tiny)


def test_what_is_there_is_kept_unless_asked(all_kinds: Path, tmp_path: Path, tiny: Tokenizer) -> None:
    out = tmp_path / "out"
    made(str(all_kinds / "c.txt"), out, tiny)
    with pytest.raises(UserError, match="exists"):
        made(str(all_kinds / "a.jsonl"), out, tiny)
    assert made(str(all_kinds / "a.jsonl"), out, tiny, overwrite=True).num_documents == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kinds", "out"]
    with pytest.raises(UserError, match="not overwritten"):
        made(str(all_kinds / "a.jsonl"), all_kinds, tiny, overwrite=True)


def test_kill_half_way_leaves_nothing(tmp_path: Path, tiny: Tokenizer) -> None:
    path = tmp_path / "much.jsonl"
    path.write_bytes(json_lines(texts(2000, longest=400)) * 20)
    code = (
        "import sys; from pathlib import Path\n"
        "from windlass.data.sources import reading; reading.UNIT_BYTES = 100_000\n"
        "from windlass.data.sources.source import local_source\n"
        "from windlass.data.tokenizers.tokenizer import load_tokenizer\n"
        "from windlass.data.build.tokenizing import tokenize\n"
        "def report(done, total): print(done, flush=True)\n"
        "tokenize([local_source(sys.argv[1], 'text')], Path(sys.argv[2]), load_tokenizer('tiny'), progress=report)\n"
    )
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", code, str(path), str(out)], stdout=subprocess.PIPE)
    assert process.stdout
    lines = iter(process.stdout)
    assert next(lines).strip() == b"0"
    assert int(next(lines)) > 0  # it is in the middle now
    children = children_of(process.pid)
    assert children
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    for child in children:
        wait_until_gone(child)
    small = tmp_path / "small.txt"
    small.write_text("text")
    made(str(small), out, tiny)
    assert not list(tmp_path.glob(".out*"))  # what the killed one had left is gone too


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pid: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, f"process {pid} was left behind"
        time.sleep(0.02)
