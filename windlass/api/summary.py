"""What a run came to: its numbers, where its time went, how its ranks compare; from its folder alone.

A run may be millions of steps long: files are read line by line, and no more is kept of them than is shown.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from windlass.api.schemas.runs import EvaluatedTask, RunGoodput, Summary
from windlass.common.files import bounded_lines, parse_record, read_json_lines, real, whole, words
from windlass.goodput.accounting import account, read_metrics
from windlass.runfolder import RunFolder
from windlass.targets.launch.progress import PACE_STEPS, pace
from windlass.targets.launch.tail import newest_steps

MOST_POINTS = 4096  # of a loss curve
MOST_RECORDS = 10_000  # of the history, in JSON
STEP_LINE = b'{"kind":"step","step":'  # as the trainer writes it
ATTEMPT = b'"attempt":'
LAUNCHES = ("submitted", "launched", "started", "resumed")

Record = Mapping[str, Any]


def summarize(folder: RunFolder, history: History | None = None) -> Summary:
    history = history or History.of(folder)
    steps = Steps.of(folder.metrics, history.restarts)
    last = steps.last
    return Summary(
        steps=whole(last.get("step")) or 0,
        loss=real(last.get("loss")),
        learning_rate=real(last.get("learning_rate")),
        validation_loss=steps.validation_loss,
        tokens=whole(last.get("tokens")),
        tokens_per_s=pace(newest_steps(folder.metrics, PACE_STEPS), "tokens_per_s"),
        restarts=len(history.restarts),
        steps_repeated=steps.repeated,
        seconds_lost=steps.seconds_lost,
        exported=history.exported,
    )


@dataclass
class History:
    """One pass over history.jsonl."""

    began: float | None = None
    ended: float | None = None  # the last end, unless the run was started again since
    restarts: set[int] = field(default_factory=set)
    exported: str | None = None
    saves: int = 0
    newest_save: int | None = None
    records: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_RECORDS))
    left_out: int = 0  # older than `records`

    @classmethod
    def of(cls, folder: RunFolder, end: dict[str, Any] | None = None) -> History:
        """`end`: that of the run, where nobody wrote it down."""
        history = cls()
        for record in itertools.chain(read_json_lines(folder.history), [end] if end else []):
            history.add(record)
        return history

    def add(self, record: dict[str, Any]) -> None:
        if len(self.records) == MOST_RECORDS:
            self.left_out += 1
        self.records.append(record)
        when, event = real(record.get("time")), record.get("event")
        if event in LAUNCHES:
            self.began = when if self.began is None else self.began
            self.ended = None
        elif event == "exit":
            self.ended = when
        elif event == "restart" and (attempt := whole(record.get("attempt"))) is not None:
            self.restarts.add(attempt)
        elif event == "exported":
            self.exported = words(record.get("path"))
        if event == "checkpoint" and record.get("tier", "shared") in ("shared", "store", None):
            self.saves += 1
            step = whole(record.get("step"))
            self.newest_save = self.newest_save if step is None else max(step, self.newest_save or 0)

    def seconds(self, now: float) -> float | None:
        """From the first start to the last end, or to now."""
        return None if self.began is None else max(0.0, (self.ended or now) - self.began)


@dataclass
class Steps:
    """One pass over metrics.jsonl: the last step, those that were repeated, and the time that restarts cost."""

    restarts: set[int]
    repeated: int = 0
    seconds_lost: float = 0.0
    validation_loss: float | None = None
    furthest: int | None = None
    _line: bytes = b""  # of the furthest step, as it was first written
    _last_line: bytes = b""  # and as it was last written
    _attempt: bytes = b""

    @classmethod
    def of(cls, path: Path, restarts: set[int]) -> Steps:
        steps = cls(restarts)
        for step, line in _lines(path):
            if step is None:
                steps._add_validation(line)
            else:
                steps.add(step, line)
        return steps

    @property
    def last(self) -> Record:
        return parse_record(self._last_line) or {}

    def add(self, step: int, line: bytes) -> None:
        if self.furthest is not None and step <= self.furthest:
            self.repeated += 1
            if step == self.furthest:
                self._last_line = line
            return
        # lines are parsed where the attempt changes, which is as often as there were restarts
        attempt = line[line.rfind(ATTEMPT) :].partition(b",")[0]
        if attempt != self._attempt and self.furthest is not None:
            self.seconds_lost += _lost(parse_record(self._line) or {}, parse_record(line) or {}, self.restarts)
        self.furthest, self._line, self._last_line, self._attempt = step, line, line, attempt

    def _add_validation(self, line: bytes) -> None:
        record = parse_record(line)
        if record is not None and record.get("kind") == "validation":
            self.validation_loss = real(record.get("loss"))


def _lost(before: Record, after: Record, restarts: set[int]) -> float:
    """Time from the last new step before a restart to the first new one after it, less that step's own time."""
    old, new = whole(before.get("attempt")), whole(after.get("attempt")) or 0
    if old is None or not any(old < restart <= new for restart in restarts):
        return 0.0
    when, until = real(before.get("time")), real(after.get("time"))
    return 0.0 if when is None or until is None else max(0.0, until - when - (real(after.get("step_s")) or 0.0))


