"""Why a job does not run yet, with the numbers that say so."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.targets.kubernetes.api import Api, Object
from windlass.targets.kubernetes.capacity import NodeRoom, charge, node_room, why_not
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.labels import RUN_LABEL
from windlass.targets.kubernetes.picture import Picture
from windlass.targets.kubernetes.pods import HELD_BACK, Pod, newest_by_node, phases
from windlass.targets.kubernetes.refusals import RefusedError
from windlass.targets.kubernetes.state import suspended_by

COUNT_SECONDS = 30.0  # between two counts of a cluster: it may have thousands of pods
MOST_PAGES = 40  # of them: ten thousand pods
SPEAKING = ("FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedScheduling", "Failed")

FIXES = {
    "ErrImagePull": "target.kubernetes.image=NAME    or target.kubernetes.image_pull_secrets=[SECRET]",
    "ImagePullBackOff": "target.kubernetes.image=NAME    or target.kubernetes.image_pull_secrets=[SECRET]",
    "InvalidImageName": "target.kubernetes.image=NAME",
    "ErrImageNeverPull": "target.kubernetes.image_pull_policy=IfNotPresent",
}


@dataclass
class Waiting:
    """Explains, and remembers the counts it made for that."""

    api: Api
    job: ClusterJob
    _counted: float = float("-inf")
    _rooms: list[NodeRoom] = field(default_factory=list)
    _said: str = ""
    _said_of: tuple[Any, ...] = ()

    def explain(self, picture: Picture) -> str:
        """One sentence or several; asked again with the same picture it is the same text, and costs no request."""
        pods = list(newest_by_node(picture.now()).values())
        about = tuple((pod.uid, pod.phase, pod.reason, pod.message, pod.running) for pod in pods)
        stale = time.monotonic() - self._counted > COUNT_SECONDS
        if about != self._said_of or stale:
            self._counted = time.monotonic()
            self._said, self._said_of = self._sentences(picture, pods), about
        return self._said

    def _sentences(self, picture: Picture, pods: Sequence[Pod]) -> str:
        held = suspended_by(picture.job)
        if not pods:
            told = self._events_of(self.job.object_name)
            if held:
                return f"it is held back: {held}"
            return f"no pods yet: {told}" if told else "no pods yet"
        counts = f"{len(pods)} of {self.job.layout.num_pods} pods: {phases(pods)}"
        unscheduled = [pod for pod in pods if pod.reason == "Unschedulable" and not pod.node]
        if unscheduled:
            return "; ".join([counts, *self._why_unscheduled(unscheduled)])
        stuck = [pod for pod in pods if pod.reason in HELD_BACK]
        if stuck:
            fix = FIXES.get(stuck[0].reason)
            said = f"{stuck[0].name}: {HELD_BACK[stuck[0].reason]} ({stuck[0].reason}: {stuck[0].message})"
            return "; ".join([counts, said, *([fix] if fix else [])])
        starting = [pod for pod in pods if pod.phase == "Pending"]
        if starting:
            told = self._events_of(starting[0].name)
            return f"{counts}; {starting[0].name}: {told}" if told else counts
        return f"{counts}; ranks are starting"

    def _why_unscheduled(self, pods: Sequence[Pod]) -> list[str]:
        said = [f"{pods[0].name} cannot be scheduled: {pods[0].message}"]
        value = self.api.find(f"{self.job.pods_path}/{pods[0].name}")
        rooms = self._count() if value is not None else []
        return said + (why_not(value, rooms, num_waiting=len(pods)) if value is not None and rooms else [])

    def _count(self) -> list[NodeRoom]:
        """Every node with what is in use on it; nothing where this user may not look at them."""
        try:
            rooms = {room.name: room for room in map(node_room, self.api.items("/api/v1/nodes"))}
            pages = self.api.pages("/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
            for number, page in enumerate(pages):
                charge(rooms, page.get("items") or (), RUN_LABEL)
                if number + 1 >= MOST_PAGES:
                    break
        except RefusedError as error:
            if error.code == 403:
                return []
            raise
        return list(rooms.values())

    def _events_of(self, name: str) -> str | None:
        """The last thing that was said about an object and is worth repeating."""
        selector = f"involvedObject.name={name},type=Warning"
        path = object_path("v1", "events", self.job.namespace)
        try:
            found = [one for one in self.api.items(path, fieldSelector=selector) if one.get("reason") in SPEAKING]
        except RefusedError as error:
            if error.code == 403:
                return None
            raise
        if not found:
            return None
        last = max(found, key=_time)
        return f"{last.get('reason')}: {last.get('message')}"


def _time(event: Object) -> str:
    metadata: Mapping[str, Any] = event.get("metadata") or {}
    return str(event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or "")
