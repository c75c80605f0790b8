"""`windlass run`: plan, check, submit, follow."""

from __future__ import annotations

import re

import click

from windlass.cli.jobs import nodes_option, overrides_argument, placed, run_file_argument, train_on_option
from windlass.errors import UserError

KEY = re.compile(r"[\x21-\x7e]{1,200}")


def checked_key(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not KEY.fullmatch(value):
        raise click.BadParameter("a key is 1 to 200 printable ASCII characters without blanks", context, parameter)
    return value


@click.command(short_help="Train what a run file describes.")
@run_file_argument
@overrides_argument
@train_on_option
@nodes_option
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
    # Not above: the shell completes this command, and --help shows it, without the rooms that train.
    from windlass.cli.runs.attempts import (
        Attempts,
        answer_again,
        begin_afresh,
        branch_of,
        go_on,
        prepare_dry,
        print_finished,
        print_plan,
        print_request,
        train,
    )

    changes = [*overrides, *placed(place, nodes)]
    if source:
        changes.append(f"checkpoint.branch_from={branch_of(source)}")
    if sweeps and key:
        raise UserError(
            "--idempotency-key cannot be used with --sweep: a key is for one run", fix="leave one of them out"
        )
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
        prepared, notes = prepare_dry(run_file, changes, fresh, faults, offline=offline)
        loop = attempts.render_loop(prepared) if detach else None
        return print_request(prepared, notes, loop, as_json=as_json)
    if key:
        code = answer_again(key, run_file, changes, as_json=as_json)
        if code is not None:
            return code
    if is_loop:
        return go_on(attempts, attempts.folder(), detach=detach)
    prepared = attempts.prepare(fresh=fresh)
    if prepared.is_finished:
        return print_finished(prepared, as_json=as_json)
    if not as_json and not quiet:
        print_plan(prepared)
    if fresh:
        begin_afresh(prepared, yes=yes, as_json=as_json)
    return train(prepared, attempts, detach=detach, as_json=as_json, quiet=quiet)
