"""Shards in an object store, read as if they were here: through a cache of blocks that this node's ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.common.cache import cache_root, name_digest
from windlass.common.files import sha256_of, write_atomically
from windlass.common.locks import locked
from windlass.data.shards.blocks import THREADS, BlockCache, CachedArray, RemoteFile
from windlass.data.shards.eviction import only_one
from windlass.data.shards.folder import DOCUMENT_DTYPE, Index, TokenShards, parse_index
from windlass.data.sources.source import INDEX_NAME, StoreShardSource
from windlass.data.tokenizers.tokenizer import SHARD_TOKENIZER, TOKENIZER_FILES
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.store import Store

CACHE_GIB = 200.0
TRIES = 3


@dataclass(frozen=True)
class RemoteShards:
    """The files behind shards in a store: tokens by the block, smaller files whole."""

    store: Store
    folder: Path
    sha256: dict[str, str]
    cache: BlockCache = field(repr=False)

    def tokens(self, shard: int, dtype: np.dtype[Any]) -> CachedArray:
        return self.cache.array(shard, dtype)

    def whole(self, name: str) -> Path:
        return fetched(self.store, name, self.folder / name, self.sha256[name])


def open_store_shards(source: StoreShardSource, cache_gib: float | None = None) -> TokenShards:
    """The shards at a URL; nothing but what describes them is fetched before it is read."""
    from windlass.store import StoreOptions, open_store

    store = open_store(source.url, StoreOptions(parallel=THREADS))
    try:
        text = store.read(INDEX_NAME).decode("utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{source.url} holds no token shards",
            evidence=f"there is no {INDEX_NAME}",
            fix=f"windlass data tokenize FILES -o {source.url}",
        ) from None
    index = parse_index(text, f"{source.url}/{INDEX_NAME}")
    if not index.block_bytes:
        raise UserError(
            f"{source.url} was made by an older windlass, without checksums of its blocks",
            fix=f"windlass data tokenize FILES -o {source.url} --overwrite",
        )
    check_sizes(store, index)
    root = cache_root() / "blocks"
    # Named after the index: other shards at the same place are another folder.
    folder = root / name_digest(source.url + text)
    sums = {name: expected for shard in index.shards for name, expected in shard.checksums().items()}
    with only_one(root):
        folder.mkdir(exist_ok=True)
        if not (folder / INDEX_NAME).exists():
            names = [f"{SHARD_TOKENIZER}/{name}" for name in TOKENIZER_FILES]  # whatever else is there stays there
            for entry in list(store.entries(f"{SHARD_TOKENIZER}/")):
                if entry.name in names:
                    store.get(entry.name, folder / entry.name)
            write_atomically(folder / INDEX_NAME, text)

        def digests(name: str) -> bytes:
            return fetched(store, name, folder / name, sums[name]).read_bytes()

        itemsize = index.itemsize
        cache = BlockCache(
            folder,
            [
                RemoteFile(one.tokens_file, one.num_tokens * itemsize, lambda name=one.blocks_file: digests(name))  # type: ignore[misc]
                for one in index.shards
            ],
            lambda name, start, size: store.read(name, start, size),
            block_bytes=index.block_bytes,
            limit=int((cache_gib or CACHE_GIB) * 2**30),
            name=source.url,
        )
    return TokenShards(folder, index, RemoteShards(store, folder, sums, cache))


def check_sizes(store: Store, index: Index) -> None:
    """Every file of the index is there and as long as it says."""
    there = {entry.name: entry.size for entry in store.entries("shard-")}
    for shard in index.shards:
        expected = {
            shard.tokens_file: shard.num_tokens * index.itemsize,
            shard.documents_file: shard.num_documents * DOCUMENT_DTYPE.itemsize,
        }
        for name in shard.checksums():
            if name not in there:
                raise UserError(f"the shard file {store.url}/{name} is missing", fix="copy the folder again")
            size = expected.get(name, there[name])
            if there[name] != size:
                verb = "truncated" if there[name] < size else "too long"
                raise UserError(
                    f"the shard file {store.url}/{name} is {verb}",
                    evidence=f"{there[name]:,} bytes; the index says {size:,}",
                    fix="copy the folder again, or tokenize again",
                )


def fetched(store: Store, name: str, path: Path, sha256: str) -> Path:
    """A file of the store, here, whole and right; whoever comes first fetches it."""
    if path.exists():  # put in place after its content was compared
        return path
    with locked(path.with_name(f"{path.name}.lock")):
        for _ in range(TRIES):
            if path.exists():
                return path
            arrived = path.with_name(f"{path.name}.arrived")
            store.get(name, arrived)
            if sha256_of(arrived) == sha256:
                arrived.rename(path)
                return path
    raise UserError(
        f"{store.url}/{name} is damaged: its content does not fit the index",
        evidence=f"fetched {TRIES} times; the index says sha256 {sha256[:16]}…",
        fix="make the shards again: windlass data tokenize … --overwrite",
    )
