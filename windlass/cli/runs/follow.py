"""Follow a run by its folder until it has ended: steps, warnings of ranks, restarts."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from windlass.cli.output import (
    OneLine,
    console,
    count,
    duration,
    has_styles,
    number,
    plain,
    plural,
    print_json_line,
    wrapped,
)
from windlass.common.files import real, whole, words
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec.compatibility import shown
from windlass.targets.launch.decision import how_it_died
from windlass.targets.launch.progress import PACE_STEPS, seconds_left
from windlass.targets.launch.tail import Tail
from windlass.targets.protocol import JobRef, JobStatus, KeepsRunFolder, PodRow, RunsInPods, Target

POLL_SECONDS = 0.2
PLAIN_SECONDS = 5.0  # between two lines where nobody sees a bar move
MOST_PODS = 8  # on the screen; `windlass show` has them all
WORTH_SHOWING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")


class Reporter:
    """Where the news of a run go. This one prints none: with --quiet, the exit code and the run folder tell it all."""

    def step(self, record: dict[str, Any]) -> None:
        """A record of metrics.jsonl, with `seconds_left` added."""

    def report(self, text: str, record: dict[str, Any]) -> None:
        """Anything else, in a sentence and as a record."""

    def close(self) -> None:
        """The run has ended, or is no longer followed."""


class Bar(Reporter):
    """A progress bar, with everything else printed above it."""

    def __init__(self, steps: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("loss {task.fields[loss]} · {task.fields[speed]} tok/s · {task.fields[eta]} left"),
            console=console(),
            expand=True,
        )
        self.task = self.progress.add_task("starting", total=steps, loss="–", speed="–", eta="–")
        self.progress.start()

    def step(self, record: dict[str, Any]) -> None:
        self.progress.update(
            self.task,
            description="training",
            completed=whole(record.get("step")),
            total=whole(record.get("steps")),
            loss=number(real(record.get("loss"))),
            speed=count(real(record.get("tokens_per_s"))),
            eta=duration(record["seconds_left"]),
        )

    def report(self, text: str, record: dict[str, Any]) -> None:
        self.progress.print(Text(text))

    def close(self) -> None:
        self.progress.stop()


class PlainBar(Reporter):
    """Progress in one line without escapes, with everything else printed above it."""

    def __init__(self, steps: int) -> None:
        self.line = OneLine()
        self.last = f"starting  0/{steps}"
        self.line.show(self.last)

    def step(self, record: dict[str, Any]) -> None:
        self.last = f"training  {_progress(record)}"
        self.line.show(self.last)

    def report(self, text: str, record: dict[str, Any]) -> None:
        self.line.clear()
        click.echo(wrapped(text))
        self.line.show(self.last)

    def close(self) -> None:
        self.line.clear()
        click.echo(self.last)


def _progress(record: dict[str, Any]) -> str:
    return (
        f"{record.get('step')}/{record.get('steps')}  loss {number(real(record.get('loss')))}  "
        f"{count(real(record.get('tokens_per_s')))} tok/s  {duration(record['seconds_left'])} left"
    )


class Lines(Reporter):
    """A line now and then, for files and pipes."""

    def __init__(self) -> None:
        self.last_printed = -PLAIN_SECONDS
        self.unprinted: dict[str, Any] | None = None

    def step(self, record: dict[str, Any]) -> None:
        self.unprinted = record
        now = time.monotonic()
        if now - self.last_printed >= PLAIN_SECONDS:
            self.last_printed = now
            self._print_step()

    def report(self, text: str, record: dict[str, Any]) -> None:
        self._print_step()
        click.echo(wrapped(text))

    def close(self) -> None:
        self._print_step()

    def _print_step(self) -> None:
        record, self.unprinted = self.unprinted, None
        if record:
            click.echo(f"step {_progress(record)}")


class JsonLines(Reporter):
    """Every record as it is, on stderr; stdout is for the result."""

    def step(self, record: dict[str, Any]) -> None:
        print_json_line(record, stderr=True)

    def report(self, text: str, record: dict[str, Any]) -> None:
        print_json_line({**record, "text": text}, stderr=True)


def reporter(steps: int, *, as_json: bool, quiet: bool = False) -> Reporter:
    if as_json:
        return JsonLines()
    if quiet:
        return Reporter()
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Lines()
    return Bar(steps) if has_styles() else PlainBar(steps)


class Follower:
    """Reads what a run folder gained since it was made; make it before the run is started."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.recent: deque[dict[str, Any]] = deque(maxlen=PACE_STEPS)
        self.metrics = Tail(folder.metrics, from_end=True)
        self.history = Tail(folder.history, from_end=True)
        self.logs = {path.name: Tail(path, from_end=True) for path in folder.logs.glob("rank-*.log")}
        self.old_errors = folder.errors()
        self.error_reported = False

    def follow(
        self, target: Target[Any], job: JobRef, news: Reporter, is_held: Callable[[JobStatus], bool] | None = None
    ) -> JobStatus:
        """Report until the run has ended, or `is_held` says that it will not begin."""
        filling = target.following(job) if isinstance(target, KeepsRunFolder) else nullcontext()
        try:
            with filling:
                return self._until_ended(target, job, news, is_held or (lambda _: False))
        finally:
            news.close()

    def _until_ended(
        self, target: Target[Any], job: JobRef, news: Reporter, is_held: Callable[[JobStatus], bool]
    ) -> JobStatus:
        waiting_for: str | None = None
        hindrance: str | None = None  # of a run that trains: a cluster that does not answer, say
        while True:
            status = target.status(job)  # before the reading, so that nothing written before the end is missed
            self._read(news)
            if job.target != "local":  # whose end comes at once, with its error
                self._report_error(news)
            if status.state == "running" and job.target != "local" and status.reason != hindrance:
                reason = status.reason or f"all is well again (it was: {hindrance})"
                hindrance = status.reason
                news.report(f"running: {reason}", {"kind": "running", "reason": hindrance})
            if status.state == "waiting" and job.target != "local" and status.reason != waiting_for:
                waiting_for = status.reason
                pods = list(target.pods(job)) if isinstance(target, RunsInPods) else []
                record = {"kind": "waiting", "reason": waiting_for, "pods": [asdict(pod) for pod in pods]}
                news.report("\n".join([f"waiting: {waiting_for}", *describe_pods(pods)]), record)
            if status.ended or is_held(status):
                return status
            time.sleep(POLL_SECONDS)

    def _read(self, news: Reporter) -> None:
        """Report what is new in the order in which it happened, whichever file it stands in."""
        reports: list[tuple[float, Callable[[], None]]] = []
        for record in self.metrics.records():
            if record.get("kind") == "step" and whole(record.get("step")) is not None:
                reports.append((_when(record), partial(self._step, record, news)))
            elif record.get("kind") == "validation":
                text = f"step {record.get('step')}: validation loss {number(real(record.get('loss')))}"
                reports.append((_when(record), partial(news.report, text, record)))
        for path in sorted(self.folder.logs.glob("rank-*.log")):
            for line in self.logs.setdefault(path.name, Tail(path)).lines():
                if WORTH_SHOWING.search(line):
                    record = {"kind": "log", "rank": path.stem, "line": line}
                    reports.append((_stamp(line), partial(news.report, plain(f"[{path.stem}] {line}"), record)))
        for record in self.history.records():
            event = describe_event(record)
            if event:
                reports.append((_when(record), partial(news.report, plain(event), {"kind": "event", **record})))
        for _, report in sorted(reports, key=lambda pair: pair[0]):
            report()

    def _report_error(self, news: Reporter) -> None:
        """The first error that would come again, while a cluster has yet to say that the job has ended."""
        if self.error_reported:
            return
        for error in self.folder.errors():
            if not error.get("retry") and error not in self.old_errors:
                self.error_reported = True
                rank = whole(error.get("rank"))
                news.report(plain(f"rank {rank} failed\n{_as_raised(error)}"), {"kind": "error", "rank": rank})
                return

    def _step(self, record: dict[str, Any], news: Reporter) -> None:
        self.recent.append(record)
        news.step({**record, "seconds_left": seconds_left(self.recent)})


