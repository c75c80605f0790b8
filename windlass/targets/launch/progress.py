"""What a run folder records of a run: how far it is, how fast it goes, and how it ended."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from windlass.common.files import real, whole, words
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.launch.tail import newest_steps, records_since
from windlass.targets.protocol import ENDED, JobStatus

PACE_STEPS = 20
BEGINNINGS = ("submitted", "launched", "restart")

Record = Mapping[str, Any]


def with_progress(status: JobStatus, folder: RunFolder) -> JobStatus:
    """The status with step, loss and pace of the newest steps; of an attempt under way, its own alone."""
    steps = newest_steps(folder.metrics, PACE_STEPS)
    if not steps:
        return status
    last = steps[-1]
    if not status.ended and status.attempt is not None:
        steps = [step for step in steps if whole(step.get("attempt")) in (None, status.attempt)]
        if not steps:  # it goes on from a checkpoint, not from where the one before it died
            return replace(status, steps=whole(last.get("steps")))
    return replace(
        status,
        step=whole(last.get("step")),
        steps=whole(last.get("steps")),
        loss=real(last.get("loss")),
        tokens_per_s=pace(steps, "tokens_per_s"),
        eta=seconds_left(steps) if status.state == "running" else None,
    )


def pace(steps: Sequence[Record], key: str) -> float | None:
    """The median of the newest steps: a save or a first step among them counts for little."""
    values = [value for step in list(steps)[-PACE_STEPS:] if (value := real(step.get(key))) is not None]
    return statistics.median(values) if values else None


def seconds_left(steps: Sequence[Record]) -> float | None:
    """Time to the last step at the pace of the newest ones."""
    step_s = pace(steps, "step_s")
    last, step = (whole(steps[-1].get("steps")), whole(steps[-1].get("step"))) if steps else (None, None)
    return float(last - step) * step_s if step_s is not None and last is not None and step is not None else None


def newest_attempt(records: Iterable[Record]) -> int:
    """The highest number of an attempt that records name; 0 where there is none."""
    return max((whole(record.get("attempt")) or 0 for record in records), default=0)


def newest_since(history: Sequence[Record], events: Collection[str], beginnings: Collection[str]) -> Record | None:
    """The newest record of one of the events, unless one of the beginnings came after it."""
    for record in reversed(history):
        if record.get("event") in events:
            return record
        if record.get("event") in beginnings:
            return None
    return None


def end_by_ranks(history: Sequence[Record], beginnings: Collection[str]) -> dict[str, Any] | None:
    """The end that ranks recorded since the newest of the beginnings, for where nobody else recorded one."""
    record = newest_since(history, ("finished", "preempted"), beginnings)
    if record is None:
        return None
    code = ExitCode.OK if record["event"] == "finished" else ExitCode.PREEMPTED
    return {"state": record["event"], "exit_code": int(code)}


def since_launch(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of history.jsonl since the ranks were last launched."""
    return records_since(folder.history, lambda record: record.get("event") == "launched")


def end_since_launch(recent: Sequence[Record]) -> dict[str, Any] | None:
    """The last `exit` since the ranks were launched, whatever was recorded after it: an export, a pruning."""
    # `windlass.train` goes on with a run and launches nothing
    record = newest_since(recent, ("exit",), ("launched", "restart", "started", "resumed"))
    return _end(record) if record is not None else None


def is_stop_requested(records: Sequence[Record]) -> bool:
    """Whether somebody asked for the end, and the scheduler did not refuse to pass it on."""
    return newest_since(records, ("stop-requested",), ("stop-refused",)) is not None


def recorded_end(folder: RunFolder) -> JobStatus | None:
    """The end that a job on a cluster recorded; None if it has not, or was submitted again since."""
    recent = records_since(folder.history, lambda record: record.get("event") == "submitted")
    record = newest_since(recent, ("exit",), BEGINNINGS)
    if record is None:
        return None
    end = _end(record)
    before = list(itertools.takewhile(lambda earlier: earlier is not record, recent))
    # it left because its owner said stop, not for its machine
    if end["state"] == "preempted" and is_stop_requested(before):
        end |= {"state": "stopped", "reason": "stopped by `windlass stop`; saved first"}
    return with_progress(JobStatus(**end, attempt=newest_attempt(recent)), folder)


def _end(record: Record) -> dict[str, Any]:
    state = words(record.get("state"))
    code = whole(record.get("code"))
    return {
        "state": state if state in ENDED else "failed",
        "exit_code": int(ExitCode.FAILED) if code is None else code,
        "reason": words(record.get("reason")),
    }
