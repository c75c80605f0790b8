"""`windlass logs`: what the ranks of a run said."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.jobs import find, on_option, run_names

if TYPE_CHECKING:
    from windlass.targets.protocol import LogLine

STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

Source = int | str


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
    from windlass.cli.output import print_json, print_json_line
    from windlass.errors import ExitCode, UserError

    target, job = find(name, place)
    if tail is None:
        lines = target.logs(job, rank=rank, follow=follow)
    else:
        lines = _last_lines(target, job, rank, tail, follow=follow)
    lines = _newer(lines, begin)
    if rank is not None and not follow:
        lines = iter(list(lines))  # a cluster's log may only come to be here by asking for it
        if not job.folder.rank_log(rank).exists():
            raise UserError(f"rank {rank} of {job.name} has said nothing", evidence=f"no {job.folder.rank_log(rank)}")
    if as_json and not follow:
        print_json([_as_dict(line) for line in lines])
        return None
    try:
        for line in lines:
            if as_json:
                print_json_line(_as_dict(line))
            elif rank is not None:
                click.echo(line.text)
            else:
                click.echo(f"[{_source(line)}] {line.text}")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return None


def _source(line: LogLine) -> Source:
    return line.source if line.rank is None else line.rank


def _as_dict(line: LogLine) -> dict[str, Any]:
    return {"rank": line.rank, "text": line.text} | ({"source": line.source} if line.rank is None else {})


def _last_lines(target: Any, job: Any, rank: int | None, count: int, *, follow: bool) -> Iterator[LogLine]:
    """The last lines that each rank has said by now; with `follow`, then what they say next."""
    kept: dict[Source, deque[LogLine]] = {}
    shown: dict[Source, int] = {}
    for line in target.logs(job, rank=rank, follow=False):
        source = _source(line)
        kept.setdefault(source, deque(maxlen=count)).append(line)
        shown[source] = shown.get(source, 0) + 1
    for lines in kept.values():
        yield from lines
    if not follow:
        return
    for line in target.logs(job, rank=rank, follow=True):
        source = _source(line)
        if shown.get(source, 0):
            shown[source] -= 1
        else:
            yield line


def _newer(lines: Iterator[LogLine], begin: float | None) -> Iterator[LogLine]:
    """Lines from a moment on."""
    if begin is None:
        yield from lines
        return
    new: dict[Source, bool] = {}
    for line in lines:
        stamp = STAMP.match(line.text)
        if stamp:
            new[_source(line)] = datetime.fromisoformat(stamp[0]).timestamp() >= begin
        if new.get(_source(line), False):
            yield line
