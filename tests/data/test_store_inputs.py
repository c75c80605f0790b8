"""Text in an object store is read like text here: every kind of file, by range, through faults."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.conftest import json_lines, refusal, run_on, texts
from tests.store.s3_server import Fault, FaultyS3
from windlass.data import open_sequences
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_data
from windlass.data.shards.folder import TokenShards
from windlass.data.sources import files as inputs
from windlass.data.sources import reading
from windlass.data.sources.source import FileSource, source_named
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture
def kinds(s3: FaultyS3, tmp_path: Path) -> FaultyS3:
    """A folder with every kind of text file, here and in the store."""
    folder = tmp_path / "kinds"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(json_lines(texts(300, 1)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts(50, 2))))
    (folder / "c.txt").write_text("one\n\ndocument\n")
    table = pyarrow.table({"text": texts(100, 3), "n": list(range(100))})
    pyarrow.parquet.write_table(table, folder / "deep" / "e.parquet", row_group_size=16)
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"kinds/{path.relative_to(folder).as_posix()}"
            s3.client().put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    return s3


def made(source: str, out: Path, tiny: Tokenizer) -> TokenShards:
    found = source_named(source)
    assert isinstance(found, FileSource)
    tokenize([found], out, tiny, workers=1, shard_tokens=3000)
    return TokenShards.open(out)


def test_the_same_shards_as_from_files_here(
    kinds: FaultyS3, tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "UNIT_BYTES", 5000)
    monkeypatch.setattr(inputs, "READ_AHEAD", 4000)  # many requests
    faults = ("500", "SlowDown", "truncated", "dropped")
    kinds.inject(*(Fault(kind, method="GET", path="/kinds/", times=2) for kind in faults))
    there = made("s3://bucket/kinds", tmp_path / "there", tiny)
    assert there.index == made(str(tmp_path / "kinds"), tmp_path / "here", tiny).index
    assert sum(fault.met for fault in kinds.faults) == 8
    one = made("s3://bucket/kinds/*.jsonl", tmp_path / "some", tiny)
    assert one.num_documents == 300


def test_a_run_on_text_in_a_store(kinds: FaultyS3, tmp_path: Path) -> None:
    def read(source: str) -> list[Any]:
        found = open_sequences(run_on(source), "train", tokenizer="tiny")
        assert found
        return [sequence.tokens.tolist() for sequence in found.batch(0, 8, list(range(8))).sequences]

    check_data(run_on("s3://bucket/kinds/a.jsonl"))
    assert read("s3://bucket/kinds/a.jsonl") == read(str(tmp_path / "kinds" / "a.jsonl"))


def test_mistakes(kinds: FaultyS3) -> None:
    assert "a.jsonl:1 has no field 'body'" in refusal("s3://bucket/kinds/a.jsonl", text_field="body")
    assert "there is nothing at s3://bucket/kinds/*.csv" in refusal("s3://bucket/kinds/*.csv")
    kinds.client().put_object(Bucket="bucket", Key="other/model.bin", Body=b"x")
    assert "holds neither token shards nor text files" in refusal("s3://bucket/other")
    kinds.client().put_object(Bucket="bucket", Key="other/empty.jsonl", Body=b"")
    assert "empty.jsonl is empty" in refusal("s3://bucket/other/empty.jsonl")


def test_a_file_that_changes_while_it_is_read(kinds: FaultyS3, tmp_path: Path, tiny: Tokenizer) -> None:
    found = source_named("s3://bucket/kinds/a.jsonl")
    assert isinstance(found, FileSource)
    kinds.client().put_object(Bucket="bucket", Key="kinds/a.jsonl", Body=json_lines(texts(300, 8)))
    with pytest.raises(UserError, match="cannot be read"):
        tokenize([found], tmp_path / "out", tiny, workers=1)
