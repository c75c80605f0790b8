"""Submit a prepared run, and say what came of it: the result, and the error of a run that failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from windlass.api.preparation import Prepared, move_aside
from windlass.api.schemas.runs import DryRun, RunResult
from windlass.api.summary import summarize
from windlass.checkpoint.ownership import begin_anew
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.launch.notifications import receivers, settings_for
from windlass.targets.protocol import LOOP_VARIABLE, Detached, JobRef, JobStatus, KeepsLoop, KeepsRunFolder, SubmitsOnce

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(?:\w.*)?", re.MULTILINE)
MOST_LOG_BYTES = 65536


def start(prepared: Prepared, *, loop: Any = None) -> JobRef:
    """Submit a run, or find the job of one that is under way. `loop`: the retry loop that will be left beside it."""
    if not prepared.is_running:
        is_watched = loop is not None and isinstance(prepared.target, KeepsLoop) and prepared.target.loop_notifies
        start_watcher = None if is_watched else watcher_of(prepared.run, prepared.folder)
        job = prepared.target.submit(prepared.run, prepared.request)
        if start_watcher is not None:
            start_watcher()
        return job
    if isinstance(prepared.target, SubmitsOnce):
        return prepared.target.attach(prepared.run, prepared.request)
    return prepared.job


def render_loop(prepared: Prepared, detached: Detached) -> Any:
    """The retry loop that goes on without a client; None where one would have nothing to do."""
    if not isinstance(prepared.target, KeepsLoop):
        return None
    return prepared.target.render_loop(prepared.run, prepared.gathered, detached)


def check_loop(prepared: Prepared, loop: Any) -> list[str]:
    """Raise what would keep the loop from being left there, before anything is submitted; return warnings."""
    if loop is None or not isinstance(prepared.target, KeepsLoop):
        return []
    return prepared.target.check_loop(prepared.run, loop)


def start_loop(prepared: Prepared, job: JobRef, loop: Any) -> None:
    if loop is not None and isinstance(prepared.target, KeepsLoop):
        prepared.target.start_loop(job, loop)


def clear_the_way(prepared: Prepared) -> list[str]:
    """Move aside what an earlier run of this name left, here and in the cluster; nothing is deleted."""
    notes = []
    if prepared.folder.path.exists():
        notes.append(f"the old run is now {move_aside(prepared.folder).path}")
    if prepared.run.checkpoint.store:
        begin_anew(prepared.folder)  # or a store would offer what the run before this one left there
    if isinstance(prepared.target, KeepsRunFolder):
        aside = prepared.target.start_afresh(prepared.run, prepared.request)
        if aside:
            notes.append(f"the old run folder in the cluster is now {aside}")
    return notes


def dry_run_of(prepared: Prepared) -> DryRun:
    return DryRun(run=prepared.run, request=prepared.request.as_dict(), warnings=prepared.warnings)


def watcher_of(run: Run, folder: RunFolder) -> Callable[[], None]:
    """What starts the watch over a run that is about to be submitted; UserError where a secret is missing.

    It is a process of its own: training goes on whatever happens to it. A retry loop has none: the one that was
    started with the run goes on, and the secrets are where that is.
    """
    if os.environ.get(LOOP_VARIABLE):
        return lambda: None
    has_receivers, since = bool(receivers(settings_for(run.notify))), time.time()

    def start_watch() -> None:
        if not has_receivers:
            return
        command = [sys.executable, "-m", "windlass.cli.main", "notify", str(folder.path), "--quiet"]
        with (folder.logs / "notify.log").open("ab") as log:
            subprocess.Popen(
                [*command, "--since", str(since)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    return start_watch


def result_of(folder: RunFolder, status: JobStatus, warnings: Sequence[str] = ()) -> RunResult:
    """Where a run stands, what it came to, and why it failed if it did."""
    result: dict[str, Any] = {"name": folder.name, "folder": str(folder.path), "warnings": list(warnings)}
    if status.state == "failed":
        result["error"] = why_failed(folder, status).as_dict()
    return RunResult(**result, **status.as_dict(), summary=summarize(folder))


def why_failed(folder: RunFolder, status: JobStatus) -> UserError:
    """The first error a rank wrote in the last attempt, with its traceback; else what the target and the logs say."""
    errors = _rank_errors(folder, status.attempt)
    if errors:
        error = UserError.from_dict(errors[0])
        where = f"rank {errors[0].get('rank')}, {folder.rank_log(int(errors[0].get('rank') or 0))}"
        raised = errors[0].get("traceback") if errors[0].get("type", UserError.__name__) != UserError.__name__ else None
        error.evidence = "\n".join(str(part).rstrip() for part in (raised, error.evidence, where) if part)
        return error
    # What was killed has printed nothing about it; a traceback in its logs is of something before.
    evidence = None if unrecorded_end(folder, status) else _last_traceback(folder)
    what, fix = f"{folder.name} failed: {status.reason}", f"windlass why {folder.name}"
    return UserError(what, evidence=evidence, fix=fix, exit_code=ExitCode.FAILED)


def _last_traceback(folder: RunFolder) -> str | None:
    """The traceback that a rank or its launcher printed last, of ranks that could not write an error file."""
    for path in sorted(folder.logs.glob("*.log"), reverse=True):  # rank-… before launcher…
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - MOST_LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
        tracebacks = TRACEBACK.findall(re.sub(r"^\[rank ?\d+\]:? ", "", text, flags=re.MULTILINE))
        if tracebacks:
            return f"{tracebacks[-1].rstrip()}\n{path}"
    return None


def _rank_errors(folder: RunFolder, attempt: int | None) -> list[dict[str, Any]]:
    errors = []
    for path in sorted(folder.logs.glob("rank-*.error.json")):
        try:
            error = json.loads(path.read_text())
        except ValueError:
            continue
        if error.get("attempt") == attempt:
            errors.append(error)
    # an error that would come again is the cause; a lost peer is its echo
    return sorted(errors, key=lambda error: (bool(error.get("retry")), str(error.get("time"))))
