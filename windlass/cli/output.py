"""How things look on the terminal: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PLAIN_WIDTH = 120
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console(*, stderr: bool = False) -> Console:
    """A console that is as wide as the terminal, and wide enough where there is none."""
    from rich.console import Console

    class CommandConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # main decides what it means that nobody reads any more; rich would exit with 1

    stream = sys.stderr if stderr else sys.stdout
    return CommandConsole(file=stream, highlight=False, markup=False, width=None if stream.isatty() else PLAIN_WIDTH)


def plain(text: str) -> str:
    """Text from a file or a user, without what would steer the terminal."""
    return CONTROL.sub("", text)


def styled(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(plain(text), style=style)


def print_json(value: Any) -> None:
    """The result of a command, on stdout. windlass.cli.schemas says what each command prints."""
    write_json(value, indent=2)


def print_json_line(value: Any, *, stderr: bool = False) -> None:
    """One of several results, on a line of its own."""
    write_json(value, stderr=stderr)


def write_json(value: Any, *, indent: int | None = None, stderr: bool = False) -> None:
    """What is not finite becomes null, which JSON can say."""
    click.echo(json.dumps(_finite(value), indent=indent, default=str), err=stderr)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], notes: Sequence[str | None] | None = None
) -> None:
    """A table. Cells are text as it is, never markup: a style comes with `styled`.

    A note goes below its row, over the whole width: sentences make narrow columns.
    """
    if notes is not None:
        _print_with_notes(columns, [list(map(_cell, row)) for row in rows], notes)
        return
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console().print(table)


def _print_with_notes(columns: Sequence[str], rows: list[list[Text]], notes: Sequence[str | None]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    header = [Text(name, style="bold") for name in columns]
    widths = [max(cell.cell_len for cell in column) for column in zip(header, *rows, strict=True)]
    out = console()
    for cells, note in zip([header, *rows], [None, *notes], strict=True):
        line = Text("  ").join(
            Text.assemble(cell, " " * (width - cell.cell_len)) for cell, width in zip(cells, widths, strict=True)
        )
        line.rstrip()
        out.print(line, no_wrap=True, overflow="ignore", crop=False)
        if note:
            out.print(Padding(Text(plain(note), style="dim"), (0, 0, 0, 4)))


def _cell(value: str | Text) -> Text:
    from rich.text import Text

    return Text(plain(value)) if isinstance(value, str) else value


def print_pairs(pairs: Iterable[tuple[str, str | Text]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in pairs:
        table.add_row(_cell(label), _cell(text))
    console().print(table)


def plural(number: int, word: str) -> str:
    """1 rank, 2 ranks"""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def moment(when: float) -> str:
    """2026-11-15 19:02:11, in this machine's time zone"""
    import time

    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "–"


def duration(seconds: float | None) -> str:
    """3 min 20 s"""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
