"""The run folder as a tier: torch DCP files that any number of ranks can read, published by one rename."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from windlass.checkpoint import Checkpoint, CheckpointFolder, FileRecord, Manifest, hash_file
from windlass.checkpoint.manifest import METADATA_NAME
from windlass.checkpoint.pickles import UnsafePickleError, load_pickle
from windlass.spec.checkpoint import CheckpointSection
from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.checkpointing.tiers import Describe, Offer
from windlass.trainer.distributed.agreement import Agreement, SaveFailedError
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks


class SharedTier:
    name = "shared"

    def __init__(
        self, spec: CheckpointSection, folder: CheckpointFolder, ranks: Ranks, faults: Faults, nodes: Nodes
    ) -> None:
        self.spec, self.folder, self.ranks, self.faults = spec, folder, ranks, faults
        self.nodes = nodes  # several where each has a run folder of its own: it holds that node's files alone
        self.leads = nodes.is_first_of_node(ranks.rank)
        self.agreement = Agreement(ranks, ranks.saving)

    def due(self, step: int) -> bool:
        return step % self.spec.every == 0

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        checkpoint, together = self.folder.at(step), self.agreement.together
        self.faults.reach("save.staged", step)
        try:
            together(lambda: _make_room(checkpoint) if self.leads else None)
            together(lambda: self._write_tensors(checkpoint, state))
            self.faults.reach("save.written", step)
            records = together(lambda: self._hash_own_files(checkpoint))
            self.faults.reach("save.hashed", step)
            files = {name: record for part in records for name, record in part.items()}
            together(lambda: self._publish(checkpoint, describe(files)) if self.leads else None)
        except SaveFailedError:
            if self.leads:
                with contextlib.suppress(OSError):  # the failure itself may be that nothing can be done there
                    checkpoint.delete()
            raise
        self.faults.reach("save.published", step)
        return sum(record.size for record in files.values())

    def offers(self) -> list[Offer]:
        if self.nodes.count > 1:
            return []  # no node has a whole one: the store does
        if self.ranks.is_first:
            with contextlib.suppress(OSError):  # a folder that cannot be written to can be read
                self.folder.recover()
        steps = self.ranks.broadcast([checkpoint.step for checkpoint in self.folder.complete()], patient=True)
        return [SharedOffer(self.folder.at(step), self.ranks) for step in steps]

    def clear(self) -> None:
        """Never: this is what a run leaves behind."""

    def _write_tensors(self, checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
        writer = _Writer(checkpoint.path, sync_files=True, overwrite=True)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)  # which rank writes what is worked out once
        dcp.save(state, storage_writer=writer, planner=planner, process_group=self.ranks.saving)

    def _hash_own_files(self, checkpoint: Checkpoint) -> dict[str, FileRecord]:
        mine = written_by(self.ranks.rank, (path.name for path in checkpoint.path.iterdir()))
        return {name: hash_file(checkpoint.path / name) for name in mine}

    def _publish(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.faults.reach("save.manifest", checkpoint.step)
        checkpoint.publish(manifest)


def written_by(rank: int, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and name == METADATA_NAME)]


class SharedOffer:
    tier = "shared"

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self.checkpoint, self.ranks = checkpoint, ranks
        self.step, self.where = checkpoint.step, str(checkpoint.path)

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest()

    def prove(self) -> list[tuple[str, str]]:
        """Each rank reads its share of the files, so proving a checkpoint costs about what loading it costs."""
        mine = list(self.checkpoint.damages(share=(self.ranks.rank, self.ranks.world_size)))
        return sorted(
            {(damage.file, damage.reason) for part in self.ranks.gather(mine, patient=True) for damage in part}
        )

    def load(self, state: dict[str, Tensor]) -> None:
        load_state(self.checkpoint, state, self.ranks)


def load_state(checkpoint: Checkpoint, state: dict[str, Tensor], ranks: Ranks) -> None:
    """Read a checkpoint into existing tensors, in place: no second copy of the model is made."""
    dcp.load(state, storage_reader=TensorReader(checkpoint.path), process_group=ranks.saving)


class TensorReader(dcp.FileSystemReader):
    """DCP's reader, except that the pickle that describes the tensors is read once, and can do nothing but that."""

    @functools.cached_property
    def description(self) -> Metadata:
        metadata = load_pickle((Path(self.path) / METADATA_NAME).read_bytes())
        if not isinstance(metadata, Metadata):
            raise UnsafePickleError("it is not DCP's description of tensors")
        return metadata

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        metadata = self.description
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _make_room(checkpoint: Checkpoint) -> None:
    checkpoint.delete()  # what an earlier, killed save of the same step left
    checkpoint.path.mkdir(parents=True)


class _Writer(dcp.FileSystemWriter):
    """A writer whose failures name the file system's error: torch.save covers it with one about its own offsets."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            below: BaseException | None = error
            while below is not None and not isinstance(below, OSError):
                below = below.__context__
            raise below or error from None
