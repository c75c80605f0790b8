"""A run's summary on the terminal: rows, its loss curve, where its time went, how its ranks compare."""

from __future__ import annotations

import sys

import click

from windlass.api.schemas.runs import RanksCompared, RunGoodput, Summary
from windlass.api.summary import loss_points
from windlass.cli.curve import draw_curve
from windlass.cli.output import count, duration, line_width, moment, number, print_table
from windlass.runfolder import RunFolder

SMALLEST_SHARE = 0.005  # of the time: less is not shown


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("steps", count(summary.steps)),
        ("loss", number(summary.loss)),
        ("validation loss", number(summary.validation_loss)),
        ("learning rate", "–" if summary.learning_rate is None else f"{summary.learning_rate:.4g}"),
        ("tokens", count(summary.tokens)),
        ("tokens/s", count(summary.tokens_per_s)),
        ("restarts", str(summary.restarts)),
    ]
    if summary.restarts:
        rows += [("steps repeated", str(summary.steps_repeated)), ("time lost", duration(summary.seconds_lost))]
    if summary.exported:
        rows.append(("exported", summary.exported))
    return rows


def draw_loss(folder: RunFolder) -> str:
    """The loss curve, as wide as the terminal allows and in characters it can show."""
    width = min(100, line_width() or 80) - 2
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    return draw_curve(loss_points(folder), width=width, title="loss", braille=unicode)


def goodput_rows(told: RunGoodput) -> list[tuple[str, str]]:
    if told.goodput is None or told.seconds <= 0:
        return []
    lost = [
        f"{name} {seconds / told.seconds:.1%}"
        for name, seconds in told.parts_s.items()
        if name != "training" and seconds >= SMALLEST_SHARE * told.seconds
    ]
    rows = [("goodput", f"{told.goodput:.1%} of {duration(told.seconds)} trained")]
    return [*rows, ("", ", ".join(lost))] if lost else rows


def print_ranks(compared: RanksCompared | None) -> None:
    click.echo()
    if compared is None:
        click.echo("  the ranks were not compared yet: that takes two ranks and half a minute of steps")
        return
    rows = [
        [
            str(row.rank),
            row.host,
            duration(row.step_s),
            duration(row.data_s),
            duration(row.behind_s),
            f"step {row.slow_since_step}, {moment(row.slow_since)[-8:]}" if row.slow_since else "–",
        ]
        for row in compared.ranks
    ]
    print_table(["RANK", "HOST", "STEP", "DATA", "BEHIND", "SLOW SINCE"], rows)
