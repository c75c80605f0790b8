"""A run submitted, followed, and submitted again after what another job can survive; and what is printed of it."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import click
import yaml

from windlass.api import submission
from windlass.api.lookup import find
from windlass.api.preparation import Prepared, answered_or_alone, prepare
from windlass.api.summary import summarize
from windlass.checkpoint import CheckpointFolder
from windlass.cli.output import must_be_asked, print_json, print_pairs, warn, wrapped
from windlass.cli.runs.follow import Follower, reporter
from windlass.cli.runs.retry import Decider, carry_out_pending, has_loop, is_pending, overrides_of_decisions, policy_of
from windlass.cli.runs.summary import draw_loss, summary_rows
from windlass.common.files import append_lines, read_json_lines
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import load_run
from windlass.targets import target
from windlass.targets.protocol import Detached, JobRef, JobStatus

KEYS_FILE = "idempotency-keys"


class Records(Protocol):
    """Where a loop in a cluster writes down what it does."""

    def record(self, event: str, **facts: Any) -> None: ...
    def push(self) -> None:
        """Write down there what the target has recorded in the run folder."""


@dataclass(frozen=True)
class Attempts:
    """How the run is prepared, the first time and again after every decision."""

    run_file: str
    changes: list[str]
    faults: str | None
    patience: float | None  # None: nothing is decided here
    key: str | None = None  # of --idempotency-key
    records: Records | None = None  # where decisions are written down; None: in the run folder
    is_checked: bool = False

    def prepare(self, *, fresh: bool = False) -> Prepared:
        """`fresh`: without the edits that were decided for the run that is there."""
        if fresh:
            return prepare(load_run(self.run_file, self.changes), fresh=True, faults=self.faults)
        if self.records is not None:
            self.records.push()  # a loop that was replaced during its back-off does nothing more
        if self.patience is not None:
            carry_out_pending(self.run_file, self.changes)
        run = load_run(self.run_file, self._all_changes())
        return prepare(run, faults=self.faults, is_checked=self.is_checked)

    def decider(self, prepared: Prepared, job: JobRef, report: Callable[[str, dict[str, Any]], None]) -> Decider | None:
        if self.patience is None or has_loop(prepared.target, job):
            return None
        requested = load_run(self.run_file, self._all_changes()).model_dump(mode="json")
        records = self.records or job.folder
        return Decider(prepared, requested, job, policy_of(prepared.run, self.patience), report, records.record)

    def render_loop(self, prepared: Prepared) -> Any:
        """What goes on deciding once this command has ended; None where nothing does."""
        if self.patience is None:
            return None
        requested = load_run(self.run_file, self.changes)
        return submission.render_loop(
            prepared, Detached(self.run_file, self.changes, self.patience, self.faults, requested)
        )

    def folder(self) -> RunFolder:
        return RunFolder.of(load_run(self.run_file, self.changes))

    def _all_changes(self) -> list[str]:
        """What is asked for, and the edits of earlier decisions that it does not overrule."""
        if self.patience is None:
            return self.changes

        return [*self.changes, *overrides_of_decisions(self.run_file, self.changes)]


def branch_of(source: str) -> str:
    """RUN@STEP of RUN[@STEP]: the newest complete checkpoint, where no step is given."""
    name, mark, step = source.rpartition("@") if "@" in source else (source, "", "")
    if mark and not step.isdecimal():
        raise UserError(f"--from {source} names no step", fix=f"--from {name}@200")
    folder = RunFolder.find(name)
    if folder.path.resolve() != (runs_root() / folder.name).resolve():  # the trainer looks beside the new run
        raise UserError(
            f"--from {source}: {folder.path} is not a run under {runs_root()}/",
            cause="a branch begins with a run beside it",
            fix=f"cp -r {folder.path} {runs_root()}/OTHER    and then --from OTHER{mark}{step}",
        )
    if mark and folder.load_run().target.kind == "kubernetes":
        return f"{folder.name}@{int(step)}"  # its checkpoints are in the cluster; the trainer looks there
    chosen = CheckpointFolder(folder.checkpoints).choose(int(step) if mark else None)
    return f"{folder.name}@{chosen.step}"


def prepare_dry(
    run_file: str, changes: list[str], fresh: bool, faults: str | None, *, offline: bool
) -> tuple[Prepared, list[str]]:
    """What would be sent, with notes: that no cluster answered, or what this one changes of the offline rendering."""
    requested = load_run(run_file, changes)

    def prepared(offline: bool) -> Prepared:
        return prepare(requested, fresh=fresh, faults=faults, offline=offline)

    if offline:
        return prepared(True), []
    rendered, note = answered_or_alone(prepared)
    if note:
        return rendered, [note]
    try:
        alone = prepared(True)
    except UserError:  # the run file leaves open what the cluster tells
        return rendered, []
    lines = difflib.unified_diff(str(alone.request).splitlines(), str(rendered.request).splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    if rendered.run.target.kind == "local" or not changed:
        return rendered, []
    return rendered, ["this cluster changes these lines of what --offline renders:", *changed]


def print_request(prepared: Prepared, notes: list[str], loop: Any, *, as_json: bool) -> int:
    for note in notes:
        click.echo(f"note: {note}" if note is notes[0] else f"  {note}", err=True)

    if as_json:
        print_json(submission.dry_run_of(prepared))
    else:
        for warning in prepared.warnings:
            warn(warning)
        decided = yaml.safe_dump(
            prepared.run.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True
        )
        # As comments: what is printed is then a file that kubectl, or a shell, takes as it is.
        click.echo(f"# {prepared.folder.run_file}: what is set and what was decided (with --json: every key)")
        click.echo(textwrap.indent(decided, "#   "))
        click.echo("# command")
        click.echo(str(prepared.request))
        if loop is not None:
            click.echo(f"# its retry loop\n{loop}")
    return ExitCode.OK


def print_plan(prepared: Prepared) -> None:
    print_pairs([("run", prepared.run.name), *prepared.rows])
    for warning in prepared.warnings:
        warn(warning)


def print_finished(prepared: Prepared, *, as_json: bool) -> int:
    earlier = prepared.earlier
    assert earlier is not None
    done, wanted = earlier.step, prepared.run.train.steps
    fewer = f", more than the {wanted} that are asked for; nothing was changed" if (done or 0) > wanted else ""
    trained = f"it has trained {done} steps{fewer}"
    if as_json:
        print_json(submission.result_of(prepared.folder, earlier, [trained] if fewer else []))
    else:
        click.echo(wrapped(f"{prepared.run.name} is finished: {trained}."))
        click.echo(f"  windlass show {prepared.run.name}    its numbers\n  train.steps=N goes on, --fresh starts anew")
    return ExitCode.OK


def begin_afresh(prepared: Prepared, *, yes: bool, as_json: bool) -> None:
    if prepared.folder.path.exists() and not yes:
        must_be_asked(f"--fresh would move {prepared.folder.path} aside", fix="--fresh --yes")
        click.confirm(f"Move {prepared.folder.path} aside and start anew?", abort=True)
    for note in submission.clear_the_way(prepared):
        click.echo(note, err=as_json)


def go_on(attempts: Attempts, folder: RunFolder, *, detach: bool = False) -> int:
    """The loop of a run that was submitted: carry out what was decided last, else follow what is there."""
    if is_pending(list(read_json_lines(folder.history))):
        return train(attempts.prepare(), attempts, detach=detach)
    run = folder.load_run()
    prepared = Prepared(run, folder, target(run.target), gathered=None, request=None, rows=[])
    return train(prepared, attempts, detach=detach, is_submitted=True)


def train(
    prepared: Prepared,
    attempts: Attempts,
    *,
    detach: bool = False,
    is_submitted: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Submit the run, and again after every decision; `is_submitted`: what is there is followed first."""
    while True:
        loop = attempts.render_loop(prepared) if detach and not is_submitted else None
        for warning in submission.check_loop(prepared, loop):
            warn(warning)
        follower = Follower(prepared.folder)  # before it is started: it reads what is new from here on
        job = prepared.job if is_submitted else _start(prepared, loop)
        if attempts.key:
            _remember_key(prepared.folder, attempts.key)
        leaves, is_submitted = detach and not is_submitted, False
        if attempts.records is not None:
            attempts.records.push()
        if leaves:
            submission.start_loop(prepared, job, loop)
            if as_json:
                _print_result(prepared, prepared.target.status(job))
            elif not quiet:
                click.echo(_how_to_go_on(prepared.run.name))
            return ExitCode.OK
        try:
            status, again = _follow(follower, prepared, job, attempts, as_json=as_json, quiet=quiet)
            if not again:
                break
            prepared = attempts.prepare()
        except KeyboardInterrupt:
            click.echo(f"\ndetached; {prepared.run.name} goes on.\n{_how_to_go_on(prepared.run.name)}", err=True)
            return ExitCode.INTERRUPTED
    if as_json:
        _print_result(prepared, status)
    elif not quiet:
        _print_end(prepared, status)
    elif status.state == "failed":
        click.echo(str(submission.why_failed(prepared.folder, status)), err=True)
    return int(ExitCode.FAILED if status.exit_code is None else status.exit_code)


