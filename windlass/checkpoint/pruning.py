"""Which checkpoints of a run a command may delete, in every tier."""

from __future__ import annotations

import time
from collections.abc import Iterable

from windlass.checkpoint.browsing import Row, TierView, views
from windlass.checkpoint.folder import expired_steps
from windlass.errors import UserError
from windlass.runfolder import RunFolder, read_json_lines

NODE_KEEP = 1  # a node tier needs its newest alone
RECENT_S = 600.0


def expired_rows(
    folder: RunFolder, tier: str | None, *, keep: int | None, keep_every: int | None
) -> list[tuple[TierView, Row]]:
    """Complete checkpoints beyond the newest `keep` and the multiples of `keep_every`, tier by tier."""
    spec = folder.load_run().checkpoint
    found = []
    for view in views(folder, tier):
        rows = {row.step: row for row in view.rows() if row.complete}
        default = {"shared": spec.keep, "store": spec.store_keep or spec.keep}.get(view.name, NODE_KEEP)
        chosen = default if keep is None else keep
        if chosen == 0 and view.name in ("shared", "store") and len(views(folder)) == 1:
            raise UserError("that would delete every checkpoint of the run", fix="--keep 1, or delete the run folder")
        every = (spec.keep_every if keep_every is None else keep_every) if view.name in ("shared", "store") else None
        newest = max(rows, default=0)
        best = _best(folder, rows) if spec.keep_best and chosen else []
        gone = expired_steps(rows, newest, keep=chosen, keep_every=every, protected=best) if chosen else sorted(rows)
        found += [(view, rows[step]) for step in gone]
    return found


def clear_leftovers(folder: RunFolder, tier: str | None) -> int:
    """Not of a run that may be saving this very moment, except in a store, where only what is a day old goes."""
    at_work = _spoke_recently(folder)
    return sum(view.clear_leftovers() for view in views(folder, tier) if view.name == "store" or not at_work)


def _spoke_recently(folder: RunFolder) -> bool:
    last = 0.0
    for path in (folder.metrics, folder.history):
        for record in read_json_lines(path):
            last = max(last, float(record.get("time") or 0))
    ended = [one["event"] for one in read_json_lines(folder.history)][-1:]
    return time.time() - last < RECENT_S and ended not in (["finished"], ["preempted"], ["exported"])


def _best(folder: RunFolder, steps: Iterable[int]) -> list[int]:
    """Of these steps the one with the best validation loss, if any was validated."""
    records = [record for record in read_json_lines(folder.metrics) if record.get("kind") == "validation"]
    losses = {int(record["step"]): float(record["loss"]) for record in records}
    validated = [step for step in steps if step in losses]
    return [min(validated, key=lambda step: losses[step])] if validated else []
