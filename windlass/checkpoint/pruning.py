"""Which checkpoints of a run a command may delete, in every tier."""

from __future__ import annotations

import time
from collections.abc import Mapping

from windlass.checkpoint.browsing import Row, TierView, views
from windlass.checkpoint.folder import CheckpointFolder, expired_steps
from windlass.checkpoint.ownership import alone
from windlass.common.files import read_json_lines
from windlass.errors import UserError
from windlass.runfolder import RunFolder

LASTING = ("shared", "store")  # tiers that outlive the nodes
NODE_KEEP = 1  # a node tier needs its newest alone
RECENT_S = 600.0
ENDED = (["finished"], ["preempted"])
AFTERWARDS = ("exported", "exit", "notice-failed")  # what is recorded when training is over


def expired_rows(
    folder: RunFolder, tier: str | None, *, keep: int | None, keep_every: int | None
) -> list[tuple[TierView, Row]]:
    """Complete checkpoints beyond the newest `keep` and the multiples of `keep_every`, tier by tier."""
    spec = folder.load_run().checkpoint
    if keep == 0:
        _refuse_to_empty(folder, tier)
    deletable = []
    for view in views(folder, tier):
        rows = {row.step: row for row in view.rows() if row.complete}
        default = {"shared": spec.keep, "store": spec.store_keep or spec.keep}.get(view.name, NODE_KEEP)
        chosen = default if keep is None else keep
        every = (spec.keep_every if keep_every is None else keep_every) if view.name in LASTING else None
        newest = max(rows, default=0)
        best = best_of(folder, rows) if spec.keep_best else None
        kept = [best] if best is not None and chosen else []
        expired = expired_steps(rows, newest, keep=chosen, keep_every=every, protected=kept) if chosen else sorted(rows)
        deletable += [(view, rows[step]) for step in expired]
    return deletable


def _refuse_to_empty(folder: RunFolder, tier: str | None) -> None:
    """One tier may be emptied by its name, while the run folder or the store has what is newest in it."""
    if tier is None:
        raise UserError(
            "that would delete every checkpoint of the run",
            evidence="--keep 0 without --tier means all tiers",
            fix="--keep 1, or --keep 0 --tier NAME for one tier, or delete the run folder",
        )
    newest = {view.name: max((row.step for row in view.rows() if row.complete), default=-1) for view in views(folder)}
    others = [step for name, step in newest.items() if name in LASTING and name != tier]
    if newest.get(tier, -1) > max(others, default=-1):
        raise UserError(
            f"that would delete step {newest[tier]}, the newest of the run",
            evidence="the run folder and the store have "
            + (f"step {max(others)} at most" if max(others, default=-1) >= 0 else "none beside it"),
            fix="--keep 1, or delete the run folder",
        )


def clear_leftovers(folder: RunFolder, tier: str | None) -> int:
    """Not of a run that may be saving this very moment, except in a store, where only what is a day old goes."""
    shown = views(folder, tier)
    cleared = sum(view.clear_leftovers() for view in shown if view.name == "store")
    with alone(folder) as nobody_trains:
        if nobody_trains and not _wrote_recently(folder):
            cleared += sum(view.clear_leftovers() for view in shown if view.name != "store")
    return cleared


def _wrote_recently(folder: RunFolder) -> bool:
    """Where locks do not reach, a run that wrote a line or a file lately may still be at work."""
    history = list(read_json_lines(folder.history))
    if [record.get("event") for record in history if record.get("event") not in AFTERWARDS][-1:] in ENDED:
        return False
    written = [float(record.get("time") or 0) for record in (*history, *read_json_lines(folder.metrics))]
    touched = [checkpoint.touched() for checkpoint in CheckpointFolder(folder.checkpoints).unfinished()]
    return time.time() - max([*written, *touched], default=0.0) < RECENT_S


def best_of(folder: RunFolder, rows: Mapping[int, Row]) -> int | None:
    """Of these steps the one with the best validation loss: by the metrics here, and by what manifests say."""
    losses = validations(folder)
    for row in rows.values():
        known = row.manifest.validation if row.manifest else None
        if known:
            losses.setdefault(int(known["best_step"]), float(known["best_loss"]))
    validated = [step for step in rows if step in losses]
    return min(validated, key=lambda step: losses[step], default=None)


def validations(folder: RunFolder) -> dict[int, float]:
    """Validation losses by step, in order; of one that was repeated after a resume the later."""
    records = [record for record in read_json_lines(folder.metrics) if record.get("kind") == "validation"]
    return dict(sorted({int(record["step"]): float(record["loss"]) for record in records}.items()))


def best_step(folder: RunFolder) -> int:
    """The step with the best validation loss among the complete checkpoints of a run, in its folder or its store."""
    rows: dict[int, Row] = {}
    for tier in ("store", "shared") if folder.load_run().checkpoint.store else ("shared",):
        try:
            rows |= {row.step: row for view in views(folder, tier) for row in view.rows() if row.complete}
        except (UserError, OSError):  # a store that cannot be asked: what is here must do
            if tier == "shared":
                raise
    best = best_of(folder, rows)
    if best is None:
        raise UserError(
            f"no checkpoint of {folder.name} was validated",
            evidence=f"checkpoints of steps {', '.join(map(str, sorted(rows))) or 'none'}",
            fix="--step N; checkpoint.keep_best=true saves after the best validation",
        )
    return best
