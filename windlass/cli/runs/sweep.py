"""`windlass sweep KEY=A,B`: one run per combination of values, on every target. `run --sweep`: as Slurm arrays.

A sweep has no state of its own but a file that names its runs: what is finished or under way is read from their
folders, so a killed sweep goes on when it is typed again.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from windlass.api.preparation import Prepared, answered_or_alone, prepare
from windlass.api.summary import summarize
from windlass.cli.jobs import complete_overrides, placed, run_file_argument, train_on_option
from windlass.cli.output import count, number, plain, print_json, print_table, styled, warn
from windlass.cli.runs.ls import COLOURS
from windlass.common.files import write_atomically
from windlass.common.locks import locked
from windlass.errors import ExitCode, UserError
from windlass.runfolder import runs_root
from windlass.spec import load_run
from windlass.targets import target
from windlass.targets.protocol import CanSweep, JobStatus

LARGEST = 1000
LOCAL_SECONDS, CLUSTER_SECONDS = 1.0, 10.0  # between two looks at what runs
EXAMPLE = "windlass sweep run.yaml train.learning_rate=1e-4,3e-4"


@click.command(short_help="Train one run per combination of values.")
@run_file_argument
@click.argument("settings", nargs=-1, metavar="KEY=A,B...", shell_complete=complete_overrides)
@train_on_option
@click.option("--nodes", type=click.IntRange(min=1), help="Number of machines of each run; sets resources.nodes.")
@click.option(
    "--at-most", type=click.IntRange(min=1), help="Runs at once. Default: 1 on this machine, all on clusters."
)
@click.option("--dry-run", is_flag=True, help="Print the runs, and start none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout when all have ended.")
def sweep(
    run_file: str,
    settings: tuple[str, ...],
    place: str | None,
    nodes: int | None,
    at_most: int | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Train one run per combination of values.

    A key with several values is swept, one with a single value is set in all runs. All runs are checked before the
    first one starts. Ctrl-C, or a kill, leaves the runs that are under way alone; the same command goes on with the
    sweep, and tries again what has failed. `windlass ui` and `windlass compare` show the runs beside each other.
    """
    changes = [setting for setting in settings if not is_swept(setting)] + placed(place, nodes)
    swept = [setting for setting in settings if is_swept(setting)]
    if not swept:
        raise UserError("no key has several values", fix=EXAMPLE.replace("run.yaml", run_file))
    base = load_run(run_file, changes)
    members = _members(run_file, changes, swept, base.name)
    if dry_run:
        return _show(members, as_json=as_json)
    runs_root().mkdir(parents=True, exist_ok=True)
    with locked(runs_root() / f".{base.name}.sweep.lock", patience_s=0.0) as is_ours:
        if not is_ours:
            raise UserError(
                f"the sweep {base.name} is under way in another terminal", fix="name=OTHER    or watch it: windlass ui"
            )
        _write_members(base.name, members)
        driver = Driver(members, at_most or (1 if base.target.kind == "local" else len(members)))
        try:
            driver.run(base.name)
        except KeyboardInterrupt:
            click.echo("\nthe runs under way go on; the same command goes on with the sweep", err=True)
            return ExitCode.INTERRUPTED
    _show(members, as_json=as_json)
    states = {member.status.state for member in members}
    return ExitCode.OK if states == {"finished"} else ExitCode.FAILED


def is_swept(setting: str) -> bool:
    """Several values with commas between them; a list or a mapping in brackets is one value."""
    value = setting.partition("=")[2].strip()
    return "," in value and not value.startswith(("[", "{", '"', "'"))


@dataclass
class Member:
    """One run of a sweep."""

    settings: tuple[str, ...]
    prepared: Prepared
    seen: JobStatus | None = None  # since this command started or found it

    @property
    def name(self) -> str:
        return self.prepared.run.name

    @property
    def index(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def is_left(self) -> bool:
        """Neither finished nor under way."""
        return not self.prepared.is_finished and not self.prepared.is_running

    @property
    def status(self) -> JobStatus:
        return self.seen or self.prepared.earlier or JobStatus("waiting", reason="not started")

    def look(self) -> JobStatus:
        self.seen = self.prepared.target.status(self.prepared.job)
        return self.seen

    def as_dict(self) -> dict[str, Any]:
        folder = self.prepared.folder
        validation_loss = summarize(folder).validation_loss if folder.metrics.exists() else None
        return {**self.about(), **self.status.as_dict(), "validation_loss": validation_loss}

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "settings": list(self.settings), "folder": str(self.prepared.folder.path)}


