"""One run as the page shows it: curves, attempts, events, checkpoints and ranks, read as its folder grows."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from windlass.checkpoint.browsing import Row, views
from windlass.checkpoint.folder import NODE_TIERS
from windlass.common.files import whole, words
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.ui.growing import GrowingRecords
from windlass.ui.ranks import RankTimes
from windlass.ui.series import Series, clock

TITLES = {
    "loss": "Loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_s": "Tokens per second",
    "mfu": "MFU",
    "memory_gib": "Memory, peak (GiB)",
    "step_s": "Step time (s)",
    "data_s": "Waiting for data (s)",
    "checkpoint_s": "Standing still for saves (s)",
}
METRICS = tuple(metric for metric in TITLES if metric != "validation_loss")  # of a step
VALIDATION = ("loss", "perplexity", "accuracy")
MOST_EVENTS = 1000  # that are sent to a page, and as many saves
MOST_CHARACTERS = 2000  # of an event
MOST_CHECKPOINTS = 200
CHECKPOINT_SECONDS = 4.0
READ_SECONDS = 0.25  # for one look: the rest of a long file comes with the next looks
ENDS = ("exit", "preempted", "finished", "rank-died", "node-lost", "restart", "gave-up")
BAD = (
    "rank-died",
    "node-lost",
    "gave-up",
    "checkpoint-failed",
    "checkpoint-damaged",
    "upload-failed",
    "killing",
    "notice-failed",
)
GOOD = ("finished", "exported")

Describe = Callable[[Mapping[str, Any]], str | None]


@dataclass
class Attempt:
    """From a launch of the ranks to their end."""

    attempt: int  # its number
    began: float
    ended: float | None = None
    first_step: int | None = None
    ranks: int | None = None


@dataclass
class RunView:
    """What is known of one run. `refresh` reads what is new; a lock makes that safe for the threads of a server."""

    folder: RunFolder
    describe: Describe
    steps: Series = field(default_factory=lambda: Series(METRICS))
    validation: Series = field(default_factory=lambda: Series(VALIDATION))
    ranks: RankTimes = field(default_factory=RankTimes)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    saves: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))  # far more than others
    attempts: dict[int, Attempt] = field(default_factory=dict)
    version: int = 0  # one more whenever something was read
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    used: float = field(default_factory=time.monotonic)
    _checkpoints: list[dict[str, Any]] = field(default_factory=list)
    _listed_at: float = -math.inf

    def __post_init__(self) -> None:
        self._metrics = GrowingRecords(self.folder.metrics)
        self._history = GrowingRecords(self.folder.history)

    def refresh(self, seconds: float = READ_SECONDS) -> None:
        with self.lock:
            self.used = time.monotonic()
            until = self.used + seconds
            self._read(self._history, self._add_event, until)
            self._read(self._metrics, self._add_metrics, until)

    def _read(self, file: GrowingRecords, add: Callable[[Mapping[str, Any]], None], until: float) -> None:
        for record in file.read(until=until):
            if file.was_replaced:
                self._forget(file)
                file.was_replaced = False
            add(record)
            self.version += 1
        if file.was_replaced:
            self._forget(file)

    def _forget(self, file: GrowingRecords) -> None:
        self.version += 1
        if file is self._metrics:
            self.steps, self.validation, self.ranks = Series(METRICS), Series(VALIDATION), RankTimes()
        else:
            self.events.clear()
            self.saves.clear()
            self.attempts.clear()

    @property
    def is_complete(self) -> bool:
        """Whether everything that the folder holds was read."""
        return self._metrics.at_end and self._history.at_end

    def _add_metrics(self, record: Mapping[str, Any]) -> None:
        if record.get("kind") == "validation":
            self.validation.add(record)
            return
        if record.get("kind") == "ranks":
            self.ranks.add(record)
            return
        if record.get("kind") != "step" or (step := whole(record.get("step"))) is None:
            return
        number = whole(record.get("attempt")) or 1
        repeats = bool(self.steps.steps) and step <= self.steps.steps[-1]
        self.steps.add(record)
        if repeats:
            self.validation.cut(step)
        attempt = self.attempts.get(number)
        if attempt is not None and attempt.first_step is None:
            attempt.first_step = step

    def _add_event(self, record: Mapping[str, Any]) -> None:
        event, when = words(record.get("event")) or "", clock(record.get("time"))
        number = whole(record.get("attempt"))
        if event in ("launched", "started", "resumed") and when is not None:
            number = number or len(self.attempts) + 1
            attempt = self.attempts.get(number)
            if attempt is None or (event == "launched" and attempt.ended is not None):
                self._end_attempts(when)
                attempt = self.attempts[number] = Attempt(number, when)
            attempt.ranks = whole(record.get("world_size")) or attempt.ranks
        elif event in ENDS and when is not None:
            self._end_attempts(when)
        if shown := self._shown(record):
            (self.saves if shown["tone"] == "save" else self.events).append(shown)

    def _shown(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """An event as the page shows it; None for one that it does not show."""
        event = words(record.get("event")) or ""
        text = self.describe(record)
        if event == "exit":
            reason = words(record.get("reason"))
            is_news = reason and not (self.events and reason in self.events[-1]["text"])
            text = f"ended: {record.get('state')}" + (f" ({reason})" if is_news else "")
        if text is None and event != "checkpoint":
            return None
        return {
            "time": clock(record.get("time")),
            "event": event,
            "text": (text or f"saved step {record.get('step')} ({record.get('tier')})")[:MOST_CHARACTERS],
            "step": whole(record.get("step")),
            "attempt": whole(record.get("attempt")),
            "tier": words(record.get("tier")),
            "tone": _tone(event, record),
        }

    def _end_attempts(self, when: float) -> None:
        for attempt in self.attempts.values():
            if attempt.ended is None:
                attempt.ended = max(attempt.began, when)

    @property
    def num_ranks(self) -> int | None:
        return next((attempt.ranks for attempt in reversed(self.attempts.values()) if attempt.ranks), None)

    def checkpoints(self) -> list[dict[str, Any]]:
        """Listed anew every few seconds: of a large run manifests are large."""
        with self.lock:
            now = time.monotonic()
            if now - self._listed_at > CHECKPOINT_SECONDS:
                self._checkpoints, self._listed_at = checkpoints_of(self.folder), now
            return self._checkpoints

    def shown_events(self, end: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What happened, in its order; and the end of the run, where nobody wrote it down."""
        with self.lock:
            shown = self._shown(end) if end is not None else None
            events = sorted((*self.events, *self.saves), key=lambda event: event["time"] or 0.0)
            return [*events, *([shown] if shown else [])]

    def as_dict(self, end: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`end`: that of the run, where nobody wrote it down."""
        with self.lock:
            attempts = [asdict(attempt) for attempt in self.attempts.values()]
            ended = clock(end.get("time")) if end is not None else None
            return {
                "attempts": [{**attempt, "ended": attempt["ended"] or ended} for attempt in attempts],
                "events": self.shown_events(end),
                "checkpoints": self.checkpoints(),
                "num_steps": len(self.steps),
                "complete": self.is_complete,
                "version": self.version,
            }


def checkpoints_of(folder: RunFolder) -> list[dict[str, Any]]:
    """The checkpoints that lie on this machine, the newest first; those without a manifest are not complete.

    Of tiers on nodes: what this node holds. Object stores are not asked: a page would wait for them.
    """
    rows: list[Row] = []
    for tier in ("shared", *NODE_TIERS):
        try:
            rows += [row for view in views(folder, tier) for row in view.rows()]
        except (UserError, OSError, ValueError):  # it has no such tier, or what is there cannot be read
            continue
    newest = sorted(rows, key=lambda row: (-row.step, row.tier))[:MOST_CHECKPOINTS]
    return [row.as_dict() for row in newest]


def _tone(event: str, record: Mapping[str, Any]) -> str:
    if event in BAD or (event == "exit" and record.get("state") == "failed"):
        return "bad"
    if event in GOOD or (event == "exit" and record.get("state") == "finished"):
        return "good"
    return "save" if event == "checkpoint" else "note"
