"""How things look on the terminal: tables for people, JSON for programs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from windlass.common.files import finite
from windlass.errors import UserError

GAP = "  "
NOTE_INDENT = "    "
NARROWEST = 20
FILE_WIDTH = 100_000  # a file has no edge: a row of a table is one line there, however long
RULE_WIDTH = 80
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class CommandConsole(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # main decides what it means that nobody reads any more; rich would exit with 1


def console(*, stderr: bool = False) -> Console:
    stream, styles = _stream(stderr), has_styles(stderr=stderr)
    return CommandConsole(
        file=stream,
        highlight=False,
        markup=False,
        width=line_width(stderr=stderr) or FILE_WIDTH,
        force_terminal=styles,
        # rich alone would keep bold and dim under NO_COLOR, and has no colours for a TERM that it does not know
        color_system=("auto" if stream.isatty() else "standard") if styles else None,
    )


def line_width(*, stderr: bool = False) -> int | None:
    """Columns of a line: COLUMNS, else the terminal's; None for a file or a pipe, which have no edge."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(NARROWEST, int(columns))
    stream = _stream(stderr)
    if not stream.isatty():
        return None
    try:
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns or RULE_WIDTH)
    except (OSError, ValueError):
        return RULE_WIDTH


def has_styles(*, stderr: bool = False) -> bool:
    """Whether colours and other escapes may be written: on terminals, unless the user or the terminal is against it."""
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return _stream(stderr).isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _stream(stderr: bool) -> TextIO:
    return sys.stderr if stderr else sys.stdout


def wrapped(text: str, indent: str = "", *, stderr: bool = False) -> str:
    """A line that breaks between words where the stream ends; words that are longer, such as paths, stay whole."""
    if "\n" in text:  # a diff below a sentence, say
        return "\n".join(wrapped(line, indent, stderr=stderr) for line in text.split("\n"))
    width = line_width(stderr=stderr)
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def must_be_asked(what: str, *, fix: str, as_json: bool = False) -> None:
    """Refuse a step that somebody must confirm where nobody can be asked; the caller then asks."""
    if as_json or not sys.stdin.isatty():
        raise UserError(
            what,
            cause="nobody can be asked: stdin is not a terminal" if not as_json else "--json asks nothing",
            fix=fix,
            error_code="needs-confirmation",
        )


def warn(text: str) -> None:
    click.echo(wrapped(f"warning: {plain(text)}", "  ", stderr=True), err=True)


def print_rule(title: str) -> None:
    """A line across the page that names what follows."""
    width = min(RULE_WIDTH, line_width() or RULE_WIDTH)
    click.echo(f"── {plain(title)} ".ljust(width, "─"))


class OneLine:
    """A line that is written over itself by carriage returns alone, for terminals that get no escapes."""

    def __init__(self, *, stderr: bool = False) -> None:
        self.stderr = stderr
        self.length = 0

    def show(self, text: str) -> None:
        text = text[: (line_width(stderr=self.stderr) or RULE_WIDTH) - 1]
        self._write(f"\r{text}{' ' * (self.length - len(text))}")
        self.length = len(text)

    def clear(self) -> None:
        if self.length:
            self._write(f"\r{' ' * self.length}\r")
        self.length = 0

    def _write(self, text: str) -> None:
        stream = _stream(self.stderr)
        stream.write(text)
        stream.flush()


def plain(text: str) -> str:
    """Text from a file or a user, without what would steer the terminal."""
    return CONTROL.sub("", text)


def styled(text: str, style: str) -> Text:
    return Text(plain(text), style=style)


def print_json(value: Any) -> None:
    """The result of a command, on stdout. windlass.api.schemas says what each command prints."""
    write_json(_as_json(value), indent=2)


def print_json_line(value: Any, *, stderr: bool = False) -> None:
    """One of several results, on a line of its own."""
    write_json(_as_json(value), stderr=stderr)


