"""The run folder as a tier: torch DCP files that any number of ranks can read, published by one rename."""

from __future__ import annotations

import contextlib

from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest
from windlass.spec.checkpoint import CheckpointSection
from windlass.store import FolderStore
from windlass.trainer.checkpointing.tensor_files import save_tensors
from windlass.trainer.checkpointing.tiers import Describe, Offer
from windlass.trainer.checkpointing.whole_offer import WholeOffer
from windlass.trainer.distributed.agreement import Agreement, SaveFailedError
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks


class SharedTier:
    name = "shared"

    def __init__(
        self, spec: CheckpointSection, folder: CheckpointFolder, ranks: Ranks, faults: Faults, *, is_shared: bool
    ) -> None:
        self.every, self.folder, self.ranks, self.faults = spec.every, folder, ranks, faults
        self.is_shared = is_shared  # otherwise each node may have a folder of its own
        self.agreement = Agreement(ranks, ranks.saving)

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        checkpoint, together = self.folder.at(step), self.agreement.together
        place = FolderStore(checkpoint.path)
        self.faults.reach("save.staged", step)
        try:
            together(checkpoint.begin, first_rank_only=True)
            records = together(lambda: save_tensors(state, place, self.ranks.saving))
            self.faults.reach("save.written", step)
            files = {name: record for part in records for name, record in part.items()}
            together(lambda: self._publish(checkpoint, describe(files)), first_rank_only=True)
        except SaveFailedError:
            if self.ranks.is_first:
                with contextlib.suppress(OSError):  # the failure itself may be that nothing can be done there
                    checkpoint.delete()
            raise
        self.faults.reach("save.published", step)
        return sum(record.size for record in files.values())

    def offers(self) -> list[Offer]:
        if self.ranks.is_first:
            with contextlib.suppress(OSError):  # a folder that cannot be written to can be read
                self.folder.recover()
        steps = self.ranks.broadcast([checkpoint.step for checkpoint in self.folder.complete()], patient=True)
        if not self.is_shared:  # only what all ranks see is of use
            seen = self.ranks.gather({checkpoint.step for checkpoint in self.folder.complete()}, patient=True)
            steps = sorted(set.intersection(*seen))
        return [self._offer(self.folder.at(step)) for step in steps]

    def _offer(self, checkpoint: Checkpoint) -> WholeOffer:
        return WholeOffer(self.name, checkpoint.step, FolderStore(checkpoint.path), self.ranks, self.faults)

    def _publish(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.faults.reach("save.manifest", checkpoint.step)
        checkpoint.publish(manifest)
