"""Follow a job: its snapshot stays up to date, and whoever is first keeps the archive."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self

from windlass.common.files import append_json_line, read_json_lines
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.api.errors import in_words
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob
from windlass.targets.kubernetes.pod_scripts import filler
from windlass.targets.kubernetes.watch import archive
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot, JobWatch
from windlass.targets.kubernetes.watch.logs import Collector
from windlass.targets.kubernetes.watch.pods import moment

FIRST_SECONDS = 30.0
TAKE_OVER_SECONDS = 1.0
DRAIN_SECONDS = 60.0


class Following:
    """While it is open: `snapshot` is up to date, and the run folder fills up.

    Of several processes that follow one run folder one keeps the archive; when it leaves, another takes over.
    """

    def __init__(self, api: Api, job: ClusterJob, folder: RunFolder) -> None:
        self.api, self.job, self.folder = api, job, folder
        self._fill = filler(api, job, folder, lambda: self.live.read().now())
        self.live = JobWatch(api, job, on_event=self._event)
        self._events: EventLog | None = None
        self._early: list[Object] = []  # events that came before there was a keeper
        self._event_lock = threading.Lock()
        self._collector: Collector | None = None
        self._leave = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self.live.__enter__()
        self._keeper.start()
        self.live.wait_until_known(FIRST_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._keeper.join(timeout=DRAIN_SECONDS)
        self.live.__exit__()

    def snapshot(self) -> JobSnapshot:
        return self.live.read()

    def drain(self) -> None:
        """Wait until the logs of the ended pods are in the folder, where this process is the one that puts it there."""
        collector = self._collector
        if collector is not None:
            collector.drain(DRAIN_SECONDS)
            with contextlib.suppress(OSError):  # the committing thread tries again, and says why it cannot
                collector.archive.commit()

    def _keep(self) -> None:
        while not self._leave.is_set():
            try:
                self._keep_archive()
                self.live.note(None)
            except Exception as error:  # a disk that is full or gone, no file handle left: nothing that ends a run
                self.live.note(f"the run folder here falls behind: {in_words(error)}")
            self._leave.wait(TAKE_OVER_SECONDS)

    def _keep_archive(self) -> None:
        """Until this process leaves; not at all while another one keeps it."""
        with archive.opened(self.folder, self._fill) as kept:
            if kept is None:
                return
            with self._event_lock:
                self._events = EventLog(self.folder)
                for event in self._early:
                    self._events.take(event)
                self._early.clear()
            try:
                with Collector(self.api, self.job, self.live, kept) as self._collector:
                    self._leave.wait()
            finally:
                self._collector = None

    def _event(self, event: Object) -> None:
        with self._event_lock:
            if self._events is not None:
                with contextlib.suppress(OSError):  # a full disk must not end the watch
                    self._events.take(event)
            elif len(self._early) < 1000:
                self._early.append(event)


class EventLog:
    """events.jsonl: each event once, and again when it happened again. A cluster forgets them after an hour."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._kept = {(line.get("uid"), line.get("count")) for line in read_json_lines(folder.events)}

    def take(self, event: Object) -> None:
        record = record_of(event)
        key = (record["uid"], record["count"])
        if key not in self._kept:
            self._kept.add(key)
            append_json_line(self.folder.events, record)


def record_of(event: Object) -> dict[str, Any]:
    """An event as it is kept."""
    about, metadata = event.get("involvedObject") or {}, event.get("metadata") or {}
    series = event.get("series") or {}
    when = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return {
        "time": moment(when or metadata.get("creationTimestamp")),
        "type": event.get("type"),
        "reason": event.get("reason"),
        "object": f"{about.get('kind')}/{about.get('name')}",
        "message": str(event.get("message") or "").strip(),
        "count": event.get("count") or series.get("count") or 1,
        "uid": metadata.get("uid"),
    }
