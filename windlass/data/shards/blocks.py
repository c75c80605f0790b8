"""A local cache of remote files, block by block: sparse files that ranks of a node share, memory-mapped.

FOLDER/NAME     as large as the remote file; blocks that are not here are holes
       state    for every block a stamp (0: not here) and when it was last used; mapped by every process
       commit   locked while a block is written or taken away
       use      locked, shared, by every process that has the folder open

A reader copies out of the map and looks at the stamp before and after: a block that was taken away in between has lost
its stamp before its content, so the copy is made again. Stamps do not outlive a boot, since the content may not have
reached the disk: blocks are then compared with their digests before they are fetched anew.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.common.locks import FileLock
from windlass.errors import ExitCode, UserError

HEADER_BYTES = 64
THREADS = 16
CLAIM_INTERVAL_S = 0.003
LOOK_INTERVAL_S = 1.0
TRIES = 3  # for a block that arrives whole but wrong
PUNCH_HOLE = 0x02 | 0x01  # and keep the size
COMMIT, USE, STATE = "commit", "use", "state"

Fetch = Callable[[str, int, int], bytes]  # (file, start, size)


@dataclass(frozen=True)
class RemoteFile:
    """A file to be read block by block."""

    name: str
    size: int
    digests: Callable[[], bytes]  # of all its blocks, one after another; asked for once it is needed


class BlockFolder:
    """The state of all blocks of a folder's files, and the only one who writes or removes blocks."""

    def __init__(self, folder: Path, sizes: dict[str, int], block_bytes: int, *, using: bool = True) -> None:
        """`using`: keep others from removing the folder as abandoned."""
        self.folder, self.block_bytes = folder, block_bytes
        self.names, self.sizes = list(sizes), list(sizes.values())
        counts = [-(-size // block_bytes) for size in self.sizes]
        self.firsts = [0, *accumulate(counts)]  # number of each file's first block
        self.num_blocks = self.firsts[-1]
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._commit, self._use = FileLock(folder / COMMIT), FileLock(folder / USE)
        if using:
            self._use.acquire(shared=True)
        with self.committing():
            self._open_state()

    def _open_state(self) -> None:
        path = self.folder / STATE
        size = HEADER_BYTES + 8 * max(1, self.num_blocks)
        with path.open("ab") as file:
            file.truncate(size)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)
        view = memoryview(self._map)[HEADER_BYTES:].cast("I")
        self.stamps, self.used = view[: self.num_blocks], view[self.num_blocks : 2 * self.num_blocks]
        boot = boot_id()
        if self._map[: len(boot)] != boot:
            self.stamps[:] = memoryview(bytes(4 * self.num_blocks)).cast("I")
            self._map[: len(boot)] = boot

    @contextmanager
    def committing(self) -> Iterator[None]:
        with self._lock:
            self._commit.acquire()
            try:
                yield
            finally:
                self._commit.release()

    @contextmanager
    def claimed(self, block: int) -> Iterator[None]:
        """Other processes that want the same block wait here, and then find it."""
        while True:
            try:
                # Not waited for inside the system: it takes threads of two processes that wait for each other's
                # process, though not for each other, for a deadlock.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, HEADER_BYTES + block)
                break
            except (BlockingIOError, PermissionError):
                time.sleep(CLAIM_INTERVAL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, HEADER_BYTES + block)

    def place(self, block: int) -> tuple[int, int, int]:
        """(file, offset, size) of a block."""
        file = int(np.searchsorted(self.firsts, block, side="right")) - 1
        start = (block - self.firsts[file]) * self.block_bytes
        return file, start, min(self.block_bytes, self.sizes[file] - start)

    @contextmanager
    def opened(self, file: int) -> Iterator[int]:
        """A file to write in; opened for the moment, since there may be thousands."""
        handle = os.open(self.folder / self.names[file], os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size != self.sizes[file]:
                os.ftruncate(handle, self.sizes[file])
            yield handle
        finally:
            os.close(handle)

    def held(self, block: int) -> bytes:
        """What is on disk of a block, be it right or not."""
        file, start, size = self.place(block)
        with self.opened(file) as handle:
            return os.pread(handle, size, start)

    def put(self, block: int, data: bytes) -> None:
        file, start, _ = self.place(block)
        with self.opened(file) as handle, self.committing():
            self.used[block] = now()
            try:
                if os.pwrite(handle, data, start) != len(data):
                    raise OSError(errno.ENOSPC, "no space left for a whole block", str(self.folder))
            except OSError:
                self.used[block] = 0  # so that it does not count as something that could be given up
                raise
            self.stamps[block] = secrets.randbits(32) | 1

    def num_bytes(self) -> int:
        return int(np.count_nonzero(np.asarray(self.used))) * self.block_bytes

    def oldest(self, count: int) -> list[int]:
        used = np.array(self.used, dtype=np.uint32)
        held = np.flatnonzero(used)
        return [int(one) for one in held[np.argsort(used[held], kind="stable")][:count]]

    def remove(self, blocks: Sequence[int]) -> None:
        with self.committing():
            for block in blocks:
                file, start, size = self.place(block)
                self.stamps[block] = 0
                with self.opened(file) as handle:
                    punch_hole(handle, start, size)
                self.used[block] = 0


class BlockCache:
    """Blocks of remote files, fetched when they are needed or soon will be, within a bound of room."""

    def __init__(
        self, folder: Path, files: Sequence[RemoteFile], fetch: Fetch, *, block_bytes: int, limit: int, name: str
    ) -> None:
        from windlass.data.shards.eviction import Room

        self.name = name
        self._files, self._fetch = list(files), fetch
        self.blocks = BlockFolder(folder, {one.name: one.size for one in files}, block_bytes)
        self._room = Room(self.blocks, limit)
        self._threads = ThreadPoolExecutor(THREADS, "windlass-blocks")
        self._coming: dict[int, Future[None]] = {}
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

    def want(self, block: int) -> None:
        """It will be needed soon."""
        with self._lock:
            if block not in self._coming and not self.blocks.stamps[block]:
                self._coming[block] = self._threads.submit(self._come, block)

    def need(self, block: int) -> None:
        """Have it here now."""
        with self._lock:
            coming = self._coming.get(block)
            if coming is not None and coming.cancel():  # still behind others
                del self._coming[block]
                coming = None
        if coming is not None:
            coming.exception()
        if not self.blocks.stamps[block]:
            self._fill(block)
        self.time = now()

    def _come(self, block: int) -> None:
        try:
            self._fill(block)
        finally:
            with self._lock:
                self._coming.pop(block, None)

    def _fill(self, block: int) -> None:
        with self.blocks.claimed(block):
            if self.blocks.stamps[block]:
                return
            data = self.blocks.held(block) if self.blocks.used[block] else b""
            if not data or not self._right(block, data):
                data = self._fetched(block)
            self._room.make()
            self._keep(block, data)

    def _keep(self, block: int, data: bytes) -> None:
        while True:
            try:
                self.blocks.put(block, data)
                return
            except OSError as error:
                if error.errno == errno.ENOSPC and self._room.give_up_some():
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
            if len(data) == size and self._right(block, data):
                return data
        raise UserError(
            f"{self.name}/{self._files[file].name} is damaged: its content does not fit the index",
            evidence=f"bytes {start:,} to {start + size:,}, fetched {TRIES} times",
            fix="make the shards again: windlass data tokenize … --overwrite",
        )

    def _right(self, block: int, data: bytes) -> bool:
        from windlass.data.shards.folder import BLOCK_DIGEST_BYTES, block_digest

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
                    self._cache.need(block)
            self._used[block] = self._cache.time

    def want(self, begin: int, end: int) -> None:
        for block in self._blocks(begin, end):
            if not self._stamps[block]:
                self._cache.want(block)

    def _blocks(self, begin: int, end: int) -> range:
        if end <= begin:
            return range(0)
        return range(self._first + begin // self._per_block, self._first + (end - 1) // self._per_block + 1)


def now() -> int:
    return int(time.time()) & 0xFFFFFFFF


def boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]
    except OSError:  # no Linux: good for this process and those it starts
        return f"{os.getppid():036d}".encode()


def punch_hole(handle: int, start: int, size: int) -> None:
    """Give the disk space of a part of a file back."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.EOPNOTSUPP, "parts of a file can be given back on Linux only")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(handle, PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
