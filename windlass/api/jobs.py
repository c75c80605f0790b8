"""A run that exists: where it stands, what it said, why it failed, its numbers; and how it is stopped."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from windlass.api.diagnosis import facts_of_job, judge
from windlass.api.lookup import find, load_run
from windlass.api.preparation import is_under_way
from windlass.api.schemas.runs import LogLine, RunResult, ShownRun, Status, StopResult, WhyResult
from windlass.api.submission import result_of
from windlass.api.summary import History, compared_ranks, evaluated_tasks, goodput_of, loss_points, summarize
from windlass.common.files import read_json_lines, whole
from windlass.errors import UserError
from windlass.runfolder import steps_of
from windlass.spec import Run
from windlass.targets.launch.ending import unrecorded_end
from windlass.targets.protocol import JobRef, KeepsRunFolder, RunsInPods, Target
from windlass.targets.protocol import LogLine as Line

POLL_SECONDS = 0.5
STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")

Source = int | str
Table = dict[str, list[Any]]


class Job:
    """A run on its target. Get one from `windlass.submit` or `windlass.job`; the run goes on without it."""

    def __init__(self, target: Target[Any], ref: JobRef, warnings: list[str] | None = None) -> None:
        self._target, self._ref = target, ref
        self.warnings: list[str] = warnings or []
        """What was said before the start."""

    @classmethod
    def find(cls, name: str, on: str | None = None) -> Job:
        return cls(*find(name, on))

    @property
    def name(self) -> str:
        return self._ref.name

    @property
    def target(self) -> str:
        """local, slurm or kubernetes."""
        return self._ref.target

    @property
    def folder(self) -> Path:
        """The run folder, the same on every target."""
        return self._ref.folder.path

    @property
    def run(self) -> Run:
        """The run with everything filled in."""
        return load_run(self._ref.folder)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, target={self.target!r}, folder={str(self.folder)!r})"

    def status(self) -> Status:
        """Where it stands now."""
        return Status(**self._target.status(self._ref).as_dict())

    def show(self, *, curve: bool = False, ranks: bool = False) -> ShownRun:
        """Where it stands and how it came there: summary, goodput, history, pods. As `windlass show --json`."""
        return shown_run(self._target, self._ref, curve=curve, ranks=ranks)[0]

    def logs(
        self,
        *,
        rank: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: float | None = None,
    ) -> Iterator[LogLine]:
        """What the ranks said, and their launcher where it adds something.

        `follow`: until the run has ended. `tail`: only the last lines of each rank. `since`: seconds since 1970; times
        are those at the beginning of lines, and a line without one belongs to the line before it.
        """
        if tail is None:
            lines = self._target.logs(self._ref, rank=rank, follow=follow)
        else:
            lines = self._last_lines(rank, tail, follow=follow)
        if rank is not None and not follow:
            lines = iter(list(lines))  # a cluster's log may only come to be here by asking for it
            log = self._ref.folder.rank_log(rank)
            if not log.exists():
                ranks = sorted(int(path.stem.removeprefix("rank-")) for path in log.parent.glob("rank-*[0-9].log"))
                raise UserError(
                    f"rank {rank} of {self.name} has said nothing",
                    evidence=f"no {log}",
                    fix=f"--rank {ranks[0]} to {ranks[-1]}" if ranks else f"windlass show {self.name}",
                )
        return map(_as_model, _newer(lines, since))

    def _last_lines(self, rank: int | None, count: int, *, follow: bool) -> Iterator[Line]:
        """The last lines that each rank has said by now; with `follow`, then what they say next."""
        kept: dict[Source, deque[Line]] = {}
        shown: dict[Source, int] = {}
        for line in self._target.logs(self._ref, rank=rank, follow=False):
            source = _source(line)
            kept.setdefault(source, deque(maxlen=count)).append(line)
            shown[source] = shown.get(source, 0) + 1
        for lines in kept.values():
            yield from lines
        if not follow:
            return
        for line in self._target.logs(self._ref, rank=rank, follow=True):
            source = _source(line)
            if shown.get(source, 0):
                shown[source] -= 1
            else:
                yield line

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait until the run has ended, or for `timeout` seconds; where it stands then, and its error if it failed.

        The folder here fills meanwhile, also of a run on a cluster. It submits nothing again: the retry loop that
        `submit` leaves does.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        target, job = self._target, self._ref
        with target.following(job) if isinstance(target, KeepsRunFolder) else nullcontext():
            while True:
                status = target.status(job)
                if status.ended or (deadline is not None and time.monotonic() >= deadline):
                    break
                time.sleep(POLL_SECONDS)
        return result_of(job.folder, status, self.warnings)

    def why(self) -> WhyResult:
        """Why it failed or waits, with the evidence and what to do. As `windlass why --json`."""
        return judge(*facts_of_job(self._target, self._ref))

    def metrics(self, kind: Literal["step", "validation"] = "step") -> Table:
        """The numbers of every step, or of every validation, as a table by columns: `pandas.DataFrame(job.metrics())`.

        docs/metrics.md has the columns. A step that was repeated after a restart is there once, as it was last.
        """
        if kind == "step":
            rows = list(steps_of(self._ref.folder).values())
        else:
            records = (record for record in read_json_lines(self._ref.folder.metrics) if record.get("kind") == kind)
            rows = list({whole(record.get("step")): record for record in records}.values())
        columns = dict.fromkeys(key for row in rows for key in row if key != "kind")
        return {column: [row.get(column) for row in rows] for column in columns}

    def stop(self, *, save_first: bool = True) -> StopResult:
        """Save a checkpoint and stop it; waits for that. Stopping a run that has ended is no error."""
        before = self._target.status(self._ref)
        after = self._target.stop(self._ref, save_first=save_first)
        return StopResult(name=self.name, was=before.state, **after.as_dict())


def shown_run(
    target: Target[Any], job: JobRef, *, curve: bool = False, ranks: bool = False
) -> tuple[ShownRun, History]:
    """Where a run stands and how it came there, told from its target and its history."""
    run, status = load_run(job.folder), target.status(job)
    end = unrecorded_end(job.folder, status)
    history = History.of(job.folder, end)
    is_timed = history.ended is not None or is_under_way(status)  # of a copy nobody knows when it ended
    more: dict[str, Any] = {}
    if ranks:
        more["ranks"] = compared_ranks(job.folder)
    if isinstance(target, RunsInPods):
        more["pods"] = [asdict(pod) for pod in target.pods(job)]
    if curve:
        more["curve"] = loss_points(job.folder)
    shown = ShownRun(
        name=job.name,
        folder=str(job.folder.path),
        **status.as_dict(),
        model=run.model.label,
        started=history.began,
        seconds=history.seconds(time.time()) if is_timed else None,
        summary=summarize(job.folder, history),
        evaluations=evaluated_tasks(read_json_lines(job.folder.evaluations)),
        goodput=goodput_of(job.folder, under_way=is_under_way(status), end=end),
        history=list(history.records),
        history_left_out=history.left_out,
        **more,
    )
    return shown, history


def _source(line: Line) -> Source:
    return line.source if line.rank is None else line.rank


def _as_model(line: Line) -> LogLine:
    source = {"source": line.source} if line.rank is None else {}
    return LogLine(rank=line.rank, text=line.text, **source)


def _newer(lines: Iterator[Line], begin: float | None) -> Iterator[Line]:
    """Lines from a moment on."""
    if begin is None:
        yield from lines
        return
    new: dict[Source, bool] = {}
    for line in lines:
        stamp = STAMP.match(line.text)
        if stamp:
            with suppress(ValueError):  # digits that are no date
                new[_source(line)] = datetime.fromisoformat(stamp[0]).timestamp() >= begin
        if new.get(_source(line), False):
            yield line
