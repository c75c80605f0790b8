"""Events of a job's objects, kept: a cluster forgets them after an hour."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from windlass.runfolder import RunFolder, append_json_line, read_json_lines
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.watch.pods import moment


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


class EventLog:
    """events.jsonl: each event once, and again when it happened again."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._kept = {(one.get("uid"), one.get("count")) for one in read_json_lines(folder.events)}

    def take(self, event: Object) -> None:
        record = record_of(event)
        key = (record["uid"], record["count"])
        with self._lock:
            if key not in self._kept:
                self._kept.add(key)
                append_json_line(self.folder.events, record)


def events_now(api: Api, job: ClusterJob) -> Iterator[Object]:
    """What the cluster remembers about the job's objects, all of which are named after it."""
    for event in api.items(object_path("v1", "events", job.namespace)):
        if job.names(str((event.get("involvedObject") or {}).get("name") or "")):
            yield event