class Driver:
    """Keeps so many runs under way until all have ended."""

    def __init__(self, members: Sequence[Member], at_most: int) -> None:
        self.at_most = at_most
        self.waiting = [member for member in members if member.is_left]
        self.running = [member for member in members if member.prepared.is_running]
        is_local = all(member.prepared.run.target.kind == "local" for member in members)
        self.pause = LOCAL_SECONDS if is_local else CLUSTER_SECONDS

    def run(self, name: str) -> None:
        for member in self.running:
            _print_state(member, "is under way")
        if len(self.waiting) + len(self.running) <= self.at_most:
            self._submit_together(name)
        while self.waiting or self.running:
            for member in [member for member in self.running if member.look().ended]:
                self.running.remove(member)
                _print_state(member, f"{member.status.state}{_numbers(member.status)}")
            while self.waiting and len(self.running) < self.at_most:
                self._start(self.waiting.pop(0))
            if self.running:
                time.sleep(self.pause)

    def _submit_together(self, name: str) -> None:
        """All that are left in as few requests as the target can make of them."""
        where = self.waiting[0].prepared.target if self.waiting else None
        if not isinstance(where, CanSweep):
            return
        runs = [member.prepared.run for member in self.waiting]
        indices = [member.index for member in self.waiting]
        where.submit_all(runs, where.render_sweep(name, runs, indices, self.waiting[0].prepared.gathered))
        for member in self.waiting:
            _print_state(member, "submitted")
        self.running, self.waiting = [*self.running, *self.waiting], []

    def _start(self, member: Member) -> None:
        """A run that cannot be started, because somebody else just did or a disk is full, does not end the sweep."""
        try:
            member.prepared.target.submit(member.prepared.run, member.prepared.request)
            _print_state(member, "started")
        except UserError as error:
            if member.look().ended or member.status.attempt is None:
                member.seen = JobStatus("failed", reason=error.what, exit_code=int(error.exit_code))
                _print_state(member, f"could not be started: {error.what}")
                return
        self.running.append(member)


def _print_state(member: Member, what: str) -> None:
    click.echo(plain(f"{member.name}  {' '.join(member.settings)}  {what}"), err=True)


def _numbers(status: JobStatus) -> str:
    return f", loss {number(status.loss)}" if status.loss is not None else f": {status.reason}" if status.reason else ""


def _write_members(name: str, members: Sequence[Member]) -> None:
    """Which runs belong together, for `windlass ui`."""
    runs = [{"name": member.name, "settings": list(member.settings)} for member in members]
    write_atomically(runs_root() / f"{name}.sweep.json", json.dumps({"name": name, "runs": runs}) + "\n")


def _show(members: Sequence[Member], *, as_json: bool) -> int:
    """The runs as a table, the lowest loss first."""
    rows = [member.as_dict() for member in members]
    if as_json:
        print_json(rows)
        return ExitCode.OK
    rows.sort(key=_rank)
    print_table(
        ["RUN", "SETTINGS", "STATE", "STEP", "LOSS", "VALIDATION", "TOK/S"],
        [
            [
                row["name"],
                " ".join(row["settings"]),
                styled(row["state"], COLOURS.get(row["state"], "")),
                f"{row['step']}/{row['steps'] or '–'}" if row["step"] is not None else "–",
                number(row["loss"]),
                number(row["validation_loss"]),
                count(row["tokens_per_s"]),
            ]
            for row in rows
        ],
        notes=[row["reason"] if row["state"] != "finished" else None for row in rows],
    )
    return ExitCode.OK


def _rank(row: dict[str, Any]) -> float:
    loss = row["validation_loss"] if row["validation_loss"] is not None else row["loss"]
    return math.inf if loss is None else float(loss)


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
    if fresh:
        raise UserError("--fresh cannot be used with --sweep", fix="name=OTHER    begins another sweep")
    base = load_run(run_file, changes)
    where = target(base.target)
    if not isinstance(where, CanSweep):
        raise UserError(
            f"the target {base.target.kind} takes no arrays", fix=f"windlass sweep {run_file} {' '.join(sweeps)}"
        )

    def make(offline: bool) -> list[Member]:
        return _members(run_file, changes, sweeps, base.name, faults=faults, offline=offline)

    members, note = answered_or_alone(make) if dry_run and not offline else (make(offline), None)
    if note:
        click.echo(f"note: {note}", err=True)
    left = [member for member in members if member.is_left]
    runs, indices = [member.prepared.run for member in left], [member.index for member in left]
    requests = where.render_sweep(base.name, runs, indices, left[0].prepared.gathered, faults=faults) if left else []
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
    rows = [{**member.about(), "submitted": member.name in submitted} for member in members]
    if as_json:
        print_json(rows)
        return ExitCode.OK
    outcomes = {True: "submitted", False: "finished or under way"}
    cells = [[member.name, " ".join(member.settings), outcomes[member.name in submitted]] for member in members]
    print_table(["RUN", "SETTINGS", ""], cells)
    click.echo("  windlass ls    shows them all")
    return ExitCode.OK


def _members(
    run_file: str,
    changes: Sequence[str],
    sweeps: Sequence[str],
    name: str,
    *,
    faults: str | None = None,
    offline: bool = False,
) -> list[Member]:
    """Every run of a sweep, prepared and checked; a warning that several have is shown once."""
    members = []
    for index, settings in enumerate(combinations(sweeps)):
        try:
            run = load_run(run_file, [*changes, *settings, f"name={name}-{index}"])
            members.append(Member(settings, prepare(run, faults=faults, offline=offline)))
        except UserError as error:
            beside = "name=OTHER    begins another sweep beside this one"
            if "--fresh" in (error.fix or ""):  # which a sweep does not take
                error.fix = beside
            elif "windlass stop" in (error.fix or ""):
                error.fix = f"{error.fix}\n{beside}"
            raise
    for warning in dict.fromkeys(warning for member in members for warning in member.prepared.warnings):
        warn(warning)
    return members


def combinations(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the swept values, as overrides; the last key changes fastest."""
    choices: list[list[str]] = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        alternatives = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key.strip() or not alternatives:
            raise UserError(f"the sweep {sweep!r} is not of the form section.key=A,B", fix=EXAMPLE)
        choices.append([f"{key.strip()}={value}" for value in alternatives])
    made = list(itertools.product(*choices))
    if len(made) > LARGEST:
        raise UserError(
            f"the sweep has {len(made)} runs; at most {LARGEST} go into one", fix="fewer values, or several sweeps"
        )
    return made
