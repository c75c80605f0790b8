"""The cache of blocks by itself: what is here is right, what is gone is fetched again, and room is given back."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from windlass.data.shards import eviction
from windlass.data.shards.block_cache import BlockCache, RemoteFile
from windlass.data.shards.blocks import BlockFolder, block_digest
from windlass.errors import UserError

BLOCK = 1 << 16
DTYPE = np.dtype("<u2")


class Remote:
    """A file somewhere else, that notes what was asked of it."""

    def __init__(self, num_blocks: int) -> None:
        self.data = np.random.default_rng(0).integers(0, 256, size=num_blocks * BLOCK - 100, dtype=np.uint8).tobytes()
        self.asked: list[int] = []
        self.spoilt: set[int] = set()

    def fetch(self, name: str, start: int, size: int) -> bytes:
        self.asked.append(start // BLOCK)
        part = self.data[start : start + size]
        return bytes(size) if start // BLOCK in self.spoilt else part

    def cache(self, folder: Path, limit: int = 1 << 30) -> BlockCache:
        digests = b"".join(block_digest(self.data[at : at + BLOCK]) for at in range(0, len(self.data), BLOCK))
        file = RemoteFile("file", len(self.data), lambda: digests)
        return BlockCache(folder / "blocks" / "one", [file], self.fetch, block_bytes=BLOCK, limit=limit, name="remote")

    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        return np.frombuffer(self.data, dtype=DTYPE)


def read(cache: BlockCache, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    out = np.empty(end - begin, dtype=np.int64)
    cache.array(0, DTYPE).read_into(out, begin, end)
    return out


def test_parts_over_blocks_and_at_the_end(tmp_path: Path) -> None:
    remote = Remote(4)
    cache, tokens = remote.cache(tmp_path), remote.tokens()
    for begin, end in (
        (0, 5),
        (BLOCK // 2 - 3, BLOCK // 2 + 3),
        (10, len(tokens)),
        (len(tokens) - 1, len(tokens)),
        (7, 7),
    ):
        assert np.array_equal(read(cache, begin, end), tokens[begin:end])
    assert sorted(remote.asked) == [0, 1, 2, 3]
    again = remote.cache(tmp_path)  # another process
    assert np.array_equal(read(again, 0, len(tokens)), tokens)
    assert len(remote.asked) == 4


def test_room_is_given_back_to_the_disk(tmp_path: Path) -> None:
    blocks = BlockFolder(tmp_path / "one", {"file": 4 * BLOCK}, BLOCK)
    for number in range(4):
        blocks.put(number, bytes([number + 1]) * BLOCK)
    path = tmp_path / "one" / "file"
    full = path.stat().st_blocks
    blocks.remove([1, 2])
    assert path.stat().st_blocks * 512 <= full * 512 - 2 * BLOCK
    assert path.stat().st_size == 4 * BLOCK
    assert blocks.num_bytes() == 2 * BLOCK
    assert [bool(stamp) for stamp in blocks.stamps] == [True, False, False, True]
    assert blocks.held(0) == bytes([1]) * BLOCK
    assert blocks.held(1) == bytes(BLOCK)


def test_readers_and_removals_at_the_same_time(tmp_path: Path) -> None:
    """Blocks are taken away under the hands of those who read them: no reader ever sees a hole."""
    remote = Remote(6)
    cache, tokens = remote.cache(tmp_path), remote.tokens()
    wrong: list[int] = []
    stop = threading.Event()

    def take_away() -> None:
        draw = np.random.default_rng(1)
        while not stop.is_set():
            cache.blocks.remove([int(draw.integers(6))])

    def look(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(150):
            begin = int(draw.integers(len(tokens) - 3000))
            if not np.array_equal(read(cache, begin, begin + 3000), tokens[begin : begin + 3000]):
                wrong.append(begin)

    remover = threading.Thread(target=take_away)
    readers = [threading.Thread(target=look, args=(seed,)) for seed in (2, 3)]
    for thread in (remover, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    remover.join()
    assert not wrong
    assert len(remote.asked) > 6


def test_what_is_wanted_comes_once(tmp_path: Path) -> None:
    remote = Remote(5)
    cache = remote.cache(tmp_path)
    array = cache.array(0, DTYPE)
    for _ in range(3):
        array.prefetch(0, len(remote.tokens()))
    assert np.array_equal(read(cache, 0, len(remote.tokens())), remote.tokens())
    assert sorted(remote.asked) == [0, 1, 2, 3, 4]


def test_what_arrives_wrong_is_not_kept(tmp_path: Path) -> None:
    remote = Remote(3)
    cache = remote.cache(tmp_path)
    remote.spoilt = {1}
    with pytest.raises(UserError, match="remote/file is damaged"):
        read(cache, 0, len(remote.tokens()))
    remote.spoilt = set()
    assert np.array_equal(read(cache, 0, len(remote.tokens())), remote.tokens())


def test_a_disk_that_is_full_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "AT_ONCE", 2)
    remote = Remote(6)
    cache, tokens = remote.cache(tmp_path), remote.tokens()
    put = BlockFolder.put

    def put_if_there_is_room(self: BlockFolder, block: int, data: bytes) -> None:
        if self.num_bytes() >= 4 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, block, data)

    monkeypatch.setattr(BlockFolder, "put", put_if_there_is_room)
    for _ in range(2):
        assert np.array_equal(read(cache, 0, len(tokens)), tokens)
    assert cache.blocks.num_bytes() <= 4 * BLOCK
    monkeypatch.setattr(BlockFolder, "put", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(UserError, match="cannot be written"):
        read(cache, 0, len(tokens))
