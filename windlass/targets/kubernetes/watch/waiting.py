"""Why a job does not run yet, with the numbers that say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.targets.kubernetes.api.discovery import kueue_version
from windlass.targets.kubernetes.api.errors import if_allowed
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.manifests.capacity import NodeRoom, charge, node_room, why_not
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.trainjob import STEP
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot
from windlass.targets.kubernetes.watch.pods import HELD_BACK, Pod, newest_by_node, phases
from windlass.targets.kubernetes.watch.state import ENDS, how_it_ended, suspended_by

COUNT_SECONDS = 30.0  # between two counts of a cluster: it may have thousands of pods
ASK_SECONDS = 5.0  # between two questions about one object: pods may change many times a second
MOST_PAGES = 40  # of them: ten thousand pods
TELLING_REASONS = (
    "FailedCreate",  # by Jobs and JobSets
    "FailedCreatePod",  # by Kubeflow's training operator
    "FailedMount",
    "FailedAttachVolume",
    "FailedCreatePodSandBox",
    "FailedScheduling",
    "Failed",
)

WORKLOAD_OF = "kueue.x-k8s.io/job-uid"  # label of a Workload: whose it is

FIXES = {
    "ErrImagePull": "target.kubernetes.image=NAME    or target.kubernetes.image_pull_secrets=[SECRET]",
    "ImagePullBackOff": "target.kubernetes.image=NAME    or target.kubernetes.image_pull_secrets=[SECRET]",
    "InvalidImageName": "target.kubernetes.image=NAME",
    "ErrImageNeverPull": "target.kubernetes.image_pull_policy=IfNotPresent",
}


@dataclass
class Waiting:
    """Explains, and remembers for a while what it asked for that."""

    api: Api
    job: ClusterJob
    _explanation: str = ""
    _explained: tuple[Any, ...] = ()
    _explained_at: float = float("-inf")
    _answers: dict[str, tuple[float, Any]] = field(default_factory=dict)  # by question, with the time of each

    def explain(self, snapshot: JobSnapshot) -> str:
        """One sentence or several; asked again with the same snapshot it is the same text, and costs no request."""
        pods = list(newest_by_node(snapshot.now()).values())
        about = tuple((pod.uid, pod.phase, pod.reason, pod.message, pod.running, pod.deleting) for pod in pods)
        stale = time.monotonic() - self._explained_at > COUNT_SECONDS
        if about != self._explained or stale:
            self._explained_at = time.monotonic()
            self._explanation, self._explained = self._sentences(snapshot, pods), about
        return self._explanation

    def _sentences(self, snapshot: JobSnapshot, pods: Sequence[Pod]) -> str:
        held = suspended_by(snapshot.job)
        if held and all(pod.deleting for pod in pods):  # pods of a job that is preempted save before they leave
            queued = self._remember("workload", ASK_SECONDS, self._why_queued)
            leaving = f"{len(pods)} pods leave" if pods else None
            return "; ".join(part for part in (f"it is held back: {held}", leaving, queued) if part)
        if not pods:
            why = self._why_not_made()
            return f"no pods yet: {why}" if why else "no pods yet"
        counts = f"{len(pods)} of {self.job.layout.num_pods} pods: {phases(pods)}"
        unscheduled = [pod for pod in pods if pod.reason == "Unschedulable" and not pod.node]
        if unscheduled:
            return "; ".join([counts, *self._why_unscheduled(unscheduled)])
        stuck = [pod for pod in pods if pod.reason in HELD_BACK]
        if stuck:
            fix = FIXES.get(stuck[0].reason)
            held_back = f"{stuck[0].name}: {HELD_BACK[stuck[0].reason]} ({stuck[0].reason}: {stuck[0].message})"
            return "; ".join([counts, held_back, *([fix] if fix else [])])
        if len(pods) < self.job.layout.num_pods:
            why = self._why_not_made()
            if why:
                return f"{counts}; the others are not made: {why}"
        starting = [pod for pod in pods if pod.phase == "Pending"]
        if starting:
            why = self._events_of(starting[0].name)
            return f"{counts}; {starting[0].name}: {why}" if why else counts
        ended = [pod for pod in pods if pod.ended or pod.deleting]
        if ended:
            why = next((f"{how_it_ended(pod)}; " for pod in ended if pod.reason in ENDS), "")
            return f"{counts}; {why}new pods take their place"
        return f"{counts}; ranks are starting"

    def _why_unscheduled(self, pods: Sequence[Pod]) -> list[str]:
        first = pods[0].name
        notes = [f"{first} cannot be scheduled: {pods[0].message}"]
        value = self._remember(f"pod {first}", COUNT_SECONDS, lambda: self.api.find(f"{self.job.pods_path}/{first}"))
        rooms = self._remember("capacity", COUNT_SECONDS, self._count) if value is not None else []
        return notes + (why_not(value, rooms, num_waiting=len(pods)) if value is not None and rooms else [])

    def _count(self) -> list[NodeRoom]:
        """Every node with what is in use on it; nothing where this user may not look at them."""
        rooms = {room.name: room for room in map(node_room, self.api.items("/api/v1/nodes"))}
        pages = self.api.pages("/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
        for number, page in enumerate(pages):
            charge(rooms, page.get("items") or ())
            if number + 1 >= MOST_PAGES:
                break
        return list(rooms.values())

    def _why_not_made(self) -> str | None:
        """What those who make the pods say: the job itself, and what it made to that end."""
        names = [self.job.object_name]
        if self.job.kind is JobKind.TRAINJOB:  # its JobSet has its name, and makes the Job that makes the pods
            names.append(f"{self.job.object_name}-{STEP}-0")
        return next((why for name in reversed(names) if (why := self._events_of(name))), None)

    def _events_of(self, name: str) -> str | None:
        """The last thing that was said about an object and is worth repeating."""
        answer: str | None = self._remember(f"events {name}", ASK_SECONDS, lambda: self._ask_events(name))
        return answer

    def _ask_events(self, name: str) -> str | None:
        selector = f"involvedObject.name={name},type=Warning"
        path = object_path("v1", "events", self.job.namespace)
        events = [
            part for part in self.api.items(path, fieldSelector=selector) if part.get("reason") in TELLING_REASONS
        ]
        last = max(events, key=_time, default=None)
        return f"{last.get('reason')}: {last.get('message')}" if last is not None else None

    def _why_queued(self) -> str | None:
        """What Kueue says of the job that it holds back."""
        version = kueue_version(self.api)
        if version is None:
            return None
        path = object_path(version, "workloads", self.job.namespace)
        workloads = list(self.api.items(path, labelSelector=f"{WORKLOAD_OF}={self.job.uid}"))
        return workload_reason(workloads[0]) if workloads else None

    def _remember(self, question: str, seconds: float, ask: Callable[[], Any]) -> Any:
        """The answer to a question that was asked less than so long ago; None to what this user may not ask."""
        when, answer = self._answers.get(question, (float("-inf"), None))
        if time.monotonic() - when > seconds:
            answer = if_allowed(ask)
            self._answers[question] = (time.monotonic(), answer)
        return answer


def workload_reason(workload: Mapping[str, Any]) -> str | None:
    """Why Kueue does not admit a workload: of its conditions the one that stands in the way, in Kueue's own words."""
    queue = (workload.get("spec") or {}).get("queueName")
    conditions = {
        condition.get("type"): condition for condition in (workload.get("status") or {}).get("conditions") or ()
    }
    for kind, status in (("Evicted", "True"), ("QuotaReserved", "False"), ("Admitted", "False")):
        condition = conditions.get(kind)
        if condition is not None and condition.get("status") == status:
            return f"Kueue's queue {queue}: {condition.get('message') or condition.get('reason')}"
    return f"Kueue's queue {queue} has not looked at it yet" if not conditions else None


def _time(event: Object) -> str:
    metadata: Mapping[str, Any] = event.get("metadata") or {}
    return str(event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or "")
