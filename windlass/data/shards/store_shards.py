"""Shards in an object store, read as if they were here: through a cache of blocks that this node's ranks share."""

from __future__ import annotations

from pathlib import Path

from windlass.common.files import cache_root, name_digest, sha256_of, write_atomically
from windlass.common.locks import locked
from windlass.data.shards.block_cache import THREADS, BlockCache, RemoteFile
from windlass.data.shards.eviction import one_at_a_time
from windlass.data.shards.folder import RemoteShards, TokenShards, check_size, parse_index
from windlass.data.sources.source import INDEX_NAME, StoreShardSource
from windlass.data.tokenizers.tokenizer import SHARD_TOKENIZER, TOKENIZER_FILES
from windlass.errors import UserError
from windlass.store import Store, StoreOptions, open_store

CACHE_GIB = 200.0
TRIES = 3


def open_store_shards(source: StoreShardSource, cache_gib: float | None = None) -> TokenShards:
    """The shards at a URL; nothing but what describes them is fetched before it is read."""
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
    sizes = {entry.name: entry.size for entry in store.entries("shard-")}
    names = [name for shard in index.shards for name in shard.checksums()]
    for name, expected in ({name: sizes.get(name, 0) for name in names} | index.file_sizes()).items():
        check_size(f"{store.url}/{name}", sizes.get(name), expected)
    root = cache_root() / "blocks"
    # Named after the index: other shards at the same place are another folder.
    folder = root / name_digest(source.url + text)
    sums = {name: expected for shard in index.shards for name, expected in shard.checksums().items()}
    with one_at_a_time(root):
        folder.mkdir(exist_ok=True)
        if not (folder / INDEX_NAME).exists():
            names = [f"{SHARD_TOKENIZER}/{name}" for name in TOKENIZER_FILES]  # whatever else is there stays there
            for entry in list(store.entries(f"{SHARD_TOKENIZER}/")):
                if entry.name in names:
                    store.get(entry.name, folder / entry.name)
            write_atomically(folder / INDEX_NAME, text)

        def whole(name: str) -> Path:
            return fetched(store, name, folder / name, sums[name])

        cache = BlockCache(
            folder,
            [
                RemoteFile(
                    shard.tokens_file,
                    shard.num_tokens * index.itemsize,
                    digests=lambda name=shard.blocks_file: whole(name).read_bytes(),  # type: ignore[misc]
                )
                for shard in index.shards
            ],
            store.read,
            block_bytes=index.block_bytes,
            limit=int((cache_gib or CACHE_GIB) * 2**30),
            name=source.url,
        )
    return TokenShards(folder, index, RemoteShards(whole, cache))


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
