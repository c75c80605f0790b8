"""Find the newest checkpoint that is whole and is this run's, and load it on any number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.trainer.ranks import Ranks

log = logging.getLogger(__name__)


def newest_whole(folder: RunFolder, ranks: Ranks) -> Checkpoint | None:
    """The newest checkpoint whose every file is as it was written; damaged ones are named and passed over.

    Each rank reads its share of the files, so proving a checkpoint costs about what loading it costs.
    """
    checkpoints = CheckpointFolder(folder.checkpoints)
    steps = ranks.broadcast([one.step for one in checkpoints.complete()])
    for step in reversed(steps):
        checkpoint = checkpoints.at(step)
        mine = list(checkpoint.damages(share=(ranks.rank, ranks.world_size)))
        damages = sorted({(one.file, one.reason) for part in ranks.gather(mine) for one in part})
        if not damages:
            return checkpoint
        for file, reason in damages if ranks.is_first else ():
            log.warning("checkpoint %s is damaged and passed over: %s: %s", checkpoint.name, file, reason)
            folder.record("checkpoint-damaged", checkpoint=checkpoint.name, file=file, reason=reason)
    if steps:
        raise UserError(
            f"none of the {len(steps)} checkpoints of this run is whole",
            evidence=f"steps {', '.join(map(str, steps))}; `windlass ckpt verify {folder.name}` names the files",
            fix="restore one of them, or begin again with --fresh",
        )
    return None


def check_same_run(manifest: Manifest, *, model: dict[str, Any], order: dict[str, Any], where: str) -> None:
    """A checkpoint of another model, or of other data in another order, must not be continued by accident."""
    if manifest.model["fingerprint"] != model["fingerprint"]:
        theirs, ours = manifest.model["config"], model["config"]
        different = [
            f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key)
        ]
        raise UserError(
            f"{where} is of another model",
            evidence="\n".join(different[:6]) or "parameter names or shapes differ",
            fix="give this run another name (name=…), or begin again with --fresh",
        )
    different = [
        f"{key}: {manifest.order.get(key)!r} there, {order.get(key)!r} here"
        for key in sorted({*manifest.order, *order})
        if manifest.order.get(key) != order.get(key)
    ]
    if different:
        raise UserError(
            f"{where} was made with other data or another order",
            evidence="\n".join(different),
            cause="going on would read some sequences twice and others never",
            fix="give this run another name (name=…), or begin again with --fresh",
        )


def load_state(checkpoint: Checkpoint, state: dict[str, Tensor], ranks: Ranks) -> None:
    """Read a checkpoint into existing tensors, in place: no second copy of the model is made."""
    reader = dcp.FileSystemReader(checkpoint.path)
    dcp.load(state, storage_reader=reader, process_group=ranks.saving)
