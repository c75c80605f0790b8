"""Tiers of pieces, one per rank: in the nodes' memory, on their disks, and in HyperPod's managed tier.

A piece in memory is doubled by a peer node: here is which ranks share a node, whose memory doubles whose, and how
pieces travel.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.checkpoint import CheckpointFolder, FileRecord, Manifest, damage
from windlass.checkpoint.folder import Damage
from windlass.checkpoint.managed import ManagedService
from windlass.checkpoint.manifest import piece_name
from windlass.checkpoint.pieces import ranks_held, readable_manifest
from windlass.errors import UserError
from windlass.trainer.checkpointing.pieces import Piece, fill, read_piece, reserve, write_piece
from windlass.trainer.checkpointing.tiers import Describe, Offer
from windlass.trainer.distributed.agreement import Agreement, SaveFailedError, on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

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
        return [rank for rank, home in enumerate(self.of_rank) if home == node]

    def is_first_of_node(self, rank: int) -> bool:
        return self.of_rank.index(self.of_rank[rank]) == rank

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
    mine = [
        transfer for transfer in transfers if rank in (transfer.sender, transfer.receiver) and sizes[transfer.piece]
    ]
    mapped = {
        piece: torch.from_file(str(files[piece]), shared=True, size=sizes[piece], dtype=torch.uint8)
        for piece in (transfer.piece for transfer in mine)
    }
    num_chunks = {transfer.piece: -(-sizes[transfer.piece] // CHUNK_BYTES) for transfer in mine}
    for index in range(max(num_chunks.values(), default=0)):
        under_way: list[Any] = []
        for transfer in mine:
            if index >= num_chunks[transfer.piece]:
                continue
            chunk = mapped[transfer.piece][index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            if transfer.sender == rank:
                under_way.append(dist.isend(chunk, transfer.receiver, group=group, tag=transfer.piece))
            else:
                under_way.append(dist.irecv(chunk, transfer.sender, group=group, tag=transfer.piece))
        for work in under_way:
            work.wait()


class NodeTier:
    def __init__(self, name: str, every: int, folder: CheckpointFolder, ranks: Ranks, faults: Faults) -> None:
        self.name, self.every, self.folder, self.ranks, self.faults = name, every, folder, ranks, faults
        self.nodes = Nodes.meet(ranks, str(folder.path))
        self.leads = self.nodes.is_first_of_node(ranks.rank)  # does for the node what is done once
        self.replication = self.nodes.replication() if name == "memory" else []
        self.agreement = Agreement(ranks, ranks.saving)

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        checkpoint, together, rank = self.folder.at(step), self.agreement.together, self.ranks.rank
        piece = Piece.of(state)
        try:
            together(lambda: checkpoint.delete() if self.leads else None)
            sizes = dict(enumerate(self.agreement.gather(piece.size)))
            incoming = [transfer.piece for transfer in self.replication if transfer.receiver == rank]
            files = {number: checkpoint.path / piece_name(number) for number in (rank, *incoming)}
            # All room is taken before anything travels: no rank may fail while another waits for it.
            together(lambda: reserve((path, sizes[number]) for number, path in files.items()))
            records: list[FileRecord] = together(lambda: write_piece(files[rank], piece, sync=self.name == "local"))
            self.faults.reach(f"{self.name}.written", step)
            if self.replication:
                together(lambda: self._replicate(files, sizes, records))
                self.faults.reach(f"{self.name}.replicated", step)
            files_of_all = {piece_name(number): record for number, record in enumerate(records)}
            # Rank 0's on every node, to the byte: two that differ would be two steps at a resume.
            manifest: Manifest = self.agreement.gather(describe(files_of_all) if self.ranks.is_first else None)[0]
            together(lambda: checkpoint.publish(manifest) if self.leads else None)
        except SaveFailedError:
            if self.leads:
                with contextlib.suppress(OSError):  # the failure itself may be that nothing can be done there
                    checkpoint.delete()
            raise
        self.faults.reach(f"{self.name}.published", step)
        if self.leads:  # all nodes have published this step: nothing older, nor from an abandoned future, counts
            for other in self.folder.all():
                if other.step != step:
                    other.delete()
        return manifest.size

    def _replicate(self, files: dict[int, Path], sizes: dict[int, int], records: list[FileRecord]) -> None:
        rank, group = self.ranks.rank, self.ranks.saving
        carry_out(self.replication, sizes, files, rank=rank, group=group)
        for number, path in files.items():
            problem = damage(path, records[number]) if number != rank else None
            if problem:
                raise OSError(f"the copy of {path.name} that arrived here is damaged: {problem}")

    def offers(self) -> list[Offer]:
        mine = (
            [manifest for checkpoint in self.folder.complete() if (manifest := readable_manifest(checkpoint))]
            if self.leads
            else []
        )
        known: dict[tuple[int, str], Manifest] = {}
        for part in self.ranks.gather(mine, patient=True):
            for manifest in part:
                known[manifest.step, hashlib.sha256(manifest.to_json().encode()).hexdigest()] = manifest
        return [self._offer(manifest) for _, manifest in sorted(known.items())]

    def _offer(self, manifest: Manifest) -> Offer:
        held = ranks_held(self.folder.at(manifest.step), manifest) if self.leads else []
        holders: dict[int, list[int]] = {}
        for rank, pieces in enumerate(self.ranks.gather(held, patient=True)):
            for piece in pieces:
                holders.setdefault(piece, []).append(self.nodes.of_rank[rank])
        return PiecesOffer(self, manifest, holders)

    def clear(self) -> None:
        for checkpoint in self.folder.all() if self.leads else ():
            checkpoint.delete()

    def check_room(self, state: dict[str, Tensor]) -> None:
        """Two steps, each with its double, must fit beside each other; said before the first step is paid for."""
        sizes = self.ranks.gather(Piece.of(state).size)
        here = self.nodes.ranks(self.nodes.of_rank[self.ranks.rank])
        copies = [sizes[rank] for rank in here]
        copies += [sizes[transfer.piece] for transfer in self.replication if transfer.receiver in here]
        problem = None
        if self.leads:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            status = os.statvfs(self.folder.path)
            free = status.f_bavail * status.f_frsize + sum(
                checkpoint.size_on_disk() for checkpoint in self.folder.all()
            )
            if free < 2 * sum(copies):
                problem = (str(self.folder.path), 2 * sum(copies), free)
        for path, needed, free in filter(None, self.ranks.gather(problem)):
            raise UserError(
                f"the {self.name} tier does not fit on a node",
                evidence=f"{path}: {needed / 2**30:.2f} GiB needed for two steps, {free / 2**30:.2f} GiB free",
                fix=f"checkpoint.{self.name}_path=/a/larger/place, or checkpoint.{self.name}_every=null",
            )


class PiecesOffer:
    """A step of a node tier; `holders` says which nodes have a piece of the right size."""

    def __init__(self, tier: NodeTier, manifest: Manifest, holders: dict[int, list[int]]) -> None:
        self.owner, self.holders = tier, holders
        self.tier, self.step, self.manifest = tier.name, manifest.step, manifest
        self.where = f"step {manifest.step} in the {tier.name} tier of {tier.nodes.count} nodes"
        self._needed: list[Transfer] = []

    def prove(self) -> list[Damage]:
        """Each rank hashes its own piece; where one is missing or damaged, a node that has a copy hashes that."""
        tier, rank, nodes = self.owner, self.owner.ranks.rank, self.owner.nodes
        unsound = {
            piece: problem
            for piece, problem in enumerate(tier.ranks.gather(self._problem(rank), patient=True))
            if problem
        }
        elsewhere = {
            piece: [node for node in self.holders.get(piece, ()) if node != nodes.of_rank[piece]] for piece in unsound
        }
        proven = []
        if tier.leads:
            mine = [piece for piece, holding in elsewhere.items() if nodes.of_rank[rank] in holding]
            proven = [piece for piece in mine if not self._problem(piece)]
        sources = {
            piece: sender for sender, pieces in enumerate(tier.ranks.gather(proven, patient=True)) for piece in pieces
        }
        self._needed = [Transfer(piece, sources[piece], piece) for piece in sorted(unsound) if piece in sources]
        return [
            Damage(piece_name(piece), f"{problem}, and no other node has it whole")
            for piece, problem in sorted(unsound.items())
            if piece not in sources
        ]

    def load(self, state: dict[str, Tensor]) -> list[Damage]:
        tier, rank = self.owner, self.owner.ranks.rank
        self._bring(self._needed)
        read_piece(self._path(rank), state)
        # What a lost node doubled must be doubled again before the next node may be lost.
        here = ranks_held(tier.folder.at(self.step), self.manifest)  # by their sizes
        whole = tier.ranks.gather(here, patient=True)
        self._bring(transfer for transfer in tier.replication if transfer.piece not in whole[transfer.receiver])
        if tier.leads and readable_manifest(tier.folder.at(self.step)) != self.manifest:
            tier.folder.at(self.step).publish(self.manifest)
        return []

    def _bring(self, transfers: Iterable[Transfer]) -> None:
        tier, rank, transfers = self.owner, self.owner.ranks.rank, list(transfers)
        if not transfers:
            return
        agreement = Agreement(tier.ranks, tier.ranks.host)
        sizes = {transfer.piece: self._record(transfer.piece).size for transfer in transfers}
        incoming = [transfer.piece for transfer in transfers if transfer.receiver == rank]
        agreement.together(lambda: reserve((self._path(piece), sizes[piece]) for piece in incoming))
        files = {transfer.piece: self._path(transfer.piece) for transfer in transfers}
        carry_out(transfers, sizes, files, rank=rank, group=tier.ranks.host)
        problems = [problem for piece in incoming if (problem := self._problem(piece))]
        for problem in itertools.chain(*tier.ranks.gather(problems, patient=True)):
            raise OSError(f"a piece of step {self.step} was damaged on its way from a peer node: {problem}")

    def _problem(self, piece: int) -> str | None:
        return damage(self._path(piece), self._record(piece))

    def _record(self, piece: int) -> FileRecord:
        return self.manifest.files[piece_name(piece)]

    def _path(self, piece: int) -> Path:
        return self.owner.folder.at(self.step).path / piece_name(piece)


class ManagedTier:
    """HyperPod's Managed Tiered Checkpointing: pieces in the cluster's memory, held by its own service."""

    name = "managed"

    def __init__(self, every: int, service: ManagedService, ranks: Ranks, faults: Faults) -> None:
        self.every, self.service, self.ranks, self.faults = every, service, ranks, faults
        self.agreement = Agreement(ranks, ranks.saving)
        on_first_rank(ranks, service.open)

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        together = self.agreement.together
        records = together(lambda: self._put(step, state))
        self.faults.reach("managed.written", step)
        manifest = describe({piece_name(rank): record for rank, record in enumerate(records)})
        together(lambda: self.service.publish(manifest), first_rank_only=True)
        self.faults.reach("managed.published", step)
        return manifest.size

    def _put(self, step: int, state: dict[str, Tensor]) -> FileRecord:
        buffer = io.BytesIO()
        record = Piece.of(state).write(buffer)
        self.service.put(step, self.ranks.rank, buffer.getvalue())
        return record

    def offers(self) -> list[Offer]:
        manifests = on_first_rank(self.ranks, self.service.published)
        return [ManagedOffer(self, manifest) for manifest in manifests]

    def clear(self) -> None:
        if self.ranks.is_first:
            with contextlib.suppress(Exception):  # the service forgets old namespaces by itself
                self.service.drop()


class ManagedOffer:
    tier = "managed"

    def __init__(self, owner: ManagedTier, manifest: Manifest) -> None:
        self.owner, self.manifest, self.step = owner, manifest, manifest.step
        self.where = f"step {manifest.step} in the managed tier, {owner.service.namespace}"
        self._content = b""

    def prove(self) -> list[Damage]:
        rank = self.owner.ranks.rank
        name = piece_name(rank)
        self._content, problem = self.owner.service.proven(self.step, rank, self.manifest.files[name])
        problems = self.owner.ranks.gather(Damage(name, problem) if problem else None, patient=True)
        return [damaged for damaged in problems if damaged]

    def load(self, state: dict[str, Tensor]) -> list[Damage]:
        fill(bytearray(self._content), state)
        self._content = b""
        return []
