"""Blocks of a checkpoint's files on their way to the ranks: read ahead, proven, and once for all ranks of a node."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from windlass.checkpoint.folder import Damage
from windlass.checkpoint.manifest import BLOCK_BYTES
from windlass.checkpoint.proven import DamagedError, ProvenFiles
from windlass.errors import UserError
from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.distributed.ranks import Ranks

AHEAD = 4  # blocks that are read ahead, and those that are kept; each BLOCK_BYTES of a rank's memory

Block = tuple[str, int]  # a file and the number of a block in it
Blocks = Callable[[str, int], memoryview | None]  # None: it is damaged
Sent = tuple[dist.Work | None, torch.Tensor]


@dataclass(frozen=True)
class Readers:
    """The ranks of a job that load together."""

    ranks: Ranks
    nodes: Nodes

    def agree(self, wanted: list[Block]) -> dict[Block, Route]:
        """For every block that other ranks of this node want too: who reads it, and who gets it from there."""
        me = self.ranks.rank
        mates = self.nodes.ranks(self.nodes.of_rank[me])
        wanted_by = self.ranks.gather(_runs(wanted), patient=True)
        takers: dict[Block, list[int]] = {}
        for rank in mates:
            for file, first, last in wanted_by[rank]:
                for index in range(first, last + 1):
                    takers.setdefault((file, index), []).append(rank)
        routes = {}
        for number, block in enumerate(sorted(takers)):
            ranks = takers[block]
            if me in ranks and len(ranks) > 1:
                reader = ranks[number % len(ranks)]
                routes[block] = Route(self.ranks, reader, [rank for rank in ranks if rank != reader], tag=number)
        return routes


@dataclass(frozen=True)
class Route:
    """How a block comes to several ranks of a node."""

    ranks: Ranks
    reader: int
    takers: list[int]
    tag: int

    @property
    def begins_here(self) -> bool:
        return self.reader == self.ranks.rank

    def send(self, content: memoryview | None, size: int) -> list[Sent]:
        """A block, and a byte that says whether it is whole: whoever waits for it must not wait for ever."""
        payload = torch.zeros(size + 1, dtype=torch.uint8)
        if content is not None:
            payload[size] = 1
            payload[:size] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return [
            (dist.isend(payload, taker, group=self.ranks.patient, tag=self.tag), payload)  # alive until it is sent
            for taker in self.takers
        ]

    def receive(self, size: int) -> memoryview | None:
        payload = torch.empty(size + 1, dtype=torch.uint8)
        dist.recv(payload, self.reader, group=self.ranks.patient, tag=self.tag)
        return payload[:size].numpy().data if payload[size] else None


@dataclass
class BlockReader:
    """All that one rank reads of a checkpoint. It keeps the newest blocks: neighbours in a file share them."""

    files: ProvenFiles
    problems: list[Damage] = field(default_factory=list)
    failure: UserError | None = None  # the store could not be asked, which says nothing about the checkpoint
    bytes_read: int = 0  # of the store; what other ranks sent is not among them
    _kept: OrderedDict[Block, memoryview | None] = field(default_factory=OrderedDict)

    @contextlib.contextmanager
    def reading(self, blocks: set[Block], readers: Readers | None) -> Iterator[Blocks]:
        """Blocks, to be taken in about the order of the files; all ranks of a node go by the same one."""
        wanted = sorted(blocks - self._kept.keys())
        routes = readers.agree(wanted) if readers else {}
        mine = deque(block for block in wanted if block not in routes or routes[block].begins_here)
        ahead: deque[Future[memoryview | None]] = deque()
        sending: deque[Sent] = deque()
        order = deque(wanted)
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="blocks") as threads:

            def advance() -> None:
                """Bring the next block, from the store or from the rank that reads it."""
                while mine and len(ahead) < AHEAD:
                    ahead.append(threads.submit(self._read, mine.popleft()))
                block = order.popleft()
                route = routes.get(block)
                if route is not None and not route.begins_here:
                    self._keep(block, route.receive(self._size(block)))
                    return
                content = ahead.popleft().result()
                self.bytes_read += len(content or b"")
                self._keep(block, content)
                if route is not None:
                    sending.extend(route.send(content, self._size(block)))
                while len(sending) > AHEAD:
                    _wait(*sending.popleft())

            def take(file: str, index: int) -> memoryview | None:
                while (file, index) not in self._kept and order and order[0] <= (file, index):
                    advance()
                if (file, index) not in self._kept:  # it was needed before, and is no longer kept
                    self._keep((file, index), self._read((file, index)))
                return self._kept[file, index]

            try:
                yield take
            finally:
                while order:  # what this rank did not take others may still wait for
                    advance()
                for sent in sending:
                    _wait(*sent)

    def check_reached(self) -> None:
        if self.failure:
            raise self.failure

    def _read(self, block: Block) -> memoryview | None:
        if self.problems or self.failure:  # what is loaded is worth nothing already
            return None
        try:
            content = self.files.read_block(*block)
        except DamagedError as error:
            self.problems.append(error.damage)
            return None
        except UserError as error:
            self.failure = error
            return None
        except Exception as error:  # other ranks wait for this block: they must learn of it
            self.problems.append(Damage(block[0], f"it cannot be read: {error!r}"))
            return None
        return memoryview(content)

    def _keep(self, block: Block, content: memoryview | None) -> None:
        self._kept[block] = content
        while len(self._kept) > AHEAD:
            self._kept.popitem(last=False)

    def _size(self, block: Block) -> int:
        file, index = block
        return min(BLOCK_BYTES, self.files.manifest.files[file].size - index * BLOCK_BYTES)


def _wait(work: dist.Work | None, payload: torch.Tensor) -> None:
    if work is not None:
        work.wait()


def _runs(blocks: list[Block]) -> list[tuple[str, int, int]]:
    """Sorted blocks as (file, first, last)."""
    runs: list[tuple[str, int, int]] = []
    for file, index in blocks:
        if runs and runs[-1][0] == file and runs[-1][2] == index - 1:
            runs[-1] = (file, runs[-1][1], index)
        else:
            runs.append((file, index, index))
    return runs
