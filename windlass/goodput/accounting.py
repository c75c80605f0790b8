"""Where the time of a run went, attempt by attempt, from its history and its metrics. Pure.

Every second from the first record to the last belongs to one part, so the parts of an attempt add up to its length.
Not counted is the time between the end of a run and somebody starting it again.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.common.files import bounded_lines, parse_record, real, whole

# In the order in which they are shown.
PARTS = (
    "training",
    "queue",  # from its submission, or a requeue, to its start
    "start-up",  # processes, joining, model, data; of the first attempt and of one that somebody started again
    "compile",  # by which the first step of an attempt takes longer than others
    "validation",
    "saving",  # training stands still for the copy to host memory
    "straggler",  # by which a rank that is too slow holds up the others
    "repeated",  # steps that were lost with an attempt: trained again, or cut off
    "detection",  # from the last step of an attempt that died to the notice of it
    "hang",
    "restart",  # from that notice to the next attempt's first step
    "finishing",  # the last save, uploads, export
    "other",
)
BEGINS = ("launched", "submitted")
TRAINS = ("started", "resumed")
ENDS = ("rank-died", "node-lost", "restart", "requeue", "gave-up", "stopped", "exit")
LEAVES = ("finished", "preempted")  # by itself, with a checkpoint
MOST_KEPT = 4096  # times of steps

Record = Mapping[str, Any]


class StepTime(NamedTuple):
    step: int
    time: float
    seconds: float
    stall_s: float


class Slowness(NamedTuple):
    """How long the slowest rank held the others up, in the steps before `time`."""

    time: float
    seconds: float


class Validation(NamedTuple):
    """It validates: time between steps is spent on that."""


Metric = StepTime | Slowness | Validation


@dataclass
class AttemptAccount:
    attempt: int
    begin: float
    end: float
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def as_dict(self) -> dict[str, Any]:
        return {"attempt": self.attempt, **_shown(self.seconds, self.parts)}


@dataclass(frozen=True)
class Account:
    attempts: Sequence[AttemptAccount]

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def parts(self) -> defaultdict[str, float]:
        whole_run: defaultdict[str, float] = defaultdict(float)
        for attempt in self.attempts:
            _add(attempt.parts, to=whole_run)
        return whole_run

    @property
    def goodput(self) -> float | None:
        return _goodput(self.seconds, self.parts)

    def as_dict(self) -> dict[str, Any]:
        attempts = [attempt.as_dict() for attempt in self.attempts]
        return {**_shown(self.seconds, self.parts), "attempts": attempts}


def _add(parts: Mapping[str, float], *, to: defaultdict[str, float]) -> None:
    for name, seconds in parts.items():
        to[name] += seconds


def _goodput(seconds: float, parts: Mapping[str, float]) -> float | None:
    return parts.get("training", 0.0) / seconds if seconds > 0 else None


def _shown(seconds: float, parts: Mapping[str, float]) -> dict[str, Any]:
    parts_s = {name: round(parts[name], 3) for name in PARTS if parts.get(name)}
    return {"seconds": round(seconds, 3), "goodput": _goodput(seconds, parts), "parts_s": parts_s}


def account(history: Iterable[Record], metrics: Iterable[Metric], *, now: float | None = None) -> Account:
    """`now`: of a run that is under way; else it ends with its last record. Metrics are read once and not kept."""
    attempts = _split(history, now)
    usual = _Median()
    furthest = reached = current = 0
    validates = False
    for metric in metrics:
        if isinstance(metric, Validation):
            validates = True
            continue
        # by its time: without a launcher all attempts have the same number
        while current + 1 < len(attempts) and metric.time >= attempts[current + 1].begin:
            current, furthest = current + 1, reached
        if not attempts or metric.time < attempts[current].begin:
            continue
        if isinstance(metric, Slowness):
            attempts[current].held_up_s += max(0.0, metric.seconds)
            continue
        usual.add(max(0.0, metric.seconds - metric.stall_s))
        attempts[current].add_step(metric, is_repeated=metric.step <= furthest)
        reached = max(reached, metric.step)
    for attempt in attempts:
        attempt.add_up(usual.value(), validates=validates)
    return Account([attempt.account for attempt in attempts])


class _Median:
    """Of more values than are worth keeping: every second, fourth, … of them."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.stride, self.count = 1, 0

    def add(self, value: float) -> None:
        if self.count % self.stride == 0:
            self.kept.append(value)
            if len(self.kept) > MOST_KEPT:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.count += 1

    def value(self) -> float:
        return statistics.median(self.kept) if self.kept else 0.0