def write_json(value: Any, *, indent: int | None = None, stderr: bool = False) -> None:
    click.echo(json.dumps(value, indent=indent, default=str), err=stderr)


def _as_json(value: Any) -> Any:
    from windlass.api.schemas import printed

    return finite(printed(value))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], notes: Sequence[str | None] | None = None
) -> None:
    """A table. Cells are text as it is, never markup: a style comes with `styled`.

    A note goes below its row, over the whole width: sentences make narrow columns. Where the columns do not fit, cells
    break between words; where that is not enough, the first cell, a name mostly, has a line of its own.
    """
    header = [Text(name, style="bold") for name in columns]
    _print_columns([header, *(list(map(_cell, row)) for row in rows)], [None, *notes] if notes is not None else None)


def print_pairs(pairs: Iterable[tuple[str, str | Text]]) -> None:
    rows = [[Text(plain(label), style="bold"), _cell(value)] for label, value in pairs]
    _print_columns(rows, None, stacked=False)


def _print_columns(rows: list[list[Text]], notes: Sequence[str | None] | None, *, stacked: bool = True) -> None:
    out, limit = console(), line_width()
    widths = _widths(rows, limit, overflows=not stacked)
    apart = stacked and limit is not None and sum(widths) + len(GAP) * (len(widths) - 1) > limit
    if apart:
        widths = _widths([row[1:] for row in rows], (limit or 0) - len(GAP))
    for row, note in zip(rows, notes or [None] * len(rows), strict=True):
        if apart:
            _print_line(out, row[0])
            _print_cells(out, row[1:], widths, indent=GAP)
        else:
            _print_cells(out, row, widths)
        if note:
            text = Text(plain(note), style="dim")
            for line in _broken(text, (limit or FILE_WIDTH) - len(NOTE_INDENT)):
                _print_line(out, Text.assemble(NOTE_INDENT, line))


def _widths(rows: list[list[Text]], limit: int | None, *, overflows: bool = False) -> list[int]:
    """The width of each column: what it holds, or less where that breaks cells between words only.

    `overflows`: a long word of the last column may stand out, and does not make the column wide for all of its rows.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(cell.cell_len for cell in column) for column in columns]
    least = [max(_longest_word(cell) for cell in column) for column in columns]
    if overflows:
        least[-1] = min(least[-1], NARROWEST)
    room = (limit or FILE_WIDTH) - len(GAP) * (len(widths) - 1)
    while sum(widths) > room:
        shrinkable = [index for index, width in enumerate(widths) if width > least[index]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(cell: Text) -> int:
    return max((cell_len(word) for word in cell.plain.split()), default=0)


def _print_cells(out: Console, cells: list[Text], widths: list[int], *, indent: str = "") -> None:
    parts = [_broken(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for line in itertools.zip_longest(*parts, fillvalue=Text()):
        padded = [Text.assemble(part, " " * (width - part.cell_len)) for part, width in zip(line, widths, strict=True)]
        _print_line(out, Text.assemble(indent, Text(GAP).join(padded)))


def _broken(text: Text, width: int) -> list[Text]:
    """Lines that break between words; a word that is longer stays whole, where rich would cut it."""
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        breaks = [0]
        for word in re.finditer(r"\S+", paragraph.plain):
            if word.start() > breaks[-1] and cell_len(paragraph.plain[breaks[-1] : word.end()]) > width:
                breaks.append(word.start())
        lines += paragraph.divide(breaks[1:])
    for line in lines:
        line.rstrip()
    return lines


def _print_line(out: Console, line: Text) -> None:
    line.rstrip()
    out.print(line, no_wrap=True, overflow="ignore", crop=False)


def _cell(value: str | Text) -> Text:
    return Text(plain(value)) if isinstance(value, str) else value


def plural(number: int, word: str) -> str:
    """1 rank, 2 ranks"""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def moment(when: float) -> str:
    """2026-11-15 19:02:11, in this machine's time zone"""
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
