"""A checkpoint of any tier for a command: as a folder on disk that any number of ranks can read, or read in place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from windlass.checkpoint.browsing import FolderView, ManagedView, Row, StoreView, TierView, views
from windlass.checkpoint.folder import Checkpoint, CheckpointFolder, damage
from windlass.checkpoint.manifest import Manifest, piece_name
from windlass.checkpoint.proven import ProvenFiles
from windlass.checkpoint.stored import fetch_whole
from windlass.errors import UserError
from windlass.runfolder import RunFolder

Taken = TypeVar("Taken")


def obtain(
    folder: RunFolder,
    step: int | None = None,
    *,
    tier: str | None = None,
    to: Path | None = None,
) -> Checkpoint:
    """The checkpoint of a step, or the newest complete one, of the nearest tier that can give it whole.

    One of the run folder is taken where it lies; one of another tier is brought to `to`, or into the run folder.
    """
    target = CheckpointFolder(to or folder.checkpoints)
    return _from_nearest(folder, step, tier, lambda row, view: _bring(row, view, target, in_place=to is None))


def obtain_to_read(folder: RunFolder, step: int | None = None) -> Checkpoint | ProvenFiles:
    """As `obtain`, from the run folder first; but what a store has is not brought here."""
    own = CheckpointFolder(folder.checkpoints)

    def take(row: Row, view: TierView) -> Checkpoint | ProvenFiles:
        if isinstance(view, StoreView):
            return view.stored.files(row.step)
        return _bring(row, view, own, in_place=True)

    here = [checkpoint for checkpoint in own.complete() if step in (None, checkpoint.step)]
    return here[-1] if here else _from_nearest(folder, step, None, take)


def _from_nearest(
    folder: RunFolder, step: int | None, tier: str | None, take: Callable[[Row, TierView], Taken]
) -> Taken:
    complete = [(row, view) for view in views(folder, tier) for row in view.rows() if row.complete]
    offers = [(row, view) for row, view in complete if step is None or row.step == step]
    # The run folder first: what lies there needs no bringing. Then from the nearest on.
    offers.sort(key=lambda offer: (-offer[0].step, offer[0].tier != "shared"))
    problems = []
    for row, view in offers:
        try:
            return take(row, view)
        except (UserError, OSError) as error:
            problems.append(f"step {row.step} ({row.tier}): {error.what if isinstance(error, UserError) else error}")
    wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    others = ", ".join(map(str, sorted({row.step for row, _ in complete})))
    raise UserError(
        f"{wanted} of {folder.name} can be had" + (f" from the {tier} tier" if tier else ""),
        evidence="\n".join(problems) or (f"complete: {others}" if others else "nothing complete there"),
        fix=f"windlass ckpt ls {folder.name}",
    )


def _bring(row: Row, view: TierView, target: CheckpointFolder, *, in_place: bool) -> Checkpoint:
    if isinstance(view, StoreView):
        return fetch_whole(view.stored, row.step, target)
    if isinstance(view, FolderView) and view.name == "shared":
        return _copy(view.folder.at(row.step), target, in_place=in_place)
    if row.manifest is None:
        raise UserError("its manifest cannot be read")
    return _assemble(row.step, view, row.manifest, target)


def _copy(checkpoint: Checkpoint, target: CheckpointFolder, *, in_place: bool) -> Checkpoint:
    damage = next(iter(checkpoint.damages()), None)
    if damage:
        raise UserError(f"{damage.file} is damaged: {damage.reason}")
    if in_place or target.at(checkpoint.step).path.resolve() == checkpoint.path.resolve():
        return checkpoint
    copy, manifest = target.incoming(checkpoint.step), checkpoint.manifest()
    copy.begin()
    for name in manifest.files:
        shutil.copyfile(checkpoint.path / name, copy.path / name)
    copy.publish(manifest)
    return target.take(copy)


def _assemble(step: int, view: TierView, manifest: Manifest, target: CheckpointFolder) -> Checkpoint:
    """From the pieces of all ranks. A node has them all only of small clusters; elsewhere that is the error."""
    from windlass.trainer.checkpointing.pieces import assemble  # torch is needed for this alone

    with tempfile.TemporaryDirectory(prefix="windlass-pieces-") as scratch:
        place = Path(scratch)
        if isinstance(view, ManagedView):
            for rank in range(manifest.world_size):
                (place / piece_name(rank)).write_bytes(view.service.get(step, rank) or b"")
        elif isinstance(view, FolderView):
            place = view.folder.at(step).path
        for name, record in manifest.files.items():
            reason = damage(place / name, record)
            if reason:
                raise UserError(f"{name} on this node: {reason}")
        return assemble(place, manifest, target)
