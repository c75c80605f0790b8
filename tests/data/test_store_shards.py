"""Shards in an object store read exactly as on disk: through faults, within a bound of room, by several processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import json_lines, refusal, run_on, texts
from tests.forking import context
from tests.store.s3_server import Fault, FaultyS3
from windlass.common.files import cache_root
from windlass.data import open_sequences
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_data
from windlass.data.inspecting import inspect
from windlass.data.sequences.opening import tokenizer_of
from windlass.data.shards import block_cache, eviction, store_shards, writing
from windlass.data.shards.folder import TokenShards
from windlass.data.sources.source import FileSource, StoreShardSource, source_named
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError

pytestmark = pytest.mark.slow

URL = "s3://bucket/data/shards"
BLOCK = 1024
SHARD_TOKENS = 5000  # several blocks each, and more than five shards


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_bytes(json_lines(texts(400)))
    return path


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory, tiny: Tokenizer) -> Path:
    """Shards of many small blocks."""
    folder = tmp_path_factory.mktemp("made") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "BLOCK_BYTES", BLOCK)
        tokenize([FileSource((text,), "text", "text")], folder, tiny, workers=1, shard_tokens=SHARD_TOKENS)
    return folder


@pytest.fixture
def local(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writing, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(eviction, "AT_ONCE", 4)
    return made


@pytest.fixture
def remote(s3: FaultyS3, local: Path) -> FaultyS3:
    """The same shards in the store."""
    client = s3.client()
    for name, content in on_disk(local).items():
        client.put_object(Bucket="bucket", Key=f"data/shards/{name}", Body=content)
    s3.requests.clear()
    return s3


def in_store(s3: FaultyS3, prefix: str = "data/shards/") -> dict[str, bytes]:
    client = s3.client()
    return {
        key.removeprefix(prefix): client.get_object(Bucket="bucket", Key=key)["Body"].read()
        for key in s3.keys("bucket", prefix)
    }


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plain(batch: Any) -> list[Any]:
    return [(sequence.id, sequence.tokens.tolist(), sequence.document_starts.tolist()) for sequence in batch.sequences]


def batches(source: str, steps: int, **data: Any) -> list[Any]:
    found = open_sequences(run_on(source, **data), "train", tokenizer="tiny")
    assert found
    return [plain(found.batch(step, 8, list(range(8)))) for step in range(steps)]


def gets(s3: FaultyS3) -> list[str]:
    return [path for method, path in s3.requests if method == "GET" and path.endswith(".tokens")]


def test_what_is_written_to_the_store_is_what_is_written_here(
    s3: FaultyS3, text: Path, local: Path, tiny: Tokenizer
) -> None:
    tokenize([FileSource((text,), "text", "text")], URL, tiny, workers=1, shard_tokens=SHARD_TOKENS)
    assert in_store(s3) == on_disk(local)
    assert not (cache_root() / "work").exists() or not list((cache_root() / "work").iterdir())


def test_the_same_sequences_in_the_same_order(remote: FaultyS3, local: Path) -> None:
    steps = 3 * TokenShards.open(local).num_tokens // (8 * 16)  # about three epochs
    assert batches(URL, steps) == batches(str(local), steps)
    assert len(gets(remote)) == sum(
        -(-shard.num_tokens * 2 // BLOCK) for shard in TokenShards.open(local).index.shards
    )  # every block once, however often it is read


def test_through_faults(remote: FaultyS3, local: Path) -> None:
    kinds = ("500", "503", "SlowDown", "truncated", "dropped")
    remote.inject(*(Fault(kind, method="GET", path=r"\.tokens", times=4) for kind in kinds))
    assert batches(URL, 30) == batches(str(local), 30)
    assert [fault.met for fault in remote.faults] == [4] * 5


def test_writing_through_faults(s3: FaultyS3, text: Path, local: Path, tiny: Tokenizer) -> None:
    kinds = ("500", "503", "SlowDown", "dropped", "dropped-after")
    s3.inject(*(Fault(kind, method="PUT", path=f"shard-0000{n}", times=2) for n, kind in enumerate(kinds)))
    tokenize([FileSource((text,), "text", "text")], URL, tiny, workers=1, shard_tokens=SHARD_TOKENS)
    assert in_store(s3) == on_disk(local)
    assert [fault.met for fault in s3.faults] == [2] * 5


def test_within_its_bound(remote: FaultyS3, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were not used for long go; what is read stays right, block for block."""
    limit = 12 * BLOCK
    found = open_sequences(run_on(URL, cache_gib=limit / 2**30), "train", tokenizer="tiny")
    assert found
    expected = batches(str(local), 40)
    (folder,) = [path.parent for path in (cache_root() / "blocks").glob("*/state")]
    for step in range(40):
        assert plain(found.batch(step, 8, list(range(8)))) == expected[step]
        held = found.shards.remote.cache.blocks.num_bytes()  # type: ignore[attr-defined]
        assert held <= limit + block_cache.THREADS * BLOCK  # those on their way had room looked for at the same time
    assert len(gets(remote)) > 60
    assert folder.exists()


