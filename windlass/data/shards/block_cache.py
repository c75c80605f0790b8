"""Remote files read through a cache of their blocks: fetched when they are needed or soon will be, within a bound."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.shards.blocks import BLOCK_DIGEST_BYTES, BlockFolder, block_digest, now
from windlass.data.shards.eviction import CacheEvictor
from windlass.errors import ExitCode, UserError

THREADS = 16
LOOK_INTERVAL_S = 1.0
TRIES = 3  # for a block that arrives whole but wrong

Fetch = Callable[[str, int, int], bytes]  # (file, start, size)


@dataclass(frozen=True)
class RemoteFile:
    """A file to be read block by block."""

    name: str
    size: int
    digests: Callable[[], bytes]  # of all its blocks, one after another; asked for once it is needed


class BlockCache:
    """Blocks of remote files, fetched when they are needed or soon will be, within a bound of room."""

    def __init__(
        self, folder: Path, files: Sequence[RemoteFile], fetch: Fetch, *, block_bytes: int, limit: int, name: str
    ) -> None:
        self.name = name
        self._files, self._fetch = list(files), fetch
        self.blocks = BlockFolder(folder, {file.name: file.size for file in files}, block_bytes)
        self._evictor = CacheEvictor(self.blocks, limit)
        self._threads = ThreadPoolExecutor(THREADS, "windlass-blocks")
        self._arriving: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._all_here, self._looked_at = False, -LOOK_INTERVAL_S
        self.time = now()  # to a second or so: asking for it at every read would be a good part of reading

    def array(self, file: int, dtype: np.dtype[Any]) -> CachedArray:
        return CachedArray(self, file, dtype)

    def all_here(self) -> bool:
        """Whether there is nothing to fetch, as far as was known a moment ago."""
        if time.monotonic() > self._looked_at + LOOK_INTERVAL_S:
            self._all_here = bool(np.asarray(self.blocks.stamps).all())
            self._looked_at = time.monotonic()
            self.time = now()
        return self._all_here

    def prefetch(self, block: int) -> None:
        """Fetch a block in the background: it will be needed soon."""
        with self._lock:
            if block not in self._arriving and not self.blocks.stamps[block]:
                self._arriving[block] = self._threads.submit(self._arrive, block)

    def ensure(self, block: int) -> None:
        """Return once a block is here."""
        with self._lock:
            arriving = self._arriving.get(block)
            if arriving is not None and arriving.cancel():  # still behind others
                del self._arriving[block]
                arriving = None
        if arriving is not None:
            arriving.exception()
        if not self.blocks.stamps[block]:
            self._fill(block)
        self.time = now()

    def _arrive(self, block: int) -> None:
        try:
            self._fill(block)
        finally:
            with self._lock:
                self._arriving.pop(block, None)

    def _fill(self, block: int) -> None:
        with self.blocks.claimed(block):
            if self.blocks.stamps[block]:
                return
            data = self.blocks.held(block) if self.blocks.used[block] else b""
            if not data or not self._matches_digest(block, data):
                data = self._fetched(block)
            self._evictor.make_space()
            self._keep(block, data)

    def _keep(self, block: int, data: bytes) -> None:
        while True:
            try:
                self.blocks.put(block, data)
                return
            except OSError as error:
                if error.errno == errno.ENOSPC and self._evictor.evict_some():
                    continue
                raise UserError(
                    f"the cache of {self.name} cannot be written",
                    evidence=str(error),
                    fix="make room there, or export WINDLASS_CACHE=FOLDER",
                    exit_code=ExitCode.FAILED,
                ) from error

    def _fetched(self, block: int) -> bytes:
        file, start, size = self.blocks.place(block)
        for _ in range(TRIES):
            data = self._fetch(self._files[file].name, start, size)
            if len(data) == size and self._matches_digest(block, data):
                return data
        raise UserError(
            f"{self.name}/{self._files[file].name} is damaged: its content does not fit the index",
            evidence=f"bytes {start:,} to {start + size:,}, fetched {TRIES} times",
            fix="make the shards again: windlass data tokenize … --overwrite",
        )

    def _matches_digest(self, block: int, data: bytes) -> bool:
        file, start, _ = self.blocks.place(block)
        if file not in self._digests:
            self._digests[file] = self._files[file].digests()
        number = start // self.blocks.block_bytes
        place = number * BLOCK_DIGEST_BYTES
        return block_digest(data) == self._digests[file][place : place + BLOCK_DIGEST_BYTES]


class CachedArray:
    """A remote file as an array whose parts are here when they are read."""

    def __init__(self, cache: BlockCache, file: int, dtype: np.dtype[Any]) -> None:
        blocks = cache.blocks
        self._cache, self._stamps, self._used = cache, blocks.stamps, blocks.used
        self._first, self._per_block = blocks.firsts[file], blocks.block_bytes // dtype.itemsize
        with blocks.opened(file):
            pass  # it is there now, as large as it will be
        size = blocks.sizes[file]
        self._map: NDArray[Any] = (
            np.memmap(blocks.folder / blocks.names[file], dtype=dtype, mode="r", shape=(size // dtype.itemsize,))
            if size
            else np.empty(0, dtype=dtype)
        )

    def read_into(self, out: NDArray[Any], begin: int, end: int) -> None:
        """Copy the items [begin, end) to `out`."""
        block = begin // self._per_block
        if block == (end - 1) // self._per_block:
            block += self._first
            stamp = self._stamps[block]
            if stamp:  # nearly always: all in one block, and it is here
                out[:] = self._map[begin:end]
                if self._stamps[block] == stamp:
                    self._used[block] = self._cache.time
                    return
        for block in self._blocks(begin, end):
            # Block by block, so that a window over two of them never needs both at once.
            low = max(begin, (block - self._first) * self._per_block)
            high = min(end, (block - self._first + 1) * self._per_block)
            while True:
                stamp = self._stamps[block]
                if stamp:
                    out[low - begin : high - begin] = self._map[low:high]
                    if self._stamps[block] == stamp:
                        break
                else:
                    self._cache.ensure(block)
            self._used[block] = self._cache.time

    def prefetch(self, begin: int, end: int) -> None:
        for block in self._blocks(begin, end):
            if not self._stamps[block]:
                self._cache.prefetch(block)

    def _blocks(self, begin: int, end: int) -> range:
        if end <= begin:
            return range(0)
        return range(self._first + begin // self._per_block, self._first + (end - 1) // self._per_block + 1)
