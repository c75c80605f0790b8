"""HyperPod's Managed Tiered Checkpointing as a tier: pieces in the cluster's memory, held by its own service."""

from __future__ import annotations

import contextlib
import hashlib
import io

from torch import Tensor

from windlass.checkpoint import FileRecord, Manifest
from windlass.checkpoint.managed import ManagedService
from windlass.checkpoint.pieces import piece_name
from windlass.trainer.checkpointing.pieces import Piece, fill
from windlass.trainer.checkpointing.tiers import Describe, Offer
from windlass.trainer.distributed.agreement import Agreement, on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks


class ManagedTier:
    name = "managed"

    def __init__(self, every: int, service: ManagedService, ranks: Ranks, faults: Faults) -> None:
        self.every, self.service, self.ranks, self.faults = every, service, ranks, faults
        self.agreement = Agreement(ranks, ranks.saving)
        on_first_rank(ranks, service.open)

    def due(self, step: int) -> bool:
        return step % self.every == 0

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
        found = on_first_rank(self.ranks, self.service.published)
        return [ManagedOffer(self, manifest) for manifest in found]

    def clear(self) -> None:
        if self.ranks.is_first:
            with contextlib.suppress(Exception):  # the service forgets old namespaces by itself
                self.service.drop()


class ManagedOffer:
    tier = "managed"

    def __init__(self, owner: ManagedTier, manifest: Manifest) -> None:
        self.owner, self.manifest, self.step = owner, manifest, manifest.step
        self.where = f"step {manifest.step} in the managed tier, {owner.service.namespace}"
        self._content: bytes | None = None

    def prove(self) -> list[tuple[str, str]]:
        rank = self.owner.ranks.rank
        name = piece_name(rank)
        record = self.manifest.files[name]
        problem = None
        try:
            self._content = self.owner.service.get(self.step, rank)
        except Exception as error:
            problem = str(error) or type(error).__name__
        if problem is None and self._content is None:
            problem = "it is missing"
        if problem is None and hashlib.sha256(self._content or b"").hexdigest() != record.sha256:
            problem = "its contents changed: the SHA-256 does not match the manifest"
        return [found for found in self.owner.ranks.gather((name, problem) if problem else None, patient=True) if found]

    def load(self, state: dict[str, Tensor]) -> None:
        fill(bytearray(self._content or b""), state)
        self._content = None
