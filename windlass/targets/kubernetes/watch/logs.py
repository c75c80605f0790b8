"""Read the logs of pods into the archive: streams for as many as the pool holds, in turns for the rest."""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from windlass.errors import UserError
from windlass.targets.kubernetes.api.errors import RefusedError, in_words
from windlass.targets.kubernetes.api.http import Api, Halt
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.watch.archive import Archive, Cursor, Moment, Skipper
from windlass.targets.kubernetes.watch.job_watch import JobWatch
from windlass.targets.kubernetes.watch.pods import Pod

MAX_STREAMS = 128  # pods that are followed line by line; below api.MAX_CONNECTIONS
TURN_SECONDS = 30.0  # between two looks at each of the others
READERS = 16  # looks at a time
COMMIT_SECONDS = 0.5
LOOK_SECONDS = 1.0
RETRY_SECONDS = 1.0
LEAVE_SECONDS = 15.0
LAG_SECONDS = 5.0  # between the watches of a job and of its pods
MOMENT = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})")


@dataclass(frozen=True)
class LogReader:
    """Reads one pod's log from its cursor on."""

    api: Api
    job: ClusterJob
    archive: Archive
    halt: Halt = field(default_factory=Halt)

    def catch_up(self, pod: Pod, *, follow: bool = False) -> None:
        """Everything that is new; with `follow`, until the container has ended. Raises if the cluster cannot tell."""
        cursor = self.archive.cursor(pod.uid)
        if cursor.done or not pod.started:
            return
        if pod.restarts > cursor.restart:
            # the container before this one has a log of its own, and only the last such one is kept
            self._read(pod, cursor, previous=True, follow=False)
            self.archive.note_restart(pod.uid, pod.restarts)
        self._read(pod, cursor, previous=False, follow=follow)
        if pod.ended:
            self.archive.mark_done(pod.uid)

    def _read(self, pod: Pod, cursor: Cursor, *, previous: bool, follow: bool) -> None:
        query: dict[str, str | int | list[str]] = {"container": self.job.layout.container, "timestamps": "true"}
        since = cursor.second()
        if since:
            query["sinceTime"] = since
        if previous:
            query["previous"] = "true"
        if follow:
            query["follow"] = "true"
        skipper = Skipper(cursor)
        try:
            for line in self.api.lines(f"{self.job.pods_path}/{pod.name}/log", query, self.halt):
                parsed = parse_line(line)
                if parsed is not None:  # else the kubelet says that it cannot read the log
                    self.archive.take(skipper, *parsed, pod.node_rank)
        except RefusedError as error:
            # 400: the container is not there (yet, or any more); 404: the pod is gone. There is nothing to read.
            if error.code not in (400, 404):
                raise


def parse_line(line: bytes) -> tuple[Moment, str] | None:
    """The time and the text of a log's line; None where it has no time."""
    stamp, _, text = line.partition(b" ")
    moment = full_moment(stamp.decode(errors="replace"))
    return (moment, text.decode(errors="surrogateescape")) if moment else None


def full_moment(text: str) -> Moment | None:
    """A time in UTC with all nine digits behind the second: times are compared as text.

    The API leaves out zeros, and gives the time of a node that is not on UTC with its offset.
    """
    match = MOMENT.fullmatch(text)
    if match is None:
        return None
    second, fraction, offset = match[1], (match[2] or "")[1:], match[3]
    if offset != "Z":
        try:
            local_time = datetime.datetime.fromisoformat(f"{second}{offset}")
            second = f"{local_time.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%S}"
        except (ValueError, OverflowError):
            return None
    return f"{second}.{fraction:0<9}Z"


def read_once(reader: LogReader, pods: Iterable[Pod]) -> None:
    """One look at each pod."""
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(reader.catch_up, list(pods)):
            pass
    reader.archive.commit()