def read_in_a_process(url: str, steps: int, environment: dict[str, str], answer: Path, **data: Any) -> None:
    os.environ.update(environment)
    eviction.AT_ONCE = 4
    answer.write_text(json.dumps(batches(url, steps, **data)))


def started_reader(url: str, steps: int, answer: Path, **data: Any) -> Any:
    reader = context.Process(target=read_in_a_process, args=(url, steps, dict(os.environ), answer), kwargs=data)
    reader.start()
    return reader


@pytest.mark.parametrize("limit", [12 * BLOCK, 1 << 30])
def test_processes_share_it(remote: FaultyS3, local: Path, limit: int, tmp_path: Path) -> None:
    """Ranks of a node, all reading everything: with room every block is fetched once; without, all stay right."""
    expected = json.loads(json.dumps(batches(str(local), 20)))
    answers = [tmp_path / f"{number}.json" for number in range(3)]
    readers = [started_reader(URL, 20, answer, cache_gib=limit / 2**30) for answer in answers]
    for reader, answer in zip(readers, answers, strict=True):
        reader.join(120)
        assert reader.exitcode == 0
        assert json.loads(answer.read_text()) == expected
    if limit == 1 << 30:
        assert max(np.unique(ranges(remote), return_counts=True)[1]) == 1


def ranges(s3: FaultyS3) -> list[str]:
    """File and range of every block that was fetched."""
    asked = [
        (path, headers.get("range", ""))
        for (_, path), (_, headers) in zip(s3.requests, s3.seen[-len(s3.requests) :], strict=True)
    ]
    return [f"{path} {part}" for path, part in asked if path.endswith(".tokens") and part]


