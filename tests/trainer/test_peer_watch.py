"""The watch over other ranks, with real sockets and without training: strangers, and ranks that leave."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from windlass.trainer.distributed import peers
from windlass.trainer.distributed.peers import Lost, PeerWatch

PATIENCE = 30.0


@dataclass
class Table:
    """What ranks in threads tell each other, in place of a process group."""

    world_size: int
    barrier: threading.Barrier = field(init=False)
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size)

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        self.values[rank] = value
        self.barrier.wait(PATIENCE)
        everyone = dict(self.values)
        self.barrier.wait(PATIENCE)
        return everyone


@dataclass
class Seat:
    rank: int
    table: Table

    @property
    def world_size(self) -> int:
        return self.table.world_size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        return self.table.exchange(self.rank, value)[0]

    def gather(self, value: Any) -> list[Any]:
        everyone = self.table.exchange(self.rank, value)
        return [everyone[rank] for rank in range(self.world_size)]


class World:
    def __init__(self, size: int, *, limit_s: float) -> None:
        table = Table(size)
        self.watches = [PeerWatch() for _ in range(size)]
        self.lost: list[Lost] = []
        starting = [threading.Thread(target=self._begin, args=(rank, table, limit_s)) for rank in range(size)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(PATIENCE)
        self.address = ("127.0.0.1", self.watches[1]._peers[0].socket.getpeername()[1])
        until(lambda: len(self.watches[0]._peers) == size - 1)

    def _begin(self, rank: int, table: Table, limit_s: float) -> None:
        seat: Any = Seat(rank, table)
        where = lambda: ("step", 1)  # noqa: E731
        self.watches[rank].begin(seat, limit_s=limit_s, where=where, on_lost=self.lost.append)

    def verdicts(self) -> list[Lost | None]:
        return [watch.lost for watch in self.watches]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(peers, "BEAT_S", 0.1)
    monkeypatch.setattr(peers, "HELLO_S", 0.5, raising=False)
    world = World(2, limit_s=5.0)
    yield world
    for watch in world.watches:
        watch.close()


def is_cut_off(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 60_000 + b"\n",
    b'{"a":' * 10_000 + b"\n",
    b"x" * 200_000,
    b"\xff\xfe\n",
    json.dumps({"hello": 1, "secret": "a guess", "host": "x"}).encode() + b"\n",
    json.dumps({"hello": 1, "secret": "\ud800", "host": "x"}).encode() + b"\n",
    json.dumps({"hello": 1, "secret": ["x"], "bye": "so long"}).encode() + b"\n",
    json.dumps({"lost": {"rank": 1, "host": "x", "why": "x"}}).encode() + b"\n",
    b"",
]


@pytest.mark.parametrize("data", STRANGERS, ids=lambda data: repr(data[:12]))
def test_no_stranger_ends_the_watch(data: bytes, world: World) -> None:
    with socket.create_connection(world.address) as stranger:
        stranger.sendall(data)
        assert is_cut_off(stranger)
    beat = world.watches[1]._peers[0].heard
    until(lambda: world.watches[1]._peers[0].heard > beat)
    assert world.verdicts() == [None, None]


@pytest.mark.slow
def test_many_silent_strangers_take_no_file_handles_from_training(world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(world.address) for _ in range(3 * peers.MOST_STRANGERS)]
    try:
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(strangers) + peers.MOST_STRANGERS)
        assert sum(is_cut_off(stranger) for stranger in strangers) == len(strangers)
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert world.verdicts() == [None, None]


def test_a_rank_that_leaves_well_is_not_taken_for_a_lost_one(world: World) -> None:
    """It ends right after its farewell, with messages that it has not read: its kernel then drops what waits."""
    connection = world.watches[1]._peers[0].socket
    for end in (connection, world.watches[0]._peers[0].socket):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "a farewell waits for an acknowledgement"
