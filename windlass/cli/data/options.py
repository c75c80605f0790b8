"""What the commands of `windlass data` share: options of records, counts and sizes as people type them, a bar."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from windlass.cli.output import OneLine, console, has_styles

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


RECORD_OPTIONS = (
    click.option("--text-field", default="text", show_default=True, help="Field of a record that holds the text."),
    click.option(
        "--format",
        type=click.Choice(["text", "chat", "instruction", "preference"]),
        default="text",
        show_default=True,
        help="What a record is; of all but texts only completions are trained on.",
    ),
    click.option("--messages-field", default="messages", show_default=True, help="Field of a chat's messages."),
    click.option("--prompt-field", default="prompt", show_default=True, help="Field of an instruction's prompt."),
    click.option("--completion-field", default="completion", show_default=True, help="And of its completion."),
    click.option("--chosen-field", default="chosen", show_default=True, help="Field of a preference's better answer."),
    click.option("--rejected-field", default="rejected", show_default=True, help="And of its worse one."),
    click.option(
        "--train-on",
        type=click.Choice(["all", "last"]),
        default="all",
        help="Assistant turns of a chat that are trained on.",
    ),
    click.option("--chat-template", default="default", help="Name of the template, of a tokenizer that has several."),
)
RECORD_KEYS = (
    *("text_field", "format", "messages_field", "prompt_field", "completion_field"),
    *("chosen_field", "rejected_field", "train_on", "chat_template"),
)


def record_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say what a record is; it gets them as `records`, by their keys of `data`."""

    @wraps(command)
    def with_records(**options: Any) -> None:
        records = {key: options.pop(key) for key in RECORD_KEYS}
        command(**options, records=records)

    for option in reversed(RECORD_OPTIONS):
        option(with_records)
    return with_records


def count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number with an optional K, M, G or T."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", value.strip().upper())
    number = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a count such as 5000, 10K or 100M", ctx, param)
    return number


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number of bytes: 5000, 10MB, 1.5GiB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", value.strip().upper())
    number = int(float(match[1]) * {**UNITS, **BINARY}[match[2] or ""]) if match else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a size such as 500MB, 10GB or 1.5GiB", ctx, param)
    return number


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal's stderr that a callback (done, total) moves."""
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
