"""Where a local run stands: what its folder records, and whether the processes that it names live."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from windlass.common.files import real
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.launch import processes
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.launch.machine import full_disk
from windlass.targets.launch.progress import (
    PACE_STEPS,
    Record,
    end_by_ranks,
    end_since_launch,
    newest_attempt,
    pace,
    since_launch,
    with_progress,
)
from windlass.targets.launch.supervision import SILENCE_SECONDS, SupervisorProcess, is_starting, supervisor_of
from windlass.targets.launch.tail import newest_steps
from windlass.targets.protocol import JobStatus, State

ABANDONED = "its supervisor was killed and nobody watches its ranks; `windlass run` or `windlass stop` lets them save"
STARTED = ("started", "resumed")

FolderProcesses = Callable[[RunFolder], Sequence[int]]


def status_of(folder: RunFolder, processes_of: FolderProcesses | None = None) -> JobStatus:
    """The status of a run; `processes_of` finds the living processes of a folder, where many are asked about."""
    if not folder.run_file.exists():
        return JobStatus("failed", reason="its run folder was deleted", exit_code=int(ExitCode.FAILED))
    recent, supervisor = since_launch(folder), supervisor_of(folder)
    attempt = newest_attempt(recent)
    if supervisor is not None and _begins_anew(folder, supervisor, recent):
        return with_progress(JobStatus("waiting", attempt=attempt + 1, reason="it is being started"), folder)
    find = processes_of or (lambda folder: processes.processes_of(folder.path))
    status = JobStatus(**_state(folder, supervisor, recent, find), attempt=attempt or None)
    return _with_silence(with_progress(status, folder), folder)


def _begins_anew(folder: RunFolder, supervisor: SupervisorProcess, recent: Sequence[Record]) -> bool:
    """Whether a start is under way that has launched nothing yet: what is recorded is of another one."""
    if supervisor.alive:
        launch: Record = recent[0] if recent else {}
        return launch.get("event") != "launched" or launch.get("job") not in (None, supervisor.job)
    return not supervisor.is_elsewhere and is_starting(folder)


def _state(
    folder: RunFolder, supervisor: SupervisorProcess | None, recent: Sequence[Record], find: FolderProcesses
) -> dict[str, Any]:
    """Living processes first, then what was written down, then what can be concluded."""
    training = any(record.get("event") in STARTED for record in recent)
    end = end_since_launch(recent)
    if supervisor is not None and supervisor.alive:
        return _under_way("running" if training else "waiting", None if training else "ranks are starting")
    starting = is_starting(folder)
    if end is not None and not starting:
        return end
    if supervisor is not None and supervisor.works_elsewhere and end is None:
        return _under_way("running" if training else "waiting", f"on {supervisor.host}")
    if starting:
        return _under_way("running" if training and end is None else "waiting", "it is being started")
    if supervisor is None:
        return _state_without_supervisor(folder, recent)
    if supervisor.is_copy:
        reason = "a copy of a run that was under way; `windlass run` goes on from the last checkpoint in it"
        return {"state": "stopped", "exit_code": int(ExitCode.INTERRUPTED), "reason": reason}
    if find(folder):
        return _under_way("running", ABANDONED)
    return _end_of_killed(folder, supervisor, recent)


def end_of_former(folder: RunFolder, former: SupervisorProcess | None) -> dict[str, Any] | None:
    """The record of a run's end that its former supervisor did not live to write; its ranks have ended by now."""
    if former is None or former.is_copy:
        return None
    return unrecorded_end(folder, JobStatus(**_end_of_killed(folder, former, since_launch(folder))), former)


def _end_of_killed(folder: RunFolder, supervisor: SupervisorProcess, recent: Sequence[Record]) -> dict[str, Any]:
    if _trained_to_the_end(folder, recent):
        return {"state": "finished", "exit_code": int(ExitCode.OK), "reason": "its supervisor was killed after the end"}
    why = "its supervisor was killed"
    if supervisor.ended_with_its_machine:
        why = "the machine was restarted while it trained"
    elif supervisor.is_elsewhere:
        why = f"its supervisor on {supervisor.host} has been silent for {supervisor.silence / 60:.0f} min"
    reason = f"{why}; `windlass run` goes on from the last checkpoint"
    return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": reason}


def _under_way(state: State, reason: str | None) -> dict[str, Any]:
    return {"state": state, "reason": reason}


def _trained_to_the_end(folder: RunFolder, recent: Sequence[Record]) -> bool:
    happened = {record.get("event") for record in recent}
    if "finished" not in happened:
        return False
    with contextlib.suppress(Exception):  # a damaged run file: whether an export was wanted is not known
        return "exported" in happened or not folder.load_run().checkpoint.export
    return True


def _state_without_supervisor(folder: RunFolder, recent: Sequence[Record]) -> dict[str, Any]:
    """A run that was started by torchrun itself: only its own records can be asked."""
    begun = next((index for index in reversed(range(len(recent))) if recent[index].get("event") in STARTED), None)
    if end := end_by_ranks(recent, STARTED):
        return end
    if begun is None:
        exported = any(record.get("event") == "exported" for record in recent)
        if exported:
            return {"state": "finished", "exit_code": int(ExitCode.OK)}
        return {"state": "waiting", "reason": "not started"}
    written = folder.metrics.stat().st_mtime if folder.metrics.exists() else real(recent[begun].get("time")) or 0.0
    silent = time.time() - written
    if silent < SILENCE_SECONDS:
        return {"state": "running", "reason": "started without `windlass run`"}
    return {"state": "stopped", "reason": f"started without `windlass run`; silent for {silent / 60:.0f} min"}


def _with_silence(status: JobStatus, folder: RunFolder) -> JobStatus:
    """Say so where a running run has written nothing for long: its numbers are old."""
    if status.state != "running" or status.step is None:
        return status
    silent = time.time() - folder.metrics.stat().st_mtime
    step_s = pace(newest_steps(folder.metrics, PACE_STEPS), "step_s") or 0.0
    if silent < max(SILENCE_SECONDS, 5 * step_s):
        return status
    text = f"no step written for {silent / 60:.0f} min"
    if full := full_disk(folder.path):
        text = f"{full}: {text}"
    return replace(status, eta=None, reason=f"{status.reason}; {text}" if status.reason else text)