def _start(prepared: Prepared, loop: Any) -> JobRef:
    job = submission.start(prepared, loop=loop)
    if prepared.is_running:
        state = "running" if prepared.earlier and prepared.earlier.state == "running" else "under way"
        click.echo(f"{prepared.run.name} is {state}: following it; its settings are unchanged", err=True)
    return job


def _follow(
    follower: Follower, prepared: Prepared, job: JobRef, attempts: Attempts, *, as_json: bool, quiet: bool
) -> tuple[JobStatus, bool]:
    """How the job ended, and whether it is to be submitted again."""
    news = reporter(prepared.run.train.steps, as_json=as_json, quiet=quiet)
    decider = attempts.decider(prepared, job, news.report)
    status = follower.follow(prepared.target, job, news, decider.is_held if decider else None)
    decision = decider.after(status) if decider else None
    if decider is None or decision is None:
        return status, False
    if decision.action == "give_up":
        return (status if status.ended else decider.give_up(decision)), False
    decider.carry_out(decision)
    return status, True


def _how_to_go_on(name: str) -> str:
    return f"  windlass logs {name} --follow    watches it\n  windlass stop {name}             saves and stops it"


def _print_end(prepared: Prepared, status: JobStatus) -> None:
    name, folder = prepared.run.name, prepared.folder
    summary = summarize(folder)
    if summary.steps:
        click.echo(f"\n{draw_loss(folder)}\n")
    print_pairs([("state", status.state), *summary_rows(summary), ("folder", str(folder.path))])
    if status.state == "failed":
        click.echo(str(submission.why_failed(folder, status)), err=True)
    elif status.state != "finished":
        note = f"{status.reason}; the same command goes on from the last checkpoint"
        click.echo(wrapped(note, stderr=True), err=True)
    elif not summary.exported:
        click.echo(f"  windlass ckpt export {name}    writes a Hugging Face folder")


def _print_result(prepared: Prepared, status: JobStatus) -> None:
    print_json(submission.result_of(prepared.folder, status, prepared.warnings))


def _remember_key(folder: RunFolder, key: str) -> None:
    """Keep the key of a start. After the start: one that was cut off before is made again, and finds its own job."""
    append_lines(folder.path / KEYS_FILE, [key])


def answer_again(key: str, run_file: str, changes: list[str], *, as_json: bool) -> int | None:
    """Print where the run stands that was started with this key, and start nothing; None if none was started."""
    folder = RunFolder.of(load_run(run_file, changes))
    keys = folder.path / KEYS_FILE
    if not keys.is_file() or key not in keys.read_text().splitlines():
        return None
    target, job = find(folder.name)
    status = target.status(job)
    note = f"{folder.name} was started with this key before: nothing is started now"
    if as_json:
        print_json(submission.result_of(folder, status, [note]))
    else:
        click.echo(f"{note}; it is {status.state}")
    if not status.ended:
        return ExitCode.OK
    return int(ExitCode.FAILED if status.exit_code is None else status.exit_code)
