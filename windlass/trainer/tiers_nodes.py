"""Which ranks share a node, whose memory doubles whose, and how pieces travel between nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.trainer.ranks import Ranks

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Transfer:
    """The piece of rank `piece` goes from rank `sender` to rank `receiver`."""

    piece: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Nodes:
    """The node of every rank. Ranks are of one node when they have the same host and the same place for pieces."""

    of_rank: tuple[int, ...]

    @classmethod
    def meet(cls, ranks: Ranks, place: str) -> Nodes:
        identities = ranks.gather((socket.gethostname(), place), patient=True)
        order = {identity: index for index, identity in enumerate(dict.fromkeys(identities))}
        return cls(tuple(order[identity] for identity in identities))

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, one in enumerate(self.of_rank) if one == node]

    def first_rank(self, node: int) -> int:
        return self.of_rank.index(node)

    def is_first_of_node(self, rank: int) -> bool:
        return self.first_rank(self.of_rank[rank]) == rank

    def replication(self) -> list[Transfer]:
        """Every piece goes to the next node, to the rank there that has the same place in its node."""
        if self.count == 1:
            return []
        transfers = []
        for rank, node in enumerate(self.of_rank):
            receivers = self.ranks((node + 1) % self.count)
            place = self.ranks(node).index(rank)
            transfers.append(Transfer(rank, rank, receivers[place % len(receivers)]))
        return transfers


def carry_out(
    transfers: Iterable[Transfer],
    sizes: dict[int, int],
    files: dict[int, Path],
    *,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Do this rank's part of the transfers: read from and write to files that have their full size already."""
    mine = [one for one in transfers if rank in (one.sender, one.receiver) and sizes[one.piece]]
    mapped = {one.piece: _mapped(files[one.piece], sizes[one.piece]) for one in mine}
    num_chunks = {one.piece: -(-sizes[one.piece] // CHUNK_BYTES) for one in mine}
    for index in range(max(num_chunks.values(), default=0)):
        under_way: list[Any] = []
        for one in mine:
            if index >= num_chunks[one.piece]:
                continue
            chunk = mapped[one.piece][index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            if one.sender == rank:
                under_way.append(dist.isend(chunk, one.receiver, group=group, tag=one.piece))
            else:
                under_way.append(dist.irecv(chunk, one.sender, group=group, tag=one.piece))
        for work in under_way:
            work.wait()


def _mapped(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
