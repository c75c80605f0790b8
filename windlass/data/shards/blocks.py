"""Blocks of remote files on this machine: sparse files that ranks of a node share, memory-mapped.

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
import hashlib
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np

from windlass.common.locks import FileLock

BLOCK_DIGEST_BYTES = 16
HEADER_BYTES = 64
CLAIM_INTERVAL_S = 0.003
PUNCH_HOLE = 0x02 | 0x01  # and keep the size
COMMIT, USE, STATE = "commit", "use", "state"


def block_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=BLOCK_DIGEST_BYTES).digest()


class BlockFolder:
    """The state of all blocks of a folder's files. Blocks are written and removed through it alone."""

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
        return [int(block) for block in held[np.argsort(used[held], kind="stable")][:count]]

    def remove(self, blocks: Sequence[int]) -> None:
        with self.committing():
            for block in blocks:
                file, start, size = self.place(block)
                self.stamps[block] = 0
                with self.opened(file) as handle:
                    punch_hole(handle, start, size)
                self.used[block] = 0


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
