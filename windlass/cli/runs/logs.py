"""`windlass logs`: what the ranks of a run said."""

from __future__ import annotations

import re
import time
from datetime import datetime

import click

from windlass.cli.jobs import on_option, run_names
from windlass.cli.output import print_json, print_json_line
from windlass.errors import ExitCode

AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def since(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A moment, as people type it: 10m, 2h, 2026-11-15T19:00."""
    if value is None:
        return None
    ago = AGO.fullmatch(value.strip())
    if ago:
        return time.time() - float(ago[1]) * SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(value.strip()).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no time such as 10m, 2h or 2026-11-15T19:00", context, parameter
        ) from None


@click.command(short_help="Print what the ranks of a run said.")
@click.argument("name", shell_complete=run_names)
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each rank.")
@click.option("--since", "begin", callback=since, metavar="T", help="Only what is newer: 10m, 2h, 2026-11-15T19:00.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of lines; with --follow, one object per line.")
def logs(
    name: str, rank: int | None, follow: bool, tail: int | None, begin: float | None, place: str | None, as_json: bool
) -> int | None:
    """Print what the ranks of a run said.

    And their launcher and supervisor, where those add something. Times are those at the beginning of lines; a line
    without one belongs to the line before it.
    """
    from windlass.api.jobs import Job

    lines = Job.find(name, place).logs(rank=rank, follow=follow, tail=tail, since=begin)
    if as_json and not follow:
        print_json(list(lines))
        return None
    try:
        for line in lines:
            if as_json:
                print_json_line(line)
            elif rank is not None:
                click.echo(line.text)
            else:
                click.echo(f"[{line.source if line.rank is None else line.rank}] {line.text}")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return None
