"""Where the time of a run went, attempt by attempt, from its history and its metrics. Pure.

Every second from the first record to the last belongs to one part, so the parts of an attempt add up to its length.
Not counted is the time between the end of a run and somebody starting it again.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.common.files import parse_record, real, whole

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


@dataclass
class AttemptAccount:
    attempt: int
    begin: float
    end: float
    parts: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def goodput(self) -> float | None:
        return self.parts["training"] / self.seconds if self.seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "seconds": round(self.seconds, 3),
            "goodput": self.goodput,
            "parts_s": _shown(self.parts),
        }


@dataclass(frozen=True)
class Account:
    attempts: Sequence[AttemptAccount]

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def parts(self) -> Counter[str]:
        whole_run: Counter[str] = Counter()
        for attempt in self.attempts:
            whole_run.update(attempt.parts)
        return whole_run

    @property
    def goodput(self) -> float | None:
        return self.parts["training"] / self.seconds if self.seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 3),
            "goodput": self.goodput,
            "parts_s": _shown(self.parts),
            "attempts": [attempt.as_dict() for attempt in self.attempts],
        }


def _shown(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(parts[name], 3) for name in PARTS if parts.get(name)}


def account(
    history: Iterable[Record],
    steps: Iterable[StepTime],
    *,
    slowness: Iterable[Slowness] = (),
    validates: bool = False,
    now: float | None = None,
) -> Account:
    """`now`: of a run that is under way; else it ends with its last record."""
    attempts = _split(history, now)
    by_attempt = _assign(attempts, steps)
    slow = _assign(attempts, slowness)
    usual = statistics.median([max(0.0, step.seconds - step.stall_s) for one in by_attempt for step in one] or [0.0])
    furthest = 0
    for attempt, steps_here, slow_here in zip(attempts, by_attempt, slow, strict=True):
        attempt.add_up(steps_here, slow_here, usual=usual, furthest=furthest, validates=validates)
        furthest = max([furthest, *(step.step for step in steps_here)])
    return Account([attempt.account for attempt in attempts])


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

    def add_up(
        self, steps: Sequence[StepTime], slow: Sequence[Slowness], *, usual: float, furthest: int, validates: bool
    ) -> None:
        parts = self.account.parts
        self.account.end = self.end
        here = self.begin

        def spend(name: str, until: float | None) -> None:
            nonlocal here
            until = self.end if until is None else min(until, self.end)
            if until > here:
                parts[name] += until - here
                here = until

        if self.launched is not None:
            spend("queue" if self.from_queue else "restart" if self.is_restart else "start-up", self.launched)
        begun = self.trains if self.trains is not None else self.over
        spend("restart" if self.is_restart else "start-up", begun)
        if self.trains is not None and steps:
            last = min(max(step.time for step in steps), self.end)
            if last > here:
                self._add_steps(steps, slow, last - here, usual=usual, furthest=furthest, validates=validates)
                here = last
        if self.leaves:
            spend("finishing", None)
        if self.over is not None and self.trains is not None:
            cut_off = min(usual, max(0.0, self.over - here))
            spend("repeated", here + cut_off)
            spend("hang" if self.hung else "detection", self.over)
        # an attempt that still runs is in a step
        spend("other" if self.over is not None else "training" if self.trains is not None else "start-up", None)

    def _add_steps(
        self,
        steps: Sequence[StepTime],
        slow: Sequence[Slowness],
        length: float,
        *,
        usual: float,
        furthest: int,
        validates: bool,
    ) -> None:
        """Divide the time between the first step's begin and the last one's end."""
        parts: Counter[str] = Counter()
        for index, step in enumerate(steps):
            work = max(0.0, step.seconds - step.stall_s)
            parts["saving"] += step.seconds - work
            compiling = max(0.0, work - usual) if index == 0 else 0.0
            parts["compile"] += compiling
            parts["repeated" if step.step <= furthest else "training"] += work - compiling
        held_up = min(parts["training"], sum(max(0.0, one.seconds) for one in slow))
        parts["training"] -= held_up
        parts["straggler"] += held_up
        stepped = sum(parts.values())
        if stepped > length:  # clocks differ a little
            parts = Counter({name: seconds * length / stepped for name, seconds in parts.items()})
        else:
            parts["validation" if validates else "other"] += length - stepped
        self.account.parts.update(parts)


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


def _assign(attempts: Sequence[_Attempt], records: Iterable[Any]) -> list[list[Any]]:
    """The records of each attempt, by their times: without a launcher all attempts have the same number."""
    assigned: list[list[Any]] = [[] for _ in attempts]
    index = 0
    for record in records:
        while index + 1 < len(attempts) and record.time >= attempts[index + 1].begin:
            index += 1
        if attempts and record.time >= attempts[index].begin:
            assigned[index].append(record)
    return assigned


# As the trainer writes it; parsing a million lines as JSON would take as long as a step of a large model.
STEP_LINE = re.compile(
    rb'^\{"kind":"step","step":(\d{1,18}),.*"step_s":(NUMBER),.*"checkpoint_s":(NUMBER),.*"time":(NUMBER)[,}]'.replace(
        b"NUMBER", rb"\d{1,12}(?:\.\d{1,12})?(?:e-\d{1,2})?"
    )
)


def read_metrics(path: Path) -> tuple[list[StepTime], list[Slowness], bool]:
    """What `account` needs of metrics.jsonl: its steps, what slow ranks cost, and whether it validates."""
    steps: list[StepTime] = []
    slowness: list[Slowness] = []
    validates = False
    for line in _lines(path):
        match = STEP_LINE.match(line)
        if match:
            steps.append(StepTime(int(match[1]), float(match[4]), float(match[2]), float(match[3])))
            continue
        record = parse_record(line) or {}
        time = real(record.get("time"))
        if record.get("kind") == "validation":
            validates = True
        elif record.get("kind") == "ranks" and time is not None:
            slowness.append(Slowness(time, real(record.get("held_up_s")) or 0.0))
        elif record.get("kind") == "step" and time is not None and (step := whole(record.get("step"))) is not None:
            steps.append(
                StepTime(step, time, real(record.get("step_s")) or 0.0, real(record.get("checkpoint_s")) or 0.0)
            )
    return steps, slowness, validates


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from file
