"""Where a Slurm run stands: its own records first, Slurm's word where they are silent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import ExitCode
from windlass.runfolder import RunFolder, read_json_lines
from windlass.targets.local.machine import free_bytes
from windlass.targets.local.state import with_progress
from windlass.targets.protocol import JobStatus, State
from windlass.targets.slurm.queue import QueuedJob
from windlass.targets.slurm.reasons import ENDS, explain

JOB_FILE = "slurm.json"
FULL_BYTES = 2**16
ON_NODES = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"))
IN_QUEUE = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
ENDED_AS: Mapping[str, tuple[State, ExitCode]] = {
    "CANCELLED": ("stopped", ExitCode.INTERRUPTED),
    "PREEMPTED": ("preempted", ExitCode.PREEMPTED),
    "COMPLETED": ("finished", ExitCode.OK),
}


@dataclass(frozen=True)
class SubmittedJob:
    """The job of a run folder: its number (`12`, or `12_3` in an array) and the login node it went through."""

    number: str
    host: str | None

    def as_dict(self) -> dict[str, Any]:
        return {"job": self.number, "host": self.host}

    @classmethod
    def of(cls, folder: RunFolder) -> SubmittedJob | None:
        try:
            value = json.loads((folder.path / JOB_FILE).read_text())
            return cls(str(value["job"]), value["host"])
        except (FileNotFoundError, ValueError, KeyError):
            return None


def status_of(folder: RunFolder, job: SubmittedJob, queued: QueuedJob | None) -> JobStatus:
    """The status of a run that has not written down its own end."""
    history = list(read_json_lines(folder.history))
    attempt = max((int(one.get("attempt") or 0) for one in history), default=0)
    facts = _facts(folder, job, queued, history)
    return with_progress(JobStatus(**facts, attempt=attempt), folder)


def _facts(
    folder: RunFolder, job: SubmittedJob, queued: QueuedJob | None, history: list[dict[str, Any]]
) -> dict[str, Any]:
    if queued is None:
        return _forgotten(job, history)
    if queued.state in IN_QUEUE:
        return {"state": "waiting", "reason": explain(queued.reason, job=job.number, name=folder.name)}
    if queued.state in ON_NODES:
        launches = [index for index, one in enumerate(history) if one.get("event") == "launched"]
        mine = launches and history[launches[-1]].get("job") == job.number
        since = history[launches[-1] :] if mine else []
        training = any(one.get("event") in ("started", "resumed") for one in since)
        return {"state": "running" if training else "waiting", "reason": None if training else "ranks are starting"}
    state, code = ENDED_AS.get(queued.state, ("failed", ExitCode.FAILED))
    why = ENDS.get(queued.state, f"Slurm says: {queued.state}")
    if queued.reason not in ("None", ""):
        why += f" ({queued.reason})"
    if queued.exit_code:
        why += f" with code {queued.exit_code}"
    if state == "failed":
        if is_full(folder.path):
            why += f"; the disk of {folder.path} is full"
        why += f"; see logs/slurm-{job.number}.out"
    return {"state": state, "exit_code": int(code), "reason": why}


def _forgotten(job: SubmittedJob, history: list[dict[str, Any]]) -> dict[str, Any]:
    for one in reversed(history):
        if one.get("event") == "finished":
            return {"state": "finished", "exit_code": int(ExitCode.OK)}
        if one.get("event") == "preempted":
            return {"state": "preempted", "exit_code": int(ExitCode.PREEMPTED), "reason": "saved and left"}
        if one.get("event") in ("submitted", "launched"):
            break
    reason = f"Slurm no longer knows job {job.number}; `windlass run` goes on from the last checkpoint"
    return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": reason}


def is_full(path: Path) -> bool:
    return free_bytes(path) < FULL_BYTES
