"""Shards give back what was written, across their borders, and name the file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.data.shards.folder import TokenShards
from windlass.data.shards.writing import ShardWriter
from windlass.data.tokenizers.tokenizer import Tokenizer, dtype_for
from windlass.errors import UserError


def write(
    folder: Path, documents: list[list[int]], tokenizer: Tokenizer, shard_tokens: int, at_once: int
) -> TokenShards:
    folder.mkdir(exist_ok=True, parents=True)
    writer = ShardWriter(folder, tokenizer, shard_tokens=shard_tokens)
    for begin in range(0, len(documents), at_once):
        some = documents[begin : begin + at_once]
        writer.append(np.concatenate(some).astype(np.uint16), np.array([len(one) for one in some], dtype=np.uint64))
    writer.finish()
    return TokenShards.open(folder)


def examples(count: int = 20) -> list[list[int]]:
    return [[(7 * i + j) % 1024 for j in range(1 + i % 9)] for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 40),
    at_once=st.integers(1, 10),
    data=st.data(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: Tokenizer,
    lengths: list[int],
    shard_tokens: int,
    at_once: int,
    data: st.DataObject,
) -> None:
    documents = [[(31 * i + j) % 1024 for j in range(length)] for i, length in enumerate(lengths)]
    shards = write(tmp_path_factory.mktemp("shards"), documents, tiny, shard_tokens, at_once)
    stream = [token for document in documents for token in document]
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    assert shards.num_tokens == len(stream)
    assert shards.num_documents == len(documents)
    assert shards.document_lengths().tolist() == lengths
    assert all(shard.num_tokens >= shard_tokens for shard in shards.index.shards[:-1])
    begin = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(begin, len(stream)))
    tokens, starts = shards.read(begin, end)
    assert tokens.tolist() == stream[begin:end]
    assert starts.tolist() == [one - begin for one in begins if begin <= one < end]
    number = data.draw(st.integers(0, len(documents) - 1))
    assert shards.document(number).tolist() == documents[number]
    assert len(list(shards.verify())) == 3 * len(shards.index.shards)  # tokens, documents, blocks


def test_the_cut_does_not_depend_on_how_documents_arrive(tmp_path: Path, tiny: Tokenizer) -> None:
    one = write(tmp_path / "a", examples(), tiny, 11, 1)
    other = write(tmp_path / "b", examples(), tiny, 11, 7)
    assert one.index == other.index
    assert len(one.index.shards) > 3


def test_large_vocabularies_take_four_bytes() -> None:
    assert (dtype_for(65536), dtype_for(65537)) == ("uint16", "uint32")


def test_truncated_file_is_named(tmp_path: Path, tiny: Tokenizer) -> None:
    write(tmp_path, examples(), tiny, 20, 4)
    path = tmp_path / "shard-00002.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"shard-00002\.tokens is truncated"):
        TokenShards.open(tmp_path)


def test_missing_file_is_named(tmp_path: Path, tiny: Tokenizer) -> None:
    write(tmp_path, examples(), tiny, 20, 4)
    (tmp_path / "shard-00001.documents").unlink()
    with pytest.raises(UserError, match=r"shard-00001\.documents is missing"):
        TokenShards.open(tmp_path)


def test_flipped_bit_is_named(tmp_path: Path, tiny: Tokenizer) -> None:
    shards = write(tmp_path, examples(), tiny, 20, 4)
    path = tmp_path / "shard-00001.tokens"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-00001\.tokens is damaged"):
        list(shards.verify())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"dtype": "float8"}, "not an index"),
        ({"num_tokens": 1}, "contradicts itself"),
        ({"surprise": 1}, "not an index"),
    ],
)
def test_bad_index(tmp_path: Path, tiny: Tokenizer, change: dict[str, object], message: str) -> None:
    write(tmp_path, examples(), tiny, 20, 4)
    path = tmp_path / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        TokenShards.open(tmp_path)


def test_torn_index(tmp_path: Path, tiny: Tokenizer) -> None:
    write(tmp_path, examples(), tiny, 20, 4)
    path = tmp_path / "index.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(UserError, match="not an index"):
        TokenShards.open(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="holds no token shards"):
        TokenShards.open(tmp_path)
