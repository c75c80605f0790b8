"""What a run folder records of a run: how far it is, how fast it goes, and how it ended."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windlass.common.files import real, whole, words
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.launch.tail import newest_steps, records_since
from windlass.targets.protocol import ENDED, JobStatus

PACE_STEPS = 20
BEGINNINGS = ("submitted", "launched", "restart")
STOPS = ("stop-requested", "stop-refused")

Record = Mapping[str, Any]


def with_progress(status: JobStatus, folder: RunFolder) -> JobStatus:
    """The status with step, loss and pace of the newest steps."""
    steps = newest_steps(folder.metrics, PACE_STEPS)
    if not steps:
        return status
    last = steps[-1]
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


def since_launch(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of history.jsonl since the ranks were last launched."""
    return records_since(folder.history, lambda record: record.get("event") == "launched")


def end_since_launch(recent: Sequence[Record]) -> dict[str, Any] | None:
    """The last `exit` since the ranks were launched, whatever was recorded after it: an export, a pruning."""
    for record in reversed(recent):
        if record.get("event") == "exit":
            return _end(record)
        if record.get("event") in ("launched", "restart"):
            return None
    return None


def recorded_end(folder: RunFolder) -> JobStatus | None:
    """The end that a job on a cluster recorded; None if it has not, or was submitted again since."""
    recent = records_since(folder.history, lambda record: record.get("event") == "submitted")
    for index in reversed(range(len(recent))):
        record = recent[index]
        if record.get("event") == "exit":
            attempt = max((whole(earlier.get("attempt")) or 0 for earlier in recent), default=0)
            stops = [earlier["event"] for earlier in recent[:index] if earlier.get("event") in STOPS]
            end = _end(record)
            # the scheduler did not refuse to pass it on: it left because its owner said stop, not for its machine
            if end["state"] == "preempted" and stops[-1:] == ["stop-requested"]:
                end |= {"state": "stopped", "reason": "stopped by `windlass stop`; saved first"}
            return with_progress(JobStatus(**end, attempt=attempt), folder)
        if record.get("event") in BEGINNINGS:
            return None
    return None


def _end(record: Record) -> dict[str, Any]:
    state = words(record.get("state"))
    code = whole(record.get("code"))
    return {
        "state": state if state in ENDED else "failed",
        "exit_code": int(ExitCode.FAILED) if code is None else code,
        "reason": words(record.get("reason")),
    }
