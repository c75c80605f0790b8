"""Curves as SVG, for papers and reports. Pure: points in, text out; no library draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

COLOURS = ("#0e7c86", "#c2570c", "#6b4fbb", "#2f7d3b", "#b8336a", "#7a6a00", "#33609c", "#5d4037")
FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 30, 40
DENSE = 300  # points of a line, from which on it is thin
LINE_HEIGHT = 16
CHARACTER = 6.3  # the width of one of the legend, about


@dataclass(frozen=True)
class Curve:
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    faint: bool = False  # what was measured, behind what is smoothed
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    curves: Sequence[Curve]
    x_label: str = "step"
    is_time: bool = False
    logarithmic: bool = False
    marks: Sequence[float] = field(default=())  # restarts


def draw(chart: Chart, *, width: int = 640, height: int = 360, background: str | None = None) -> str:
    """One chart as a whole SVG document."""
    known = [(x, y) for curve in chart.curves for x, y in zip(curve.xs, curve.ys, strict=True) if _fits(y, chart)]
    labels = [curve for curve in chart.curves if curve.label]
    legend = _legend(labels, width) if len(labels) > 1 else []
    top = TOP + LINE_HEIGHT * (1 + max(row for row, _, _ in legend) if legend else 0)
    frame = _Frame(known, chart, width, height, top)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"{FONT} font-size='11' role='img' aria-label='{escape(chart.title, quote=True)}'>"
    ]
    if background:
        parts.append(f"<rect width='{width}' height='{height}' fill='{escape(background, quote=True)}'/>")
    parts.append(
        f"<text x='{LEFT}' y='18' font-size='13' font-weight='600' fill='currentColor'>{escape(chart.title)}</text>"
    )
    parts += [_legend_entry(curve, row, x) for row, x, curve in legend]
    if not known:
        parts.append(f"<text x='{width / 2}' y='{height / 2}' text-anchor='middle' fill='#888'>no points</text></svg>")
        return "\n".join(parts)
    parts += frame.axes()
    for at in chart.marks:
        x = frame.x(at)
        if LEFT <= x <= width - RIGHT:
            parts.append(
                f"<path d='M{x:.1f} {top}V{height - BOTTOM}' stroke='#b3261e' stroke-dasharray='3 3' opacity='.6'/>"
            )
    for curve in chart.curves:
        parts += frame.line(curve)
    return "\n".join([*parts, "</svg>"])


def _fits(y: float, chart: Chart) -> bool:
    return math.isfinite(y) and (y > 0 or not chart.logarithmic)


class _Frame:
    """Where the numbers of a chart lie on the page."""

    def __init__(self, points: list[tuple[float, float]], chart: Chart, width: int, height: int, top: int) -> None:
        self.chart, self.width, self.height, self.top = chart, width, height, top
        xs, ys = [x for x, _ in points] or [0.0], [self._level(y) for _, y in points] or [0.0]
        self.left, self.right = min(xs), max(xs)
        room = 0.05 * (max(ys) - min(ys) or abs(max(ys)) or 1.0)
        self.low, self.high = min(ys) - room, max(ys) + room
        if not chart.logarithmic and min(ys) >= 0:
            self.low = max(self.low, 0.0)

    def _level(self, y: float) -> float:
        return math.log10(y) if self.chart.logarithmic else y

    def x(self, value: float) -> float:
        span = self.right - self.left or 1.0
        return LEFT + (value - self.left) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (self._level(value) - self.low) / (self.high - self.low)
        return self.height - BOTTOM - share * (self.height - BOTTOM - self.top)

    def axes(self) -> list[str]:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        parts = []
        for value, text in self._y_ticks():
            y = self.y(value)
            parts.append(f"<path d='M{LEFT} {y:.1f}H{right}' stroke='#888' stroke-opacity='.22'/>")
            parts.append(f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end' fill='#777'>{text}</text>")
        for value, text in self._x_ticks():
            x = self.x(value)
            parts.append(f"<path d='M{x:.1f} {bottom}v4' stroke='#888' stroke-opacity='.6'/>")
            parts.append(f"<text x='{x:.1f}' y='{bottom + 17}' text-anchor='middle' fill='#777'>{text}</text>")
        parts.append(f"<path d='M{LEFT} {bottom}H{right}' stroke='#888' stroke-opacity='.6'/>")
        label = escape(self.chart.x_label)
        parts.append(
            f"<text x='{(LEFT + right) / 2:.0f}' y='{self.height - 6}' text-anchor='middle' fill='#777'>{label}</text>"
        )
        return parts

    def _y_ticks(self) -> list[tuple[float, str]]:
        if not self.chart.logarithmic:
            return [(value, _short(value)) for value in ticks(self.low, self.high, 5)]
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        shown = [value for value in values if self.low <= math.log10(value) <= self.high]
        return [(value, _short(value)) for value in shown[:: max(1, len(shown) // 6)]]

    def _x_ticks(self) -> list[tuple[float, str]]:
        many = max(2, (self.width - LEFT - RIGHT) // 90)
        values = ticks(self.left, self.right, many)
        shown: Callable[[float], str] = _clock if self.chart.is_time else _short
        return [(value, shown(value)) for value in values]

    def line(self, curve: Curve) -> list[str]:
        colour = COLOURS[curve.colour % len(COLOURS)]
        pairs = zip(curve.xs, curve.ys, strict=True)
        points = [(self.x(x), self.y(y)) for x, y in pairs if _fits(y, self.chart)]
        if not points:
            return []
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        width = 0.9 if len(points) > DENSE or curve.faint else 1.6
        look = f"stroke-width='{width}'" + (" opacity='.3'" if curve.faint else "")
        parts = [f"<path d='M{path}' fill='none' stroke='{colour}' stroke-linejoin='round' {look}/>"]
        if curve.dots or len(points) == 1:
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{colour}'/>" for x, y in points]
        return parts


def ticks(low: float, high: float, many: int) -> list[float]:
    """About so many round numbers between two."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, many)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [position * step for position in range(first, math.floor(high / step + 1e-9) + 1)]


def _legend(curves: Sequence[Curve], width: int) -> list[tuple[int, float, Curve]]:
    """The row and the place of each label, in as many rows as they need."""
    entries, row, x = [], 0, float(LEFT)
    for curve in curves:
        length = 24 + CHARACTER * len(curve.label)
        if x > LEFT and x + length > width - RIGHT:
            row, x = row + 1, float(LEFT)
        entries.append((row, x, curve))
        x += length + 12
    return entries


def _legend_entry(curve: Curve, row: int, x: float) -> str:
    y = TOP + 6 + LINE_HEIGHT * row
    colour = COLOURS[curve.colour % len(COLOURS)]
    line = f"<path d='M{x:.0f} {y - 4}h16' stroke='{colour}' stroke-width='2.4'/>"
    return f"{line}<text x='{x + 22:.0f}' y='{y}' fill='currentColor'>{escape(curve.label)}</text>"


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.2g}"


def _clock(value: float) -> str:
    return datetime.fromtimestamp(value, UTC).strftime("%d %b %H:%M")
