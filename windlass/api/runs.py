"""The functions of `import windlass` on runs: load, plan, submit, and find again."""

from __future__ import annotations

import os
from pathlib import Path

from windlass.api import lookup
from windlass.api.jobs import Job
from windlass.api.planning import planned
from windlass.api.preparation import Prepared, prepare
from windlass.api.schemas.runs import DryRun, ListedRun, Plan
from windlass.api.submission import check_loop, clear_the_way, dry_run_of, render_loop, start, start_loop
from windlass.common.files import write_atomically
from windlass.errors import UserError
from windlass.spec import Run, dump_run, load_run, parse_run
from windlass.spec.loading import run_of
from windlass.targets import place_settings
from windlass.targets.protocol import Detached

ASKED_FILE = "asked.yaml"  # the run as it was asked for: the run file of a loop on this machine or on Slurm


def load(path: str | os.PathLike[str], *overrides: str) -> Run:
    """The run that a file describes, with overrides as on the command line: `load("my.yaml", "train.steps=200")`."""
    return load_run(Path(path), overrides)


def plan_run(run: Run | str | os.PathLike[str], *, gpu: str | None = None) -> Plan:
    """What a run, or that of a run file, will need and cost; nothing is started. `gpu`: plan for this one.

    As `windlass plan --json`.
    """
    return planned(run_of(run), gpu).model


def dry_run(
    run: Run | str | os.PathLike[str], on: str | None = None, *, fresh: bool = False, offline: bool = False
) -> DryRun:
    """What `submit` would send, with all checks made and nothing created. `offline`: no cluster is asked."""
    return dry_run_of(_prepared(_placed(run, on), fresh=fresh, offline=offline))


def submit(
    run: Run | str | os.PathLike[str],
    on: str | None = None,
    *,
    fresh: bool = False,
    retry: bool = True,
    patience: float = 600.0,
    faults: str | None = None,
) -> Job:
    """Check a run, or that of a run file, and start it, as `windlass run --detach` does.

    `on`: local, slurm[:LOGIN_NODE] or kubernetes[:CONTEXT]; else the run's own target. A run of this name that exists
    goes on from its newest checkpoint, one that is under way or finished is left as it is, and all give its job.
    `fresh` begins anew and moves the old folder aside. `retry` leaves a retry loop beside the job, which submits it
    again after what another job can survive (docs/retry.md); a job may be kept from beginning for `patience` seconds by
    what only a person can mend. `faults` are injected, to see them survived.
    """
    requested = _placed(run, on)
    prepared = _prepared(requested, fresh=fresh, faults=faults)
    if prepared.is_finished:
        return Job(prepared.target, prepared.job, prepared.warnings)
    file = (prepared.folder.path / ASKED_FILE).resolve()
    leaves_loop = retry and not prepared.is_running  # one that is under way has its own, and what it was asked for
    loop = render_loop(prepared, Detached(str(file), (), patience, faults, requested)) if leaves_loop else None
    warnings = [*prepared.warnings, *check_loop(prepared, loop)]
    if fresh:
        clear_the_way(prepared)
    job = start(prepared, loop=loop)
    if loop is not None:
        write_atomically(file, dump_run(requested))
        start_loop(prepared, job, loop)
    return Job(prepared.target, job, warnings)


def job(name: str | os.PathLike[str], on: str | None = None) -> Job:
    """An existing run, by its name or the path of its folder; `on`: one that only a cluster may know."""
    return Job.find(os.fspath(name), on)


def jobs(on: str | None = None) -> list[ListedRun]:
    """The runs there are; `on`: also those that a cluster, kubernetes[:CONTEXT], knows itself."""
    return [ListedRun.model_validate(row) for row in lookup.rows(on)]


def _prepared(run: Run, *, fresh: bool = False, faults: str | None = None, offline: bool = False) -> Prepared:
    if not run.name:
        raise UserError("the run has no name", fix='run.model_copy(update={"name": "small"})')
    return prepare(run, fresh=fresh, faults=faults, offline=offline)


def _placed(run: Run | str | os.PathLike[str], on: str | None) -> Run:
    """The run on the target that `on` names, as `--on kubernetes:CONTEXT` does; else on its own."""
    run = run_of(run)
    if on is None:
        return run
    values = run.model_dump(mode="json", exclude_unset=True)
    for key, value in place_settings(on).items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return parse_run(values, source=f"on={on!r}")