def _as_raised(error: dict[str, Any]) -> str:
    """The traceback of an error file; an error that is written for users goes without."""
    raised = words(error.get("traceback"))
    return raised.rstrip() if raised and error.get("type") != UserError.__name__ else str(UserError.from_dict(error))


def _when(record: dict[str, Any]) -> float:
    return real(record.get("time")) or 0.0


def _stamp(line: str) -> float:
    """The time at the beginning of a rank's line, at the end of its second."""
    try:
        return datetime.fromisoformat(line[:19]).timestamp() + 0.999
    except (ValueError, OverflowError):
        return 0.0


def describe_pods(pods: Sequence[PodRow]) -> list[str]:
    """A line for each pod that does not run, the first few; the age is what somebody who waits wants to know."""
    held = [pod for pod in pods if pod.phase != "Running"]
    lines = [f"  {pod.name:<32} {pod.phase:<11} {pod.reason or '–':<18} {duration(pod.age)}" for pod in held]
    more = [f"  and {len(lines) - MOST_PODS} more"] if len(lines) > MOST_PODS else []
    return lines[:MOST_PODS] + more


def describe_event(record: Mapping[str, Any]) -> str | None:
    """A history record in a sentence; None for those that are not news. It may hold anything."""
    facts = {key: value for key, value in record.items() if isinstance(value, str | int | float)}
    get = facts.get
    match record.get("event"):
        case "started":
            return f"started on {_ranks(record)}"
        case "resumed":
            tier = f" ({get('tier')})" if get("tier", "shared") != "shared" else ""
            return f"resumed from the checkpoint of step {get('step')}{tier} on {_ranks(record)}"
        case "rank-died" if get("first"):
            how = how_it_died(words(get("signal")), whole(get("code")), words(get("oom")))
            return f"rank {get('rank')} {how}" + (f": {get('error')}" if get("error") else "")
        case "restart":
            return f"restarting {_from_where(record)} (attempt {get('attempt')})"
        case "retry":
            edit = record.get("edit")
            lines = diff_of(edit) if isinstance(edit, dict) else []
            nodes = record.get("exclude")
            if isinstance(nodes, list) and nodes:
                lines.append(f"  without the nodes {', '.join(map(str, nodes))}")
            after = f" in {duration(real(get('backoff')))}" if get("backoff") else ""
            return "\n".join([f"submitting it again{after}: {get('class')}: {get('why')}", *lines])
        case "waits":
            return f"waits: {get('class')}: {get('why')}" + (f"\n  fix: {get('fix')}" if get("fix") else "")
        case "pod-removed":
            return f"{get('pod')} was taken off {get('node')}, which does not answer: a new pod takes its place"
        case "settings-changed":
            changes = record.get("changes")
            pairs = changes.items() if isinstance(changes, dict) else ()
            described = [
                f"{key} {shown(values[0])} → {shown(values[1])}"
                for key, values in pairs
                if isinstance(values, list) and len(values) == 2
            ]
            return "goes on with other settings" + (f": {', '.join(described)}" if described else "")
        case "code-changed":
            return f"goes on from step {get('step')} with other code of {_listed(record.get('keys'))}"
        case "started-over":
            return f"began again at step 0: step {get('step')} was saved on the nodes alone, and they are gone"
        case "branched":
            return f"branched from step {get('step')} of {get('source')}; {get('data')}"
        case "submitted" if get("kind"):
            return f"submitted as {get('kind')} {get('job')} to {get('host')}"
        case "submitted":
            return f"submitted as job {get('job')}" + (f" through {get('host')}" if get("host") else "")
        case "requeue":
            return f"back to the queue: {get('why')}"
        case "job-left":
            return f"job {get('job')} started nothing: {get('why')}"
        case "stop-refused":
            return f"could not be stopped: {get('why')}"
        case "node-lost":
            return f"lost node {get('node')}" + (f": {get('why')}" if get("why") else "")
        case "checkpoint":
            if get("tier", "shared") not in (
                "shared",
                "store",
            ):  # copies in memory and on disks are too many to be news
                return None
            return f"saved the checkpoint of step {get('step')} ({duration(real(get('seconds')))})"
        case "checkpoint-damaged":
            return f"passed over the checkpoint {get('checkpoint')}: {get('file')}: {get('reason')}"
        case "checkpoint-passed-over":
            return f"passed over step {get('step')} ({get('tier')}): {get('reason')}"
        case "upload-failed":
            return f"step {get('step')} could not be copied to {get('to')}: {get('error')}"
        case "only-local":
            steps = record.get("steps")
            return f"not in {get('store')}: steps {', '.join(map(str, steps if isinstance(steps, list) else ()))}"
        case "checkpoint-failed":
            return f"the checkpoint of step {get('step')} could not be saved: {get('error')}"
        case "leftovers-killed":
            pids = record.get("pids")
            number_of = len(pids) if isinstance(pids, list) else 0
            ended = "1 process" if number_of == 1 else f"{number_of} processes"
            return f"ended {ended} that an earlier start of this run had left"
        case "stop-requested":
            how = "asked to save and stop" if get("save_first", True) else "told to stop at once"
            return how + (f" by {get('by')}" if get("by") else "")
        case "killing":
            return f"killing the ranks: {get('why')}"
        case "preempted":
            return f"saved and stopped at step {get('step')}"
        case "finished":
            return f"trained to step {get('step')}"
        case "exported":
            return f"exported to {get('path')}"
        case "hang":
            return f"no step for {get('seconds')} s: {get('why')}; stacks in {get('stacks')}"
        case "notice-failed":
            return f"{get('to')} was not told ({get('occasion')}): {get('why')}"
        case "gave-up":
            return f"gave up: {get('why')}"
    return None


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) else "its own"


def diff_of(edit: Mapping[str, Any]) -> list[str]:
    """An edit of the run file as a diff."""
    pairs = [(key, pair) for key, pair in edit.items() if isinstance(pair, list) and len(pair) == 2]
    return [
        line
        for key, (before, after) in pairs
        for line in (*([f"  - {key}: {shown(before)}"] if before is not None else ()), f"  + {key}: {shown(after)}")
    ]


def _ranks(record: Mapping[str, Any]) -> str:
    number_of = whole(record.get("world_size"))
    return "an unknown number of ranks" if number_of is None else plural(number_of, "rank")


def _from_where(record: Mapping[str, Any]) -> str:
    if "checkpoint" not in record:
        return "from the last checkpoint"
    step = whole(record.get("checkpoint"))
    return "from the beginning: no checkpoint was saved" if step is None else f"from the checkpoint of step {step}"