def test_after_a_boot_blocks_are_compared_and_not_fetched(
    remote: FaultyS3, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = TokenShards.open(local).num_tokens // (8 * 16) + 1  # so that nothing is still on its way
    expected = batches(URL, epoch)
    remote.requests.clear()
    monkeypatch.setattr("windlass.data.shards.blocks.boot_id", lambda: b"another boot")
    (path,) = (cache_root() / "blocks").glob("*/shard-00000.tokens")
    with path.open("r+b") as file:  # one that never reached the disk
        file.write(bytes(BLOCK))
    assert batches(URL, epoch) == expected
    assert len(gets(remote)) == 1


def test_folders_nobody_reads_any_more_go_first(
    remote: FaultyS3, text: Path, local: Path, tiny: Tokenizer, tmp_path: Path
) -> None:
    batches(URL, 20)
    (old,) = (cache_root() / "blocks").glob("*/state")
    other = "s3://bucket/other"
    tokenize([FileSource((text,), "text", "text")], other, tiny, workers=1, shard_tokens=2 * SHARD_TOKENS)
    reader = started_reader(other, 20, tmp_path / "read")
    reader.join(120)  # read by a process that has ended
    assert reader.exitcode == 0
    (abandoned,) = [path.parent for path in (cache_root() / "blocks").glob("*/state") if path != old]
    found = open_sequences(run_on(URL, cache_gib=12 * BLOCK / 2**30), "train", tokenizer="tiny")
    assert found
    for step in range(20):
        found.batch(step, 8, list(range(8)))
    found.shards.remote.cache._evictor.make_space()  # type: ignore[attr-defined]
    assert not abandoned.exists()


def test_damage_is_named(remote: FaultyS3, local: Path) -> None:
    client = remote.client()
    key = "data/shards/shard-00001.tokens"
    good = client.get_object(Bucket="bucket", Key=key)["Body"].read()
    client.put_object(Bucket="bucket", Key=key, Body=good[: BLOCK + 188] + b"\xff\xff" + good[BLOCK + 190 :])
    with pytest.raises(UserError, match=r"shard-00001\.tokens is damaged") as caught:
        batches(URL, 40)
    assert f"bytes {BLOCK:,} to {2 * BLOCK:,}" in str(caught.value)
    client.put_object(Bucket="bucket", Key=key, Body=good[:-2])
    with pytest.raises(UserError, match=r"shard-00001\.tokens is truncated"):
        check_data(run_on(URL))
    client.delete_object(Bucket="bucket", Key=key)
    with pytest.raises(UserError, match=r"shard-00001\.tokens is missing"):
        check_data(run_on(URL))


def test_mistakes(remote: FaultyS3, local: Path, tmp_path: Path) -> None:
    assert "there is nothing at s3://bucket/data/shrads" in refusal("s3://bucket/data/shrads")
    assert "folders in s3://bucket/data: shards" in refusal("s3://bucket/data/shrads")
    assert "no-such-bucket" in refusal("s3://no-such-bucket/x")
    assert "names no bucket" in refusal("s3://")
    assert "cannot be read" in refusal("https://host/x.jsonl")
    assert "too small to read ahead" in refusal(URL, cache_gib=1e-9)
    index = json.loads((local / "index.json").read_text())
    remote.client().put_object(
        Bucket="bucket", Key="data/shards/index.json", Body=json.dumps({**index, "block_bytes": 0}).encode()
    )
    assert "made by an older windlass" in refusal(URL)
    remote.client().put_object(Bucket="bucket", Key="data/shards/index.json", Body=b"{}")
    assert "not an index of token shards" in refusal(URL)


def test_the_store_goes_away_while_it_is_read(remote: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.store import StoreOptions

    impatient = StoreOptions(patience_s=0.5, first_delay_s=0.05)
    monkeypatch.setattr(store_shards, "StoreOptions", lambda **_: impatient)
    found = open_sequences(run_on(URL), "train", tokenizer="tiny")
    assert found
    remote.inject(Fault("503", times=100_000))
    with pytest.raises(UserError, match="s3://bucket/data/shards"):
        found.batch(0, 8, list(range(8)))


def test_it_brings_its_tokenizer_and_can_be_inspected(remote: FaultyS3, local: Path, tiny: Tokenizer) -> None:
    run = run_on(URL, tokenizer="tiny")
    check_data(run)
    assert tokenizer_of(run.data).fingerprint == tiny.fingerprint
    here, there = inspect(str(local), samples=2, data=run.data), inspect(URL, samples=2, data=run.data)
    assert (here.num_documents, here.num_tokens, here.lengths, here.samples) == (
        there.num_documents,
        there.num_tokens,
        there.lengths,
        there.samples,
    )


def test_what_is_there_is_kept_unless_asked(remote: FaultyS3, text: Path, tiny: Tokenizer) -> None:
    sources = [FileSource((text,), "text", "text")]
    with pytest.raises(UserError, match="holds token shards already"):
        tokenize(sources, URL, tiny, workers=1)
    with pytest.raises(UserError, match="is not empty"):
        tokenize(sources, "s3://bucket/data", tiny, workers=1)
    tokenize(sources, URL, tiny, workers=1, limit=3, overwrite=True)
    assert source_named(URL) == StoreShardSource(URL, "shards")
    assert store_shards.open_store_shards(StoreShardSource(URL, "shards")).num_documents == 3
    assert len([name for name in in_store(remote) if name.startswith("shard-")]) == 3