class Collector:
    """Reads the logs of all pods while they run, in threads of its own."""

    def __init__(self, api: Api, job: ClusterJob, job_watch: JobWatch, archive: Archive) -> None:
        self.job_watch, self.archive, self.halt = job_watch, archive, Halt()
        self.reader = LogReader(api, job, archive, self.halt)
        self._streams: dict[str, threading.Thread] = {}
        self._looked: dict[str, float] = {}
        self._turns: dict[str, threading.Thread] = {}
        self._reported = float("-inf")  # when something could not be written down
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)
        self._committer = threading.Thread(target=self._commit, name="commit", daemon=True)
        job_watch.on_return.append(self.halt.break_streams)

    def __enter__(self) -> Collector:
        self._thread.start()
        self._committer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.halt.now()
        self.job_watch.on_return.remove(self.halt.break_streams)
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in (self._thread, self._committer, *self._streams.values(), *self._turns.values()):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))  # one may hang with its kubelet
        self.archive.commit()

    def drain(self, seconds: float) -> bool:
        """Wait until every pod that has ended, or is gone, was read to its end.

        The job's end may be known a moment before its pods': those that still seem to run get that moment.
        """
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            pods = self.job_watch.read().pods
            lagging = time.monotonic() < begin + LAG_SECONDS
            unread = {uid: pod for uid, pod in pods.items() if pod.started and not self.archive.cursor(uid).done}
            waiting = [uid for uid, pod in unread.items() if pod.ended or lagging]
            gone = [uid for uid, thread in self._streams.items() if uid not in pods and thread.is_alive()]
            if not waiting and not gone:
                return True
            time.sleep(0.1)
        return False

    def _work(self) -> None:
        for _ in self.job_watch.changed(LOOK_SECONDS):
            if self.halt.requested:
                return
            self._quietly(self._assign)

    def _assign(self) -> None:
        """Give every pod that has a log a stream, or a turn."""
        pods = [pod for pod in self.job_watch.read().now() if pod.started]
        self._streams = {uid: thread for uid, thread in self._streams.items() if thread.is_alive()}
        for pod in pods:
            if pod.uid in self._streams or self.archive.cursor(pod.uid).done:
                continue
            if len(self._streams) < MAX_STREAMS:
                self._stream(pod)
            elif self._is_due(pod):
                self._look(pod)

    def _is_due(self, pod: Pod) -> bool:
        """One look at a time at each pod, and so many in all; the last one of a pod need not wait for its turn."""
        self._turns = {uid: thread for uid, thread in self._turns.items() if thread.is_alive()}
        if pod.uid in self._turns or len(self._turns) >= READERS:
            return False
        return pod.ended or time.monotonic() - self._looked.get(pod.uid, float("-inf")) > TURN_SECONDS

    def _look(self, pod: Pod) -> None:
        self._looked[pod.uid] = time.monotonic()
        target, name = self._quietly, f"look at {pod.name}"
        thread = threading.Thread(target=target, args=(self.reader.catch_up, pod), name=name, daemon=True)
        thread.start()
        self._turns[pod.uid] = thread

    def _stream(self, pod: Pod) -> None:
        thread = threading.Thread(target=self._follow, args=(pod,), name=f"log {pod.name}", daemon=True)
        thread.start()
        self._streams[pod.uid] = thread

    def _follow(self, pod: Pod) -> None:
        """Follow one pod until it has ended and everything was read, or it is gone."""
        wait = RETRY_SECONDS
        while not self.halt.requested:
            read = self._quietly(lambda pod=pod: self.reader.catch_up(pod, follow=True))
            now = self.job_watch.read().pods.get(pod.uid)
            if now is None or self.archive.cursor(pod.uid).done:
                return
            pod = now
            wait = RETRY_SECONDS if read else min(2 * wait, TURN_SECONDS)  # a node may be lost for long
            # the stream ends a moment before the pod's status says so
            if not (read and pod.ended) and self.halt.wait(wait):
                return

    def _quietly(self, work: Callable[..., None], *arguments: Pod) -> bool:
        """Whether it went well; whatever did not is reported, and the next turn tries again."""
        try:
            work(*arguments)
        except UserError:  # a node that is lost, a server that restarts, a plugin that fails: the watches say so
            return False
        except Exception as error:
            self._report(error)
            return False
        return True

    def _commit(self) -> None:
        while not self.halt.wait(COMMIT_SECONDS):
            if self._quietly(self.archive.commit) and time.monotonic() - self._reported > 2 * TURN_SECONDS:
                self.job_watch.note(None)

    def _report(self, error: Exception) -> None:
        self._reported = time.monotonic()
        self.job_watch.note(f"the run folder here falls behind: {in_words(error)}")
