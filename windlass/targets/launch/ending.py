"""The end of a run that nobody lived to write down: concluded from its status, told as if it stood in the history."""

from __future__ import annotations

from typing import Any

from windlass.common.files import real
from windlass.runfolder import RunFolder
from windlass.targets.launch.progress import BEGINNINGS, newest_since, since_launch
from windlass.targets.launch.supervision import SupervisorProcess, supervisor_of
from windlass.targets.protocol import JobStatus

# Not what others record of a run that has ended: its new settings, a notice that nobody took.
WHILE_IT_LIVED = ("launched", "started", "resumed", "checkpoint", "preempted", "finished")


def unrecorded_end(
    folder: RunFolder, status: JobStatus, supervisor: SupervisorProcess | None = None
) -> dict[str, Any] | None:
    """The `exit` of a run that has ended without one: its processes were killed, or never wrote a history.

    `supervisor`: the one it had, where supervisor.json names another by now.
    """
    recent, supervisor = since_launch(folder), supervisor or supervisor_of(folder)
    is_begun = bool(recent) or supervisor is not None  # one that was killed at once has recorded nothing
    if not status.ended or not is_begun or newest_since(recent, ("exit",), BEGINNINGS) is not None:
        return None
    end = {"event": "exit", "state": status.state, "code": status.exit_code, "reason": status.reason}
    # when a copy was made, or ranks fell silent for good, nobody knows
    when = None if status.state == "stopped" else _last_sign(folder, supervisor)
    told = [real(record.get("time")) or 0.0 for record in recent if record.get("event") in WHILE_IT_LIVED]
    return {"time": max(when, *told, 0.0) if when is not None else None, **end}


def _last_sign(folder: RunFolder, supervisor: SupervisorProcess | None) -> float | None:
    """When the run last showed that it lived: by a step, or by a beat of its supervisor."""
    signs = [supervisor.beat] if supervisor is not None else []
    if folder.metrics.exists():
        signs.append(folder.metrics.stat().st_mtime)
    return round(max(signs), 3) if signs else None
