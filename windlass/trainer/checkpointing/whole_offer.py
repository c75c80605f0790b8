"""A step in the run folder or in a store, for a resume: ranks of any number and layout read the blocks they need."""

from __future__ import annotations

import logging

import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint import Manifest
from windlass.checkpoint.folder import Damage
from windlass.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from windlass.checkpoint.pickles import UnsafePickleError
from windlass.checkpoint.proven import DamagedError, ProvenFiles
from windlass.errors import UserError
from windlass.store import Store
from windlass.trainer.checkpointing.blocks import Readers
from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.checkpointing.tensor_files import TensorReader
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)


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

    def prove(self) -> list[tuple[str, str]]:
        """What the manifest, a listing and DCP's description say: rank 0 reads them for all. Tensors are proven while
        they are loaded; only files of older versions, which have no proofs of blocks, are read here.
        """
        damages = self._open() if self.ranks.is_first else []
        opened = self.ranks.broadcast((self._manifest, self._description, damages), patient=True)
        self._manifest, self._description, damages = opened
        if not damages:
            files = ProvenFiles(self.place, self.manifest)
            damages = list(files.damages(files.unproven()[self.ranks.rank :: self.ranks.world_size]))
            damages = [damage for part in self.ranks.gather(damages, patient=True) for damage in part]
        return _as_pairs(damages)

    def load(self, state: dict[str, Tensor]) -> list[tuple[str, str]]:
        nodes = Nodes.meet(self.ranks, "")
        files = ProvenFiles(self.place, self.manifest)
        self.faults.reach("restore.begin", self.step)
        reader = TensorReader(files, Readers(self.ranks, nodes), self._description)
        dcp.load(state, storage_reader=reader, process_group=self.ranks.patient or self.ranks.saving)
        self._description = b""
        outcomes = self.ranks.gather((reader.blocks.bytes_read, reader.blocks.problems), patient=True)
        if self.ranks.is_first:
            read, size = (amount / 2**20 for amount in (sum(read for read, _ in outcomes), self.manifest.size))
            log.info("step %d: %.1f MiB read and proven, of %.1f MiB in %s", self.step, read, size, self.where)
        return _as_pairs([damage for _, problems in outcomes for damage in problems])

    def _open(self) -> list[Damage]:
        try:
            self._manifest = Manifest.parse(self.place.read(MANIFEST_NAME).decode("utf-8"), step=self.step)
            files = ProvenFiles(self.place, self._manifest)
            damages = files.misfits()
            if not damages:
                self._description = files.read(METADATA_NAME)
                TensorReader(files, description=self._description).read_metadata()
        except DamagedError as error:
            return [error.damage]
        except UnsafePickleError as error:
            return [Damage(METADATA_NAME, str(error))]
        except (UserError, OSError, ValueError, TypeError, KeyError) as error:
            return [Damage(MANIFEST_NAME, str(error) or type(error).__name__)]
        return damages


def _as_pairs(damages: list[Damage]) -> list[tuple[str, str]]:
    return sorted({(damage.file, damage.reason) for damage in damages})
