"""Where a local run stands, read from its folder and from whether its supervisor lives."""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.errors import ExitCode
from windlass.runfolder import RunFolder, read_json_lines
from windlass.targets.local import processes
from windlass.targets.local.supervisor import SUPERVISOR_FILE
from windlass.targets.local.tail import newest_records
from windlass.targets.protocol import JobStatus, State

OWN_END: dict[str, tuple[State, ExitCode]] = {  # how the trainer itself says that it is over
    "finished": ("finished", ExitCode.OK),
    "exported": ("finished", ExitCode.OK),
    "preempted": ("preempted", ExitCode.PREEMPTED),
}
SILENCE_SECONDS = 120.0
PACE_STEPS = 20


@dataclass(frozen=True)
class SupervisorProcess:
    pid: int
    start_time: int | None
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """A process with the same pid that began at another moment is another process."""
        return self.is_here and self.start_time is not None and processes.start_time(self.pid) == self.start_time


def supervisor_of(folder: RunFolder) -> SupervisorProcess | None:
    try:
        value = json.loads((folder.path / SUPERVISOR_FILE).read_text())
        return SupervisorProcess(int(value["pid"]), value["start_time"], value["host"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def is_running(folder: RunFolder) -> bool:
    supervisor = supervisor_of(folder)
    return supervisor is not None and supervisor.alive


def status_of(folder: RunFolder) -> JobStatus:
    supervisor = supervisor_of(folder)
    history = list(read_json_lines(folder.history))
    launches = [index for index, one in enumerate(history) if one.get("event") == "launched"]
    since_launch = history[launches[-1] :] if launches else history
    attempt = max((int(one.get("attempt") or 0) for one in history), default=0) or None
    status = JobStatus(**_state(folder, supervisor, history, since_launch), attempt=attempt)
    return with_progress(status, folder)


def _state(
    folder: RunFolder,
    supervisor: SupervisorProcess | None,
    history: list[dict[str, Any]],
    since_launch: list[dict[str, Any]],
) -> dict[str, Any]:
    if supervisor is None:
        return _state_without_supervisor(folder, history)
    if supervisor.alive:
        training = any(one.get("event") in ("started", "resumed") for one in since_launch)
        return {"state": "running" if training else "waiting", "reason": None if training else "ranks are starting"}
    if not supervisor.is_here:
        return {"state": "waiting", "reason": f"its supervisor is on {supervisor.host}; ask there"}
    ended = [one for one in history if one.get("event") == "exit"]
    if ended and history[-1] is ended[-1]:
        return {"state": ended[-1]["state"], "exit_code": ended[-1]["code"], "reason": ended[-1].get("reason")}
    reason = "its supervisor was killed; `windlass run` goes on from the last checkpoint"
    return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": reason}


def _state_without_supervisor(folder: RunFolder, history: list[dict[str, Any]]) -> dict[str, Any]:
    """A run that was started by torchrun itself: only its own records can be asked."""
    last = next((one for one in reversed(history) if one.get("event") in OWN_END), None)
    begun = next((one for one in reversed(history) if one.get("event") in ("started", "resumed")), None)
    if last and (begun is None or history.index(last) > history.index(begun)):
        state, code = OWN_END[last["event"]]
        return {"state": state, "exit_code": int(code)}
    if begun is None:
        return {"state": "waiting", "reason": "not started"}
    written = folder.metrics.stat().st_mtime if folder.metrics.exists() else float(begun.get("time") or 0)
    silent = time.time() - written
    if silent < SILENCE_SECONDS:
        return {"state": "running", "reason": "started without `windlass run`"}
    return {"state": "stopped", "reason": f"started without `windlass run`; silent for {silent / 60:.0f} min"}


def told_end(folder: RunFolder) -> JobStatus | None:
    """The end that a job on a cluster wrote down; None if it has not, or was submitted again since."""
    history = list(read_json_lines(folder.history))
    for one in reversed(history):
        if one.get("event") == "exit":
            attempt = max((int(record.get("attempt") or 0) for record in history), default=0)
            status = JobStatus(one["state"], exit_code=one["code"], reason=one.get("reason"), attempt=attempt)
            return with_progress(status, folder)
        if one.get("event") in ("submitted", "launched", "restart"):
            return None
    return None


def with_progress(status: JobStatus, folder: RunFolder) -> JobStatus:
    steps = [one for one in newest_records(folder.metrics) if one.get("kind") == "step"]
    if not steps:
        return status
    last = steps[-1]
    eta = seconds_left(steps) if status.state == "running" else None
    return replace(
        status,
        step=last["step"],
        steps=last["steps"],
        loss=last.get("loss"),
        tokens_per_s=last.get("tokens_per_s"),
        eta=eta,
    )


def seconds_left(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Time to the last step at the pace of the newest ones; a save or a first step among them counts for little."""
    pace = [float(one["step_s"]) for one in list(steps)[-PACE_STEPS:] if one.get("step_s") is not None]
    if not pace:
        return None
    return float(steps[-1]["steps"] - steps[-1]["step"]) * statistics.median(pace)