def _lines(path: Path) -> Iterator[tuple[int | None, bytes]]:
    """The lines of metrics.jsonl, with the step of those that are a step's. Nothing is parsed that need not be."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    begin = len(STEP_LINE)
    with file:
        for line in bounded_lines(file):
            if line.startswith(STEP_LINE) and line.endswith(b"}\n"):
                digits = line[begin : line.find(b",", begin)]
                if digits.isdigit():
                    yield int(digits[:18]), line
                    continue
            record = parse_record(line)
            if record is None:
                continue
            if record.get("kind") != "step":
                yield None, line
            elif (step := whole(record.get("step"))) is not None:
                yield step, line


def loss_points(folder: RunFolder) -> list[tuple[int, float]]:
    """The loss curve; of a long run every second, fourth, … step. Where a step was repeated, the last one counts."""
    points: list[tuple[int, float]] = []
    stride, skipped = 1, None
    for step, line in _lines(folder.metrics):
        if step is None:
            continue
        if points and step <= points[-1][0]:
            del points[bisect.bisect_left(points, (step,)) :]
        if step % stride:
            skipped = (step, line)
            continue
        skipped = None
        points.append((step, _loss(line)))
        if len(points) > MOST_POINTS:
            stride *= 2
            points = [point for point in points if point[0] % stride == 0]
    if skipped is not None:  # the last one belongs to every curve
        points.append((skipped[0], _loss(skipped[1])))
    return points


def _loss(line: bytes) -> float:
    loss = real((parse_record(line) or {}).get("loss"))
    return float("nan") if loss is None else loss


def goodput_of(folder: RunFolder, *, under_way: bool, end: Record | None = None) -> RunGoodput:
    """`end`: that of the run, where nobody wrote it down."""
    now = time.time() if under_way else None
    history = itertools.chain(read_json_lines(folder.history), [end] if end else [])
    accounted = account(history, read_metrics(folder.metrics), now=now)
    return RunGoodput.model_validate(accounted.as_dict())


def evaluated_tasks(records: Iterable[Record]) -> list[EvaluatedTask]:
    """The results in records of evaluations.jsonl; of one task, step and limit the newest."""
    tasks: dict[tuple[object, ...], EvaluatedTask] = {}
    for record in records:
        results = record.get("results")
        for result in results if isinstance(results, list) else ():
            about = {key: record.get(key) for key in ("step", "time", "limit")}
            with suppress(TypeError, ValidationError):  # a line of another version
                task = EvaluatedTask.model_validate({**result, **about})
                tasks[task.task, task.metric, task.filter, task.step, task.limit] = task
    return list(tasks.values())


def compared_ranks(folder: RunFolder) -> dict[str, Any] | None:
    """The newest comparison of the ranks, with since when each slow rank has been slow."""
    try:
        lines = folder.metrics.open("rb")
    except FileNotFoundError:
        return None
    with lines:
        return newest_comparison(record for line in lines if b'"ranks"' in line and (record := parse_record(line)))


def newest_comparison(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    newest: Mapping[str, Any] | None = None
    since: dict[int, Mapping[str, Any]] = {}
    for record in records:
        slow = record.get("slow")
        if record.get("kind") != "ranks" or not isinstance(slow, list) or not isinstance(record.get("ranks"), list):
            continue
        since = {rank: since.get(rank, record) for rank in slow if isinstance(rank, int)}
        newest = record
    if newest is None:
        return None
    rows = []
    for row in newest["ranks"]:
        rank = whole(row.get("rank")) if isinstance(row, dict) else None
        if rank is None:
            continue
        begin = since.get(rank, {})
        numbers = {key: real(row.get(key)) or 0.0 for key in ("step_s", "data_s", "behind_s")}
        row = {"rank": rank, "host": words(row.get("host")) or "?", **numbers}
        rows.append({**row, "slow_since": real(begin.get("time")), "slow_since_step": whole(begin.get("step"))})
    return {
        "step": whole(newest.get("step")) or 0,
        "steps": whole(newest.get("steps")) or 0,
        "slow": list(since),
        "ranks": sorted(rows, key=lambda row: -float(row["behind_s"])),
    }
