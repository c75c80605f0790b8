"""A run's summary on the terminal: rows, its loss curve, where its time went, how its ranks compare."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import click

from windlass.api.schemas.runs import EvaluatedTask, RanksCompared, RunGoodput, Summary
from windlass.api.summary import loss_points
from windlass.cli.output import count, duration, line_width, moment, number, print_table
from windlass.runfolder import RunFolder

SMALLEST_SHARE = 0.005  # of the time: less is not shown
# Dots of a braille character, by column and row (from the top).
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BRAILLE = 0x2800


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


def goodput_rows(goodput: RunGoodput) -> list[tuple[str, str]]:
    if goodput.goodput is None or goodput.seconds <= 0:
        return []
    lost = [
        f"{name} {seconds / goodput.seconds:.1%}"
        for name, seconds in goodput.parts_s.items()
        if name != "training" and seconds >= SMALLEST_SHARE * goodput.seconds
    ]
    rows = [("goodput", f"{goodput.goodput:.1%} of {duration(goodput.seconds)} trained")]
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


def print_evaluations(tasks: Sequence[EvaluatedTask]) -> None:
    rows = [
        [
            task.task,
            f"{task.metric} ({task.filter})" if task.filter else task.metric,
            number(task.value),
            f"± {number(task.stderr)}" if task.stderr is not None else "",
            *(str("–" if value is None else value) for value in (task.step, task.shots)),
            count(task.samples),
        ]
        for task in tasks
    ]
    print_table(["TASK", "METRIC", "VALUE", "", "STEP", "SHOTS", "EXAMPLES"], rows)


def draw_curve(
    points: Sequence[tuple[float, float]], *, width: int = 72, height: int = 12, title: str = "", braille: bool = True
) -> str:
    """The points (x ascending) as a line of dots, with the range of both axes written beside them."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return f"{title}: nothing to draw" if points else f"{title}: no points yet"
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    first, last = finite[0][0], finite[-1][0]
    labels = _labels(low, high, height)
    margin = max(len(label) for label in labels)
    columns = max(8, width - margin - 2)
    per_cell = (2, 4) if braille else (1, 1)
    heights = _resample(finite, columns * per_cell[0], first, last)
    rows = height * per_cell[1]
    grid = [[0] * columns for _ in range(height)]
    before: int | None = None
    for position, value in enumerate(heights):
        if value is None:
            before = None
            continue
        row = _row(value, low, high, rows)
        # a steep step is drawn as a line, so that the curve hangs together
        begin = row if before is None else before
        for line in range(min(row, begin), max(row, begin) + 1):
            cell, dot = divmod(line, per_cell[1])
            column, half = divmod(position, per_cell[0])
            grid[cell][column] |= DOTS[half][dot] if braille else 1
        before = row
    lines = [title] if title else []
    for label, cells in zip(labels, grid, strict=True):
        drawn = "".join(chr(BRAILLE + cell) if braille else " *"[bool(cell)] for cell in cells).rstrip("\u2800 ")
        lines.append(f"{label:>{margin}} ┤{drawn}" if braille else f"{label:>{margin}} |{drawn}")
    left, right = f"{first:g}", f"{last:g}"
    axis = "─" if braille else "-"
    lines.append(f"{'':>{margin}} {'└' if braille else '+'}{axis * columns}")
    gap = max(1, columns - len(left) - len(right))
    lines.append(f"{'':>{margin}}  {left}" + (f"{'':>{gap}}{right}" if last != first else ""))
    skipped = len(points) - len(finite)
    if skipped:
        lines.append(f"{'':>{margin}}  {skipped} of {len(points)} values are not finite")
    return "\n".join(lines)


def _resample(points: Sequence[tuple[float, float]], slots: int, first: float, last: float) -> list[float | None]:
    """One value per slot: the mean of its points, or the line between its neighbours where it has none."""
    sums, counts = [0.0] * slots, [0] * slots
    for x, y in points:
        slot = 0 if last == first else min(slots - 1, int((x - first) / (last - first) * slots))
        sums[slot] += y
        counts[slot] += 1
    values = [total / many if many else None for total, many in zip(sums, counts, strict=True)]
    known = [(slot, value) for slot, value in enumerate(values) if value is not None]
    for (left, a), (right, b) in itertools.pairwise(known):
        for slot in range(left + 1, right):
            values[slot] = a + (b - a) * (slot - left) / (right - left)
    return values


def _row(value: float, low: float, high: float, rows: int) -> int:
    if high == low:
        return rows // 2
    return min(rows - 1, int((high - value) / (high - low) * rows))


def _labels(low: float, high: float, height: int) -> list[str]:
    """Numbers beside the top, the middle and the bottom row."""
    if high == low:
        return [f"{low:.4g}" if row == height // 2 else "" for row in range(height)]
    wanted = {0: high, height // 2: (high + low) / 2, height - 1: low}
    return [f"{wanted[row]:.4g}" if row in wanted else "" for row in range(height)]
