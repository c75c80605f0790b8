"""Begin a new run with a checkpoint of another: it is linked into the new run's folder as if that had saved it."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.checkpoint import CheckpointFolder
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.trainer.resuming import different_order

log = logging.getLogger(__name__)


def take_over(branch_from: str, folder: RunFolder, *, order: dict[str, Any]) -> None:
    """Put the checkpoint `RUN@STEP` of a run beside this one into this run's folder. Rank 0 calls it."""
    name, _, step = branch_from.rpartition("@")
    source = RunFolder(folder.path.parent / name)
    checkpoint = CheckpointFolder(source.checkpoints).choose(int(step))
    damages = list(checkpoint.damages())
    if damages:
        raise UserError(
            f"{branch_from} cannot be branched from: it is damaged",
            evidence="\n".join(f"{one.file}: {one.reason}" for one in damages),
            fix=f"windlass ckpt ls {name}    lists the others",
        )
    manifest = checkpoint.manifest()
    changed = different_order(manifest, order)
    if changed:  # other data begins at its beginning; where the old data stood says nothing about it
        manifest = replace(manifest, order=order, data_state=None, sequences=0)
    own = CheckpointFolder(folder.checkpoints).at(checkpoint.step)
    own.path.mkdir(parents=True, exist_ok=True)
    try:
        for file in manifest.files:
            _link(checkpoint.path / file, own.path / file)
    except FileNotFoundError as error:
        raise UserError(
            f"{branch_from} was removed while it was branched from",
            evidence=str(error),
            cause=f"{name} still trains, and keeps its newest checkpoints only",
            fix=f"--from {name}    takes its newest",
        ) from None
    own.publish(replace(manifest, validation=None))  # the best of another run is not this one's
    data = f"other data, from its beginning: {'; '.join(changed)}" if changed else "the data goes on"
    folder.record("branched", source=name, step=checkpoint.step, data=data)
    log.info("branched from step %d of %s; %s", checkpoint.step, name, data)


def _link(source: Path, to: Path) -> None:
    """Files of a checkpoint never change, so both runs can share them; where links are not possible they are copied."""
    to.unlink(missing_ok=True)
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)
