"""Columns of numbers over steps, in bounded memory, thinned so that no peak is lost."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.common.files import real, whole

MOST_ROWS = 1 << 17  # beyond, two rows become one that keeps the smallest and the largest of both
LARGEST = 3e38  # of a column's numbers, which have four bytes each
AXES = ("step", "tokens", "time")

LATEST = 253402300799.0  # the end of the year 9999

Points = tuple[list[float], list[float]]


def clock(value: object) -> float | None:
    """A time that a calendar has, in seconds since 1970."""
    seconds = real(value)
    return seconds if seconds is not None and 0 <= seconds <= LATEST else None


READ: dict[str, Callable[[object], float | None]] = {"tokens": real, "time": clock}


@dataclass
class Series:
    """Rows in the order of steps. A step that is trained again after a restart replaces what came after it."""

    names: Sequence[str]
    most_rows: int = MOST_ROWS
    stride: int = 1  # steps in a row
    steps: array[int] = field(default_factory=lambda: array("q"))
    axes: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in AXES[1:]})
    low: dict[str, array[float]] = field(init=False)
    high: dict[str, array[float]] = field(init=False)  # the same arrays as `low` while a row is one step
    has_gaps: set[str] = field(default_factory=set)
    _in_row: int = 0  # steps that the last row holds

    def __post_init__(self) -> None:
        self.low = {name: array("f") for name in self.names}
        self.high = self.low

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, record: Mapping[str, object]) -> None:
        step = whole(record.get("step"))
        if step is None:
            return
        if self.steps and step <= self.steps[-1]:
            self.cut(step)
        if not self.steps or self._in_row >= self.stride:
            self._append(step, record)
        else:
            self._merge_into_last(step, record)
        if len(self.steps) > self.most_rows:
            self._halve()

    def _append(self, step: int, record: Mapping[str, object]) -> None:
        self._in_row = 1
        self.steps.append(step)
        for name, axis in self.axes.items():
            axis.append(_later(axis, READ[name](record.get(name))))
        for name, column in self.low.items():
            column.append(self._number(name, record.get(name)))
            if self.high is not self.low:
                self.high[name].append(column[-1])

    def _merge_into_last(self, step: int, record: Mapping[str, object]) -> None:
        self._in_row += 1
        self.steps[-1] = step
        for name, axis in self.axes.items():
            axis[-1] = _later(axis, READ[name](record.get(name)))
        for name, low in self.low.items():
            number, high = self._number(name, record.get(name)), self.high[name]
            low[-1] = _known(min, low[-1], number)
            high[-1] = _known(max, high[-1], number)

    def _number(self, name: str, value: object) -> float:
        """NaN stands for a number that is missing."""
        if type(value) is float and -LARGEST < value < LARGEST:  # nearly all of them
            return value
        number = real(value)
        if number is None or abs(number) > LARGEST:
            self.has_gaps.add(name)
            return math.nan
        return number

    def _columns(self) -> list[array[float]]:
        return [*self.low.values(), *(() if self.high is self.low else self.high.values())]

    def cut(self, step: int) -> None:
        """Forget rows from the one that holds `step` on."""
        at = bisect.bisect_left(self.steps, step)
        for column in (*self._columns(), *self.axes.values()):
            del column[at:]
        del self.steps[at:]
        self._in_row = self.stride

    def _halve(self) -> None:
        end = len(self.steps) // 2 * 2
        rest = slice(end, None)
        low = {name: _merged(column, min, end) + column[rest] for name, column in self.low.items()}
        self.high = {name: _merged(column, max, end) + column[rest] for name, column in self.high.items()}
        self.low = low
        self._in_row = 0 if end == len(self.steps) else self._in_row
        self.steps = self.steps[1:end:2] + self.steps[rest]
        self.axes = {name: axis[1:end:2] + axis[rest] for name, axis in self.axes.items()}
        self.stride *= 2

    # What a chart gets.

    def axis(self, name: str) -> Sequence[float]:
        return self.axes.get(name, self.steps)

    def rows_between(self, axis: str, begin: float | None, end: float | None) -> tuple[int, int]:
        """The rows of a range, and one more on each side: a line goes on beyond the edge of a chart."""
        values = self.axis(axis)
        first = 0 if begin is None else max(0, bisect.bisect_left(values, begin) - 1)
        last = len(values) if end is None else min(len(values), bisect.bisect_right(values, end) + 1)
        return first, max(first, last)

    def thinned(self, name: str, axis: str, rows: tuple[int, int], most_points: int) -> Points:
        """At most `most_points` points: of each bucket of rows its smallest and its largest value, where they are."""
        first, last = rows
        positions, low, high = self.axis(axis), self.low[name], self.high[name]
        buckets = max(1, most_points // 2)
        xs: list[float] = []
        ys: list[float] = []
        if last - first <= most_points and high is low:
            for row in range(first, last):
                _append(xs, ys, positions[row], low[row])
            return xs, ys
        count = min(buckets, last - first)
        for bucket in range(count):
            begin = first + (last - first) * bucket // count
            end = first + (last - first) * (bucket + 1) // count
            smallest, largest = self._extremes(name, begin, end)
            for row, value in sorted({(smallest, low[smallest]), (largest, high[largest])}):
                _append(xs, ys, positions[row], value)
        return xs, ys

    def _extremes(self, name: str, begin: int, end: int) -> tuple[int, int]:
        low, high = self.low[name][begin:end], self.high[name][begin:end]
        if name in self.has_gaps:
            rows = [row for row in range(len(low)) if not math.isnan(low[row])]
            if not rows:
                return begin, begin
            return begin + min(rows, key=low.__getitem__), begin + max(rows, key=high.__getitem__)
        return begin + low.index(min(low)), begin + high.index(max(high))

    def smoothed(self, name: str, axis: str, rows: tuple[int, int], most_points: int, weight: float) -> Points:
        """An exponential moving average over all rows, without the bias of its beginning, at some of `rows`."""
        first, last = rows
        positions, low, high = self.axis(axis), self.low[name], self.high[name]
        every = max(1, -(-(last - first) // max(1, most_points)))
        xs: list[float] = []
        ys: list[float] = []
        total = share = 0.0
        for row in range(last):
            value = (low[row] + high[row]) / 2
            if not math.isnan(value):
                total = total * weight + value * (1 - weight)
                share = share * weight + (1 - weight)
            if row >= first and share and ((row - first) % every == 0 or row == last - 1):
                _append(xs, ys, positions[row], total / share)
        return xs, ys


def _later(axis: Sequence[float], position: float | None) -> float:
    """A position that is not before the last one: clocks jump, and charts need their points in order."""
    last = axis[-1] if axis else -math.inf
    return max(last, position) if position is not None else last if axis else 0.0


def _merged(column: array[float], choose: Callable[[float, float], float], end: int) -> array[float]:
    pairs = zip(column[0:end:2], column[1:end:2], strict=True)
    return array("f", (_known(choose, a, b) for a, b in pairs))


def _known(choose: Callable[[float, float], float], a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else choose(a, b)


def _append(xs: list[float], ys: list[float], x: float, y: float) -> None:
    if y == y:  # not NaN: a missing value
        xs.append(x)
        ys.append(float(f"{y:.6g}"))
