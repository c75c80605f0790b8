"""The checkpoints of a run in every tier, for commands: listed, proven, deleted. Node tiers: as this node sees them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from windlass.checkpoint.folder import NODE_TIERS, TIERS, Checkpoint, CheckpointFolder, Damage
from windlass.checkpoint.managed import ManagedService
from windlass.checkpoint.manifest import MANIFEST_NAME, Manifest, piece_name
from windlass.checkpoint.ownership import read_id
from windlass.checkpoint.pieces import pieces_here, readable_manifest
from windlass.checkpoint.proven import ProvenFiles
from windlass.checkpoint.stored import StoredCheckpoint, StoredCheckpoints, current_id
from windlass.common.files import read_json_lines
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.store import StoreOptions, open_store

PATIENCE_S = 30.0  # of a command, where a person waits


@dataclass(frozen=True)
class Row:
    """One checkpoint in a listing."""

    tier: str
    step: int
    path: str
    complete: bool
    size: int
    manifest: Manifest | None

    def as_dict(self) -> dict[str, Any]:
        known = self.manifest
        return {
            "tier": self.tier,
            "step": self.step,
            "path": self.path,
            "complete": self.complete,
            "bytes": self.size,
            "created": known.created if known else None,
            "world_size": known.world_size if known else None,
            "tokens": known.tokens if known else None,
        }


class TierView(Protocol):
    @property
    def name(self) -> str: ...

    def rows(self) -> list[Row]: ...

    def damages(self, step: int) -> Iterator[Damage]:
        """Every file that is not as it was written. Reads all of them."""
        ...

    def has(self, step: int) -> bool:
        """Whether a complete checkpoint of this step is there now."""
        ...

    def delete(self, step: int) -> None: ...

    def clear_leftovers(self) -> int:
        """Give back the room of what was cut off; how many."""
        ...


@dataclass(frozen=True)
class FolderView:
    """The run folder, or what this node holds of a node tier."""

    name: str
    folder: CheckpointFolder

    def rows(self) -> list[Row]:
        return [self._row(checkpoint) for checkpoint in self.folder.all()]

    def _row(self, checkpoint: Checkpoint) -> Row:
        manifest = readable_manifest(checkpoint)
        size = manifest.size if manifest and self.name == "shared" else checkpoint.size_on_disk()
        return Row(self.name, checkpoint.step, str(checkpoint.path), checkpoint.complete, size, manifest)

    def damages(self, step: int) -> Iterator[Damage]:
        """Of a node tier only the pieces that are here: others may be on other nodes."""
        checkpoint = self.folder.at(step)
        for damaged in checkpoint.damages():
            if self.name == "shared" or damaged.file == MANIFEST_NAME or (checkpoint.path / damaged.file).exists():
                yield damaged

    def has(self, step: int) -> bool:
        return self.folder.at(step).complete

    def delete(self, step: int) -> None:
        self.folder.at(step).delete()

    def clear_leftovers(self) -> int:
        leftovers, scratch = self.folder.unfinished(), self.folder.scratch()
        for checkpoint in leftovers:
            checkpoint.delete()
        for path in scratch:
            shutil.rmtree(path, ignore_errors=True)
        return len(leftovers) + len(scratch)


@dataclass(frozen=True)
class StoreView:
    stored: StoredCheckpoints
    name: str = "store"

    def rows(self) -> list[Row]:
        return [self._row(checkpoint) for checkpoint in self.stored.all()]

    def _row(self, checkpoint: StoredCheckpoint) -> Row:
        manifest = None
        if checkpoint.complete:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                manifest = self.stored.manifest(checkpoint.step)
        url = f"{self.stored.store.url}/{checkpoint.name}"
        return Row("store", checkpoint.step, url, checkpoint.complete, checkpoint.size, manifest)

    def damages(self, step: int) -> Iterator[Damage]:
        try:
            manifest = self.stored.manifest(step)
        except (OSError, ValueError, TypeError, KeyError) as error:
            yield Damage(MANIFEST_NAME, str(error) or type(error).__name__)
            return
        yield from ProvenFiles(self.stored.at(step), manifest).damages()

    def has(self, step: int) -> bool:
        return any(checkpoint.step == step for checkpoint in self.stored.complete())

    def delete(self, step: int) -> None:
        for checkpoint in self.stored.all():
            if checkpoint.step == step:
                self.stored.delete(checkpoint)

    def clear_leftovers(self) -> int:
        return sum(self.stored.clear_leftovers())


@dataclass(frozen=True)
class ManagedView:
    service: ManagedService
    name: str = "managed"

    def rows(self) -> list[Row]:
        url = f"{self.service.endpoint}/{self.service.namespace}"
        published = self.service.published()
        return [Row("managed", manifest.step, url, True, manifest.size, manifest) for manifest in published]

    def damages(self, step: int) -> Iterator[Damage]:
        manifest = self.service.manifest(step)
        if manifest is None:
            return
        for rank in range(manifest.world_size):
            name = piece_name(rank)
            _, problem = self.service.proven(step, rank, manifest.files[name])
            if problem:
                yield Damage(name, problem)

    def has(self, step: int) -> bool:
        return any(manifest.step == step for manifest in self.service.published())

    def delete(self, step: int) -> None:
        manifest = self.service.manifest(step)
        if manifest:
            self.service.delete(step, manifest.world_size)

    def clear_leftovers(self) -> int:
        return 0  # the service keeps three steps, whatever they are


def views(folder: RunFolder, tier: str | None = None) -> list[TierView]:
    """The tiers that a run has, nearest first; or only `tier`."""
    shown = [view for name in TIERS if (tier in (None, name)) and (view := _view(folder, name))]
    if tier and not shown:
        raise UserError(
            f"the run {folder.name} has no {tier} tier",
            evidence=f"{folder.run_file}: checkpoint.{'store' if tier == 'store' else f'{tier}_every'} is not set",
            fix=f"windlass ckpt ls {folder.name}",
        )
    return shown


def _view(folder: RunFolder, name: str) -> TierView | None:
    if name == "shared":
        return FolderView(name, CheckpointFolder(folder.checkpoints))
    spec = folder.load_run().checkpoint
    if name in NODE_TIERS:
        here = pieces_here(folder, spec, name)
        return FolderView(name, here) if here else None
    run_id = read_id(folder)
    if name == "managed":
        last = _world_size(folder)
        if spec.managed_every is None or run_id is None or last is None:
            return None
        endpoint = spec.managed_endpoint
        return ManagedView(ManagedService.connect(folder.name, run_id, rank=0, world_size=last, endpoint=endpoint))
    if not spec.store:
        return None
    store = open_store(spec.store, StoreOptions(patience_s=PATIENCE_S))
    run_id = run_id or current_id(store, folder.name)
    return StoreView(StoredCheckpoints.of_run(store, folder.name, run_id)) if run_id else None


def _world_size(folder: RunFolder) -> int | None:
    """Of the attempt that came last: the managed service has a namespace for each number of ranks."""
    sizes = [record["world_size"] for record in read_json_lines(folder.history) if "world_size" in record]
    return int(sizes[-1]) if sizes else None
