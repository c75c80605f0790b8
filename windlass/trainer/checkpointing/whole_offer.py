"""A step in the run folder or in a store, for a resume: ranks of any number and layout read the blocks they need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint import Manifest
from windlass.checkpoint.folder import Damage
from windlass.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from windlass.checkpoint.pickles import UnsafePickleError
from windlass.checkpoint.proven import DamagedError, ProvenFiles
from windlass.errors import ExitCode, UserError
from windlass.store import Store
from windlass.trainer.checkpointing.blocks import Readers
from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.checkpointing.tensor_files import TensorReader
from windlass.trainer.distributed.agreement import on_every_rank, on_first_rank, root_cause
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)
Value = TypeVar("Value")


class WholeOffer:
    def __init__(self, tier: str, step: int, place: Store, ranks: Ranks, faults: Faults) -> None:
        self.tier, self.step, self.place, self.ranks, self.faults = tier, step, place, ranks, faults
        self.where = place.url
        self._manifest: Manifest | None = None
        self._description = b""

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "known after prove"
        return self._manifest

    def prove(self) -> list[Damage]:
        """What the manifest, a listing and DCP's description say: rank 0 reads them for all. Tensors are proven while
        they are loaded; only files of older versions, which have no proofs of blocks, are read here.
        """
        self._manifest, self._description, damages = on_first_rank(self.ranks, lambda: self._in_reach(self._open))
        if not damages:
            on_every_rank(self.ranks, lambda: damages.extend(self._in_reach(self._unproven_damages)))
            damages = [damage for part in self.ranks.gather(damages, patient=True) for damage in part]
        return sorted(set(damages))

    def load(self, state: dict[str, Tensor]) -> list[Damage]:
        nodes = Nodes.meet(self.ranks, "")
        files = ProvenFiles(self.place, self.manifest)
        self.faults.reach("restore.begin", self.step)
        reader = TensorReader(files, Readers(self.ranks, nodes), self._description)
        dcp.load(state, storage_reader=reader, process_group=self.ranks.patient or self.ranks.saving)
        self._description = b""
        on_every_rank(self.ranks, lambda: self._in_reach(reader.blocks.check_reached))
        outcomes = self.ranks.gather((reader.blocks.bytes_read, reader.blocks.problems), patient=True)
        if self.ranks.is_first:
            read, size = (amount / 2**20 for amount in (sum(read for read, _ in outcomes), self.manifest.size))
            log.info("step %d: %.1f MiB read and proven, of %.1f MiB in %s", self.step, read, size, self.where)
        return sorted({damage for _, problems in outcomes for damage in problems})

    def _open(self) -> tuple[Manifest | None, bytes, list[Damage]]:
        manifest, description = None, b""
        try:
            manifest = Manifest.parse(self.place.read(MANIFEST_NAME).decode("utf-8"), step=self.step)
            files = ProvenFiles(self.place, manifest)
            damages = files.misfits()
            if not damages:
                description = files.read(METADATA_NAME)
                TensorReader(files, description=description).read_metadata()
        except DamagedError as error:
            damages = [error.damage]
        except UnsafePickleError as error:
            damages = [Damage(METADATA_NAME, str(error))]
        except (OSError, ValueError, TypeError, KeyError) as error:
            damages = [Damage(MANIFEST_NAME, str(error) or type(error).__name__)]
        return manifest, description, damages

    def _unproven_damages(self) -> list[Damage]:
        files = ProvenFiles(self.place, self.manifest)
        return list(files.damages(files.unproven()[self.ranks.rank :: self.ranks.world_size]))

    def _in_reach(self, action: Callable[[], Value]) -> Value:
        """A store that does not answer says nothing about the step: to go on from an older one would be a loss."""
        try:
            return action()
        except UserError as error:
            raise UserError(
                f"step {self.step} cannot be read from {self.where}",
                evidence=root_cause(error),
                cause="it may be whole: to go on from an older step would throw away what was trained since",
                fix="start the run again when the store answers",
                exit_code=ExitCode.FAILED,
            ) from None
