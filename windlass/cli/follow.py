"""Follow a run by its folder until it has ended: steps, warnings of ranks, restarts."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import click

from windlass.cli.output import console, count, duration, number
from windlass.runfolder import RunFolder
from windlass.targets.local.state import PACE_STEPS, seconds_left
from windlass.targets.local.tail import Tail
from windlass.targets.protocol import FillsFolder, HasPods, JobRef, JobStatus, PodRow, Target

POLL_SECONDS = 0.2
PLAIN_SECONDS = 5.0  # between two lines where nobody sees a bar move
MOST_PODS = 8  # on the screen; `windlass show` has them all
WORTH_SHOWING = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")


class Reporter(Protocol):
    """Where the news of a run go. A step is a record of metrics.jsonl with `seconds_left` added."""

    def step(self, record: dict[str, Any]) -> None: ...
    def say(self, text: str, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Bar:
    """A progress bar, with everything else printed above it."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
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
            completed=record["step"],
            total=record["steps"],
            loss=number(record.get("loss")),
            speed=count(record.get("tokens_per_s")),
            eta=duration(record["seconds_left"]),
        )

    def say(self, text: str, record: dict[str, Any]) -> None:
        from rich.text import Text

        self.progress.print(Text(text))

    def close(self) -> None:
        self.progress.stop()


class Lines:
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

    def say(self, text: str, record: dict[str, Any]) -> None:
        self._print_step()
        click.echo(text)

    def close(self) -> None:
        self._print_step()

    def _print_step(self) -> None:
        record, self.unprinted = self.unprinted, None
        if record:
            click.echo(
                f"step {record['step']}/{record['steps']}  loss {number(record.get('loss'))}  "
                f"{count(record.get('tokens_per_s'))} tok/s  {duration(record['seconds_left'])} left"
            )


class JsonLines:
    """Every record as it is, on stderr; stdout is for the result."""

    def step(self, record: dict[str, Any]) -> None:
        click.echo(json.dumps(record), err=True)

    def say(self, text: str, record: dict[str, Any]) -> None:
        click.echo(json.dumps({**record, "text": text}), err=True)

    def close(self) -> None:
        pass


def reporter(steps: int, *, as_json: bool) -> Reporter:
    if as_json:
        return JsonLines()
    return Bar(steps) if sys.stdout.isatty() else Lines()


class Follower:
    """Reads what a run folder gained since it was made; make it before the run is started."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.recent: deque[dict[str, Any]] = deque(maxlen=PACE_STEPS)
        self.metrics = Tail(folder.metrics, from_end=True)
        self.history = Tail(folder.history, from_end=True)
        self.logs = {path.name: Tail(path, from_end=True) for path in folder.logs.glob("rank-*.log")}

    def follow(self, target: Target[Any], job: JobRef, news: Reporter) -> JobStatus:
        """Report until the run has ended."""
        filling = target.following(job) if isinstance(target, FillsFolder) else nullcontext()
        try:
            with filling:
                return self._until_ended(target, job, news)
        finally:
            news.close()

    def _until_ended(self, target: Target[Any], job: JobRef, news: Reporter) -> JobStatus:
        waiting_for: str | None = None
        while True:
            status = target.status(job)  # before the reading, so that nothing written before the end is missed
            self._read(news)
            if status.state == "waiting" and job.target != "local" and status.reason != waiting_for:
                waiting_for = status.reason
                pods = list(target.pods(job)) if isinstance(target, HasPods) else []
                record = {"kind": "waiting", "reason": waiting_for, "pods": [asdict(pod) for pod in pods]}
                news.say("\n".join([f"waiting: {waiting_for}", *describe_pods(pods)]), record)
            if status.ended:
                return status
            time.sleep(POLL_SECONDS)

    def _read(self, news: Reporter) -> None:
        for record in self.metrics.records():
            if record.get("kind") == "step":
                self.recent.append(record)
                news.step({**record, "seconds_left": seconds_left(self.recent)})
            elif record.get("kind") == "validation":
                news.say(f"step {record['step']}: validation loss {number(record.get('loss'))}", record)
        for path in sorted(self.folder.logs.glob("rank-*.log")):
            for line in self.logs.setdefault(path.name, Tail(path)).lines():
                if WORTH_SHOWING.search(line):
                    news.say(f"[{path.stem}] {line}", {"kind": "log", "rank": path.stem, "line": line})
        for record in self.history.records():
            text = describe_event(record)
            if text:
                news.say(text, {"kind": "event", **record})


def describe_pods(pods: Sequence[PodRow]) -> list[str]:
    """A line for each pod that does not run, the first few; the age is what somebody who waits wants to know."""
    held = [pod for pod in pods if pod.phase != "Running"]
    lines = [f"  {pod.name:<32} {pod.phase:<11} {pod.reason or '–':<18} {duration(pod.age)}" for pod in held]
    more = [f"  and {len(lines) - MOST_PODS} more"] if len(lines) > MOST_PODS else []
    return lines[:MOST_PODS] + more


def describe_event(record: dict[str, Any]) -> str | None:
    """A history record in a sentence; None for those that are not news."""
    match record.get("event"):
        case "started":
            return f"started on {record.get('world_size')} rank(s)"
        case "resumed":
            tier = f" ({tier})" if (tier := record.get("tier", "shared")) not in ("shared", None) else ""
            return (
                f"resumed from the checkpoint of step {record.get('step')}{tier} on {record.get('world_size')} rank(s)"
            )
        case "rank-died" if record.get("first"):
            how = f"was killed by {record['signal']}" if record.get("signal") else f"exited with code {record['code']}"
            error = f": {record['error']}" if record.get("error") else ""
            return f"rank {record['rank']} {how}{error}"
        case "restart":
            return f"restarting from the last checkpoint (attempt {record['attempt']})"
        case "submitted" if record.get("kind"):
            return f"submitted as {record['kind']} {record['job']} to {record.get('host')}"
        case "submitted":
            return f"submitted as job {record['job']}" + (f" through {record['host']}" if record.get("host") else "")
        case "requeue":
            return f"back to the queue: {record.get('why')}"
        case "job-left":
            return f"job {record.get('job')} started nothing: {record.get('why')}"
        case "stop-refused":
            return f"could not be stopped: {record.get('why')}"
        case "node-lost":
            return f"lost node {record.get('node')}" + (f": {record['why']}" if record.get("why") else "")
        case "checkpoint":
            if record.get("tier", "shared") != "shared":  # copies in memory and on disks are too many to be news
                return None
            return f"saved the checkpoint of step {record['step']} ({duration(record.get('seconds'))})"
        case "checkpoint-damaged":
            return (
                f"passed over the checkpoint {record.get('checkpoint')}: {record.get('file')}: {record.get('reason')}"
            )
        case "checkpoint-passed-over":
            return f"passed over step {record.get('step')} ({record.get('tier')}): {record.get('reason')}"
        case "upload-failed":
            return f"step {record.get('step')} could not be copied to {record.get('to')}: {record.get('error')}"
        case "only-local":
            return f"not in {record.get('store')}: steps {', '.join(map(str, record.get('steps') or ()))}"
        case "checkpoint-failed":
            return f"the checkpoint of step {record.get('step')} could not be saved: {record.get('error')}"
        case "leftovers-killed":
            return f"ended {len(record['pids'])} process(es) that an earlier start of this run had left"
        case "killing":
            return f"killing the ranks: {record['why']}"
        case "preempted":
            return f"saved and stopped at step {record.get('step')}"
        case "exported":
            return f"exported to {record.get('path')}"
        case "gave-up":
            return f"gave up: {record.get('why')}"
    return None
