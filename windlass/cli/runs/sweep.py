"""`windlass run --sweep KEY=A,B`: one run per combination of values, as one array for all that need the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import click

from windlass.cli.preparation import Prepared, prepare
from windlass.errors import ExitCode, UserError
from windlass.spec import load_run
from windlass.targets import target
from windlass.targets.protocol import CanSweep

LARGEST = 1000


def run_sweep(
    run_file: str,
    changes: Sequence[str],
    sweeps: Sequence[str],
    *,
    fresh: bool,
    faults: str | None,
    dry_run: bool,
    offline: bool,
    as_json: bool,
) -> int:
    """Prepare every run of the sweep, and submit those that are neither finished nor under way."""
    from windlass.cli.output import print_json, print_table, warn

    if fresh:
        raise UserError("--fresh cannot be used with --sweep", fix="name=OTHER    begins another sweep")
    base = load_run(run_file, changes)
    where = target(base.target)
    if not isinstance(where, CanSweep):
        raise UserError(f"the target {base.target.kind} takes no sweeps", fix="--on slurm")
    elements: list[tuple[int, tuple[str, ...], Prepared]] = []
    for index, settings in enumerate(combinations(sweeps)):
        named = f"name={base.name}-{index}"
        elements.append((index, settings, _prepared(run_file, [*changes, *settings, named], faults, offline)))
    for warning in dict.fromkeys(warning for _, _, prepared in elements for warning in prepared.warnings):
        warn(warning)
    left = [
        (index, prepared) for index, _, prepared in elements if not prepared.is_finished and not prepared.is_running
    ]
    runs, indices = [prepared.run for _, prepared in left], [index for index, _ in left]
    requests = where.render_sweep(base.name, runs, indices, left[0][1].gathered, faults=faults) if left else []
    if dry_run:
        if as_json:
            print_json(
                {
                    "runs": [run.model_dump(mode="json") for run in runs],
                    "requests": [request.as_dict() for request in requests],
                }
            )
        else:
            nothing = "nothing to submit: every run is finished or under way"
            click.echo("\n".join(map(str, requests)) if requests else nothing)
        return ExitCode.OK
    # somebody else may have submitted some of them in the meantime
    submitted = {job.name for job in where.submit_all(runs, requests)}
    rows: list[dict[str, Any]] = [
        {
            "name": prepared.run.name,
            "settings": list(settings),
            "folder": str(prepared.folder.path),
            "submitted": prepared.run.name in submitted,
        }
        for _, settings, prepared in elements
    ]
    if as_json:
        print_json(rows)
        return ExitCode.OK
    outcomes = {True: "submitted", False: "finished or under way"}
    print_table(
        ["RUN", "SETTINGS", ""], [[row["name"], " ".join(row["settings"]), outcomes[row["submitted"]]] for row in rows]
    )
    click.echo("  windlass ls    shows them all")
    return ExitCode.OK


def _prepared(run_file: str, changes: Sequence[str], faults: str | None, offline: bool) -> Prepared:
    try:
        return prepare(run_file, changes, faults=faults, offline=offline)
    except UserError as error:
        beside = "name=OTHER    begins another sweep beside this one"
        if "--fresh" in (error.fix or ""):  # which a sweep does not take
            error.fix = beside
        elif "windlass stop" in (error.fix or ""):
            error.fix = f"{error.fix}\n{beside}"
        raise


def combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the swept values, as overrides; the last key changes fastest."""
    choices: list[list[str]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        alternatives = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key.strip() or not alternatives:
            raise UserError(
                f"the sweep {sweep!r} is not of the form section.key=A,B", fix="--sweep train.learning_rate=1e-4,3e-4"
            )
        choices.append([f"{key.strip()}={value}" for value in alternatives])
    made = list(itertools.product(*choices))
    if len(made) > LARGEST:
        raise UserError(f"the sweep has {len(made)} runs; at most {LARGEST} go into one")
    return made
