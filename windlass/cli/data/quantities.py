"""Counts and sizes as people type them, and a bar that shows how far something has come."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from windlass.cli.output import OneLine, console, has_styles

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number with an optional K, M, G or T."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", value.strip().upper())
    number = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a count such as 5000, 10K or 100M", ctx, param)
    return number


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number of bytes: 5000, 10MB, 1.5GiB."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", value.strip().upper())
    number = int(float(found[1]) * {**UNITS, **BINARY}[found[2] or ""]) if found else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a size such as 500MB, 10GB or 1.5GiB", ctx, param)
    return number


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal's stderr that a callback (done, total) moves."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    if not shown or not sys.stderr.isatty():
        yield None
        return
    if not has_styles(stderr=True):
        line = OneLine(stderr=True)
        try:
            yield lambda done, total: line.show(f"{title} {done / max(1, total):.0%}")
        finally:
            line.clear()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
