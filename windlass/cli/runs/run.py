"""`windlass run`: plan, check, submit, follow."""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from windlass.cli.jobs import complete_overrides, complete_target
from windlass.errors import ExitCode, NoAnswerError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from windlass.api.preparation import Prepared
    from windlass.cli.runs.follow import Follower
    from windlass.cli.runs.retry import Decider
    from windlass.runfolder import RunFolder
    from windlass.targets.protocol import JobRef, JobStatus


KEYS_FILE = "idempotency-keys"
Result = TypeVar("Result")
KEY = re.compile(r"[\x21-\x7e]{1,200}")


def checked_key(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not KEY.fullmatch(value):
        raise click.BadParameter("a key is 1 to 200 printable ASCII characters without blanks", context, parameter)
    return value


@click.command(short_help="Train what a run file describes.")
@click.argument("run_file", metavar="RUN.yaml", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
@click.option(
    "--on",
    "place",
    metavar="TARGET",
    shell_complete=complete_target,
    help="Where to train: local, slurm, kubernetes[:CONTEXT].",
)
@click.option("--nodes", type=click.IntRange(min=1), help="Number of machines; sets resources.nodes.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=A,B,…", help="One run per value, as Slurm arrays.")
@click.option("--from", "source", metavar="RUN[@STEP]", help="Begin with a checkpoint of another run: a branch of it.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and create nothing.")
@click.option("--offline", is_flag=True, help="With --dry-run: render from the run file alone, ask no cluster.")
@click.option("--detach", is_flag=True, help="Start, and leave; with --retry what decides stays beside the job.")
@click.option(
    "--retry/--no-retry",
    default=True,
    help="Submit it again, edited where that helps, after what another job can survive. Default: --retry.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=600.0,
    metavar="SECONDS",
    show_default=True,
    help="How long a job may be kept from beginning by what only a person can mend.",
)
@click.option("--loop", "is_loop", is_flag=True, hidden=True, help="Decide for the job that is there, as its loop.")
@click.option("--fresh", is_flag=True, help="Start anew where a run of this name exists; its folder is moved aside.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--idempotency-key",
    "key",
    metavar="KEY",
    callback=checked_key,
    help="Start once for this key: with the same one again, say where the run stands.",
)
@click.option("--inject", "faults", metavar="FAULTS", help="Faults to survive, for example kill:rank=1,step=60.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only; the exit code says how it ended.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; progress as JSON lines on stderr.")
def run(
    run_file: str,
    overrides: tuple[str, ...],
    place: str | None,
    nodes: int | None,
    sweeps: tuple[str, ...],
    source: str | None,
    dry_run: bool,
    offline: bool,
    detach: bool,
    retry: bool,
    patience: float,
    is_loop: bool,
    fresh: bool,
    yes: bool,
    key: str | None,
    faults: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Train what a run file describes.

    Overrides change single keys: train.steps=200, or just steps=200 where one section alone has the key. A run that
    exists goes on from its newest checkpoint, with another learning rate or batch too if you say so; --from begins a
    new run with the weights and the optimizer of another. Ctrl-C detaches; the run goes on. The exit code is the run's:
    0 finished, 1 failed, 2 bad input, 75 stopped with a checkpoint, 130 stopped without one or detached.
    """
    from windlass.api.preparation import prepare
    from windlass.spec import load_run

    changes = list(overrides)
    if place:
        kind, _, context = place.partition(":")
        changes.append(f"target.kind={kind}")
        if context:
            changes.append(f"target.{kind}.context={context}")
    if nodes:
        changes.append(f"resources.nodes={nodes}")
    if source:
        changes.append(f"checkpoint.branch_from={_branch(source)}")
    if sweeps and key:
        raise UserError("--idempotency-key cannot be used with --sweep: a key is for one run")
    if sweeps:
        from windlass.cli.runs.sweep import run_sweep

        return run_sweep(
            run_file,
            changes,
            sweeps,
            fresh=fresh,
            faults=faults,
            dry_run=dry_run,
            offline=offline and dry_run,
            as_json=as_json,
        )
    if offline and not dry_run:
        raise UserError(
            "--offline goes with --dry-run: nothing can be trained without asking", fix="--dry-run --offline"
        )
    attempts = Attempts(run_file, changes, faults, patience if retry else None, key)
    if dry_run:
        prepared, notes = _prepare_dry(run_file, changes, fresh, faults, offline=offline)
        loop = attempts.render_loop(prepared) if detach else None
        return _print_request(prepared, notes, loop, as_json=as_json)
    if key:
        code = _answer_again(key, run_file, changes, as_json=as_json)
        if code is not None:
            return code
    if is_loop:
        from windlass.runfolder import RunFolder

        return go_on(attempts, RunFolder.of(load_run(run_file, changes)), detach=detach)
    prepared = prepare(load_run(run_file, changes), fresh=True, faults=faults) if fresh else attempts.prepare()
    if prepared.is_finished:
        return _print_finished(prepared, as_json=as_json)
    if not as_json and not quiet:
        _print_plan(prepared)
    if fresh:
        _begin_afresh(prepared, yes=yes, as_json=as_json)
    return train(prepared, attempts, detach=detach, as_json=as_json, quiet=quiet)


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

    def prepare(self) -> Prepared:
        from windlass.api.preparation import prepare
        from windlass.spec import load_run

        if self.records is not None:
            self.records.push()  # a loop that was replaced during its back-off does nothing more
        if self.patience is not None:
            from windlass.cli.runs.retry import carry_out_pending

            carry_out_pending(self.run_file, self.changes)
        run = load_run(self.run_file, self._all_changes())
        return prepare(run, faults=self.faults, is_checked=self.is_checked)

    def decider(self, prepared: Prepared, job: JobRef, say: Callable[[str, dict[str, Any]], None]) -> Decider | None:
        from windlass.cli.runs.retry import Decider, has_loop, policy_of
        from windlass.spec import load_run

        if self.patience is None or has_loop(prepared.target, job):
            return None
        asked = load_run(self.run_file, self._all_changes()).model_dump(mode="json")
        records = self.records or job.folder
        return Decider(prepared, asked, job, policy_of(prepared.run, self.patience), say, records.record)

    def render_loop(self, prepared: Prepared) -> Any:
        """What goes on deciding once this command has ended; None where nothing does."""
        from windlass.api.submission import render_loop
        from windlass.spec import load_run
        from windlass.targets.protocol import Detached

        if self.patience is None:
            return None
        asked = load_run(self.run_file, self.changes)
        return render_loop(prepared, Detached(self.run_file, self.changes, self.patience, self.faults, asked))

    def _all_changes(self) -> list[str]:
        """What is asked for, and the edits of earlier decisions that it does not overrule."""
        if self.patience is None:
            return self.changes
        from windlass.cli.runs.retry import overrides_of_decisions

        return [*self.changes, *overrides_of_decisions(self.run_file, self.changes)]


def _branch(source: str) -> str:
    """RUN@STEP of RUN[@STEP]: the newest complete checkpoint, where no step is given."""
    from windlass.checkpoint import CheckpointFolder
    from windlass.runfolder import RunFolder, runs_root

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


def _prepare_dry(
    run_file: str, changes: list[str], fresh: bool, faults: str | None, *, offline: bool
) -> tuple[Prepared, list[str]]:
    """What would be sent, with notes: that no cluster answered, or what this one changes of the offline rendering."""
    from windlass.api.preparation import prepare
    from windlass.spec import load_run

    requested = load_run(run_file, changes)

    def prepared(offline: bool) -> Prepared:
        return prepare(requested, fresh=fresh, faults=faults, offline=offline)

    if offline:
        return prepared(True), []
    asked, note = answered_or_alone(prepared)
    if note:
        return asked, [note]
    try:
        alone = prepared(True)
    except UserError:  # the run file leaves open what the cluster tells
        return asked, []
    lines = difflib.unified_diff(str(alone.request).splitlines(), str(asked.request).splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    if asked.run.target.kind == "local" or not changed:
        return asked, []
    return asked, ["this cluster changes these lines of what --offline renders:", *changed]


def answered_or_alone(prepared: Callable[[bool], Result]) -> tuple[Result, str | None]:
    """`prepared(offline=False)`; where no cluster or scheduler answers, `prepared(offline=True)` and a note of that."""
    try:
        return prepared(False), None
    except NoAnswerError as error:
        try:
            return prepared(True), f"{error.what}: this is rendered from the run file alone, as --offline does"
        except UserError as refusal:
            raise UserError(
                error.what,
                evidence=error.evidence,
                cause=f"and the run file alone cannot be rendered: {refusal.what}",
                fix="\n".join(fix for fix in (error.fix, refusal.fix) if fix),
                error_code=error.error_code,
            ) from None


def _print_request(prepared: Prepared, notes: list[str], loop: Any, *, as_json: bool) -> int:
    import yaml

    from windlass.api.schemas.model import printed
    from windlass.api.submission import dry_run_of
    from windlass.cli.output import print_json, warn

    for note in notes:
        click.echo(f"note: {note}" if note is notes[0] else f"  {note}", err=True)

    if as_json:
        print_json(printed(dry_run_of(prepared)))
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


def _print_plan(prepared: Prepared) -> None:
    from windlass.cli.output import print_pairs, warn

    print_pairs([("run", prepared.run.name), *prepared.rows])
    for warning in prepared.warnings:
        warn(warning)


def _print_finished(prepared: Prepared, *, as_json: bool) -> int:
    from windlass.cli.output import wrapped

    earlier = prepared.earlier
    assert earlier is not None
    if as_json:
        _print_result(prepared, earlier)
    else:
        done, wanted = earlier.step, prepared.run.train.steps
        fewer = f", more than the {wanted} that are asked for; nothing was changed" if (done or 0) > wanted else ""
        click.echo(wrapped(f"{prepared.run.name} is finished: it has trained {done} steps{fewer}."))
        click.echo(f"  windlass show {prepared.run.name}    its numbers\n  train.steps=N goes on, --fresh starts anew")
    return ExitCode.OK


def _begin_afresh(prepared: Prepared, *, yes: bool, as_json: bool) -> None:
    from windlass.api.submission import clear_the_way
    from windlass.cli.output import must_be_asked

    if prepared.folder.path.exists() and not yes:
        must_be_asked(f"--fresh would move {prepared.folder.path} aside", fix="--fresh --yes")
        click.confirm(f"Move {prepared.folder.path} aside and start anew?", abort=True)
    for note in clear_the_way(prepared):
        click.echo(note, err=as_json)


def go_on(attempts: Attempts, folder: RunFolder, *, detach: bool = False) -> int:
    """The loop of a run that was submitted: carry out what was decided last, else follow what is there."""
    from windlass.api.preparation import Prepared
    from windlass.cli.runs.retry import is_pending
    from windlass.common.files import read_json_lines
    from windlass.targets import target

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
    from windlass.api.submission import check_loop, start_loop, why_failed
    from windlass.cli.output import warn
    from windlass.cli.runs.follow import Follower

    while True:
        loop = attempts.render_loop(prepared) if detach and not is_submitted else None
        for warning in check_loop(prepared, loop):
            warn(warning)
        follower = Follower(prepared.folder)  # before it is started: it reads what is new from here on
        job = prepared.job if is_submitted else _start(prepared, loop)
        if attempts.key:
            _remember_key(prepared.folder, attempts.key)
        leaves, is_submitted = detach and not is_submitted, False
        if attempts.records is not None:
            attempts.records.push()
        if leaves:
            start_loop(prepared, job, loop)
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
        click.echo(str(why_failed(prepared.folder, status)), err=True)
    return int(ExitCode.FAILED if status.exit_code is None else status.exit_code)


def _start(prepared: Prepared, loop: Any) -> JobRef:
    from windlass.api.submission import start

    job = start(prepared, loop=loop)
    if prepared.is_running:
        state = "running" if prepared.earlier and prepared.earlier.state == "running" else "under way"
        click.echo(f"{prepared.run.name} is {state}: following it; its settings are unchanged", err=True)
    return job


def _follow(
    follower: Follower, prepared: Prepared, job: JobRef, attempts: Attempts, *, as_json: bool, quiet: bool
) -> tuple[JobStatus, bool]:
    """How the job ended, and whether it is to be submitted again."""
    from windlass.cli.runs.follow import reporter

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
    from windlass.api.submission import why_failed
    from windlass.api.summary import summarize
    from windlass.cli.output import print_pairs, wrapped
    from windlass.cli.runs.summary import draw_loss, summary_rows

    name, folder = prepared.run.name, prepared.folder
    summary = summarize(folder)
    if summary.steps:
        click.echo(f"\n{draw_loss(folder)}\n")
    print_pairs([("state", status.state), *summary_rows(summary), ("folder", str(folder.path))])
    if status.state == "failed":
        click.echo(str(why_failed(folder, status)), err=True)
    elif status.state != "finished":
        note = f"{status.reason}; the same command goes on from the last checkpoint"
        click.echo(wrapped(note, stderr=True), err=True)
    elif not summary.exported:
        click.echo(f"  windlass ckpt export {name}    writes a Hugging Face folder")


def _print_result(prepared: Prepared, status: JobStatus) -> None:
    from windlass.api.schemas.model import printed
    from windlass.api.submission import result_of
    from windlass.cli.output import print_json

    print_json(printed(result_of(prepared.folder, status, prepared.warnings)))


def _remember_key(folder: RunFolder, key: str) -> None:
    """Keep the key of a start. After the start: one that was cut off before is made again, and finds its own job."""
    with (folder.path / KEYS_FILE).open("a") as file:
        file.write(f"{key}\n")


def _answer_again(key: str, run_file: str, changes: list[str], *, as_json: bool) -> int | None:
    """Print where the run stands that was started with this key, and start nothing; None if none was started."""
    from windlass.api.lookup import find
    from windlass.api.schemas.model import printed
    from windlass.api.submission import result_of
    from windlass.cli.output import print_json
    from windlass.runfolder import RunFolder
    from windlass.spec import load_run

    folder = RunFolder.of(load_run(run_file, changes))
    keys = folder.path / KEYS_FILE
    if not keys.is_file() or key not in keys.read_text().splitlines():
        return None
    target, job = find(folder.name)
    status = target.status(job)
    note = f"{folder.name} was started with this key before: nothing is started now"
    if as_json:
        print_json(printed(result_of(folder, status, [note])))
    else:
        click.echo(f"{note}; it is {status.state}")
    if not status.ended:
        return ExitCode.OK
    return int(ExitCode.FAILED if status.exit_code is None else status.exit_code)