@dataclass
class _Attempt:
    """The records of one attempt, and how the time between them is called."""

    number: int
    begin: float  # the notice that the one before had ended, or its own submission
    is_restart: bool  # somebody decided that it goes on, nobody started it by hand
    from_queue: bool = False
    launched: float | None = None
    trains: float | None = None  # the loop begins
    hung: bool = False
    leaves: bool = False
    over: float | None = None  # the notice of its end
    end: float = 0.0
    # of its steps, in seconds
    work: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_step_s: float = 0.0
    first_is_repeated: bool = False
    last_step: float | None = None  # when it ended
    held_up_s: float = 0.0  # by slow ranks

    def __post_init__(self) -> None:
        self.account = AttemptAccount(self.number, self.begin, self.begin)

    def is_left_by(self, event: str) -> bool:
        """Whether this event is the first of another attempt."""
        if event in TRAINS:
            return self.trains is not None
        return event in BEGINS and (self.launched is not None or self.trains is not None)

    def note(self, event: str, time: float, number: int | None) -> None:
        self.end = time
        if number is not None and event in ("launched", *TRAINS):
            self.account.attempt = number
        if event == "launched":
            self.launched = time
        elif event in TRAINS:
            self.trains = time
        elif event == "hang":
            self.hung = True
        elif event in LEAVES:
            self.leaves = True
        elif event in ENDS and self.over is None:
            self.over = time

    def add_step(self, step: StepTime, *, is_repeated: bool) -> None:
        work = max(0.0, step.seconds - step.stall_s)
        if self.last_step is None:
            self.first_step_s, self.first_is_repeated = work, is_repeated
        else:
            self.work["repeated" if is_repeated else "training"] += work
        self.work["saving"] += step.seconds - work
        self.last_step = max(self.last_step or step.time, step.time)

    def add_up(self, usual: float, *, validates: bool) -> None:
        """Give every second of the attempt its name."""
        parts = self.account.parts
        self.account.end = self.end
        here = self.begin

        def spend(name: str, until: float | None = None) -> None:
            nonlocal here
            until = self.end if until is None else min(until, self.end)
            if until > here:
                parts[name] += until - here
                here = until

        if self.launched is not None:
            spend("queue" if self.from_queue else "restart" if self.is_restart else "start-up", self.launched)
        spend("restart" if self.is_restart else "start-up", self.over if self.trains is None else self.trains)
        if self.trains is not None and self.last_step is not None:
            last = min(self.last_step, self.end)
            if last > here:
                _add(self._steps(last - here, usual, validates=validates), to=parts)
                here = last
        if self.leaves:
            spend("finishing")
        if self.over is not None and self.trains is not None:
            spend("repeated", min(here + usual, self.over))  # a step that was cut off
            spend("hang" if self.hung else "detection", self.over)
        # an attempt that still runs is in a step
        spend("other" if self.over is not None else "training" if self.trains is not None else "start-up")

    def _steps(self, length: float, usual: float, *, validates: bool) -> Mapping[str, float]:
        """Divide the time between the first step's begin and the last one's end."""
        parts = defaultdict(float, self.work)
        parts["compile"] = max(0.0, self.first_step_s - usual)
        parts["repeated" if self.first_is_repeated else "training"] += self.first_step_s - parts["compile"]
        parts["straggler"] = min(parts["training"], self.held_up_s)
        parts["training"] -= parts["straggler"]
        stepped = sum(parts.values())
        if stepped > length:  # clocks differ a little
            return {name: seconds * length / stepped for name, seconds in parts.items()}
        parts["validation" if validates else "other"] += length - stepped
        return parts


def _split(history: Iterable[Record], now: float | None) -> list[_Attempt]:
    """The attempts of a run; where nothing launched it but torchrun, its starts divide it."""
    attempts: list[_Attempt] = []
    current: _Attempt | None = None
    is_over, newest = True, 0.0
    for record in history:
        event, time = record.get("event"), real(record.get("time"))
        if time is None or not isinstance(event, str):
            continue
        newest = time = max(time, newest)  # two machines may write it
        if is_over or current is None or current.is_left_by(event):
            if event not in (*BEGINS, *TRAINS):
                continue
            begin, goes_on = time, current is not None and not is_over
            if current is not None and goes_on:
                begin = current.end = current.over or time
            from_queue = event == "submitted" or (goes_on and current is not None and current.leaves)
            current = _Attempt(len(attempts) + 1, begin, is_restart=goes_on, from_queue=from_queue)
            attempts.append(current)
        current.note(event, time, whole(record.get("attempt")))
        is_over = event == "exit"
    if current is not None and not is_over and now is not None:
        current.end = max(current.end, now)
    return attempts


# As the trainer writes it; parsing a million lines as JSON would take as long as a step of a large model.
STEP_LINE = re.compile(
    rb'^\{"kind":"step","step":(\d{1,18}),.*"step_s":(NUMBER),.*"checkpoint_s":(NUMBER),.*"time":(NUMBER)[,}]'.replace(
        b"NUMBER", rb"\d{1,12}(?:\.\d{1,12})?(?:e-\d{1,2})?"
    )
)


def read_metrics(path: Path) -> Iterator[Metric]:
    """What `account` needs of metrics.jsonl."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in bounded_lines(file):
            match = STEP_LINE.match(line)
            if match:
                yield StepTime(int(match[1]), float(match[4]), float(match[2]), float(match[3]))
            elif (record := parse_record(line)) is not None:
                metric = _parse(record)
                if metric is not None:
                    yield metric


def _parse(record: Record) -> Metric | None:
    time, step = real(record.get("time")), whole(record.get("step"))
    match record.get("kind"):
        case "validation":
            return Validation()
        case "ranks" if time is not None:
            return Slowness(time, real(record.get("held_up_s")) or 0.0)
        case "step" if time is not None and step is not None:
            stall_s = max(0.0, real(record.get("checkpoint_s")) or 0.0)
            return StepTime(step, time, max(stall_s, real(record.get("step_s")) or 0.0), stall_s)
    return None
