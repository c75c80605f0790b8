"""The pods of a job, as much of them as its verbs need. Pure: API objects in, small records out."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.targets.kubernetes.manifests.labels import SUBMISSION_LABEL
from windlass.targets.kubernetes.manifests.request import PodLayout
from windlass.targets.protocol import PodRow

# Why a container does not start, in plain words; the text in the status says the rest.
HELD_BACK = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image's name is not valid",
    "ErrImageNeverPull": "its image is not on the node, and may not be pulled",
    "CreateContainerConfigError": "something it refers to is missing",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
    "CrashLoopBackOff": "it ended too often and waits before it starts again",
}
IGNORED_FAILURES = "batch.kubernetes.io/job-index-ignored-failure-count"
STARTING = ("ContainerCreating", "PodInitializing", "")


@dataclass(frozen=True)
class Pod:
    """One pod of a job."""

    name: str
    uid: str
    node_rank: int | None
    phase: str
    reason: str  # why it is not running, in a word: Unschedulable, ErrImagePull, OOMKilled, Evicted
    message: str
    node: str
    created: float
    restarts: int
    started: bool  # its container has been started at least once: there is a log
    running: bool
    exit_code: int | None
    ended_at: float | None
    deleting: bool
    submission: str = ""
    address: str = ""
    delete_by: float | None = None  # the end of its grace period, where it is being deleted
    ignored_failures: int = 0  # of its index: pods that had to leave, by which its Job doubles the wait for a new one

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def pod_of(value: Mapping[str, Any], layout: PodLayout) -> Pod:
    metadata, status = value["metadata"], value.get("status") or {}
    labels = metadata.get("labels") or {}
    container = _container(status, layout.container)
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    reason, message = _why(status, container)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        node_rank=layout.node_of(labels),
        phase=str(status.get("phase") or "Pending"),
        reason=reason,
        message=message,
        node=str((value.get("spec") or {}).get("nodeName") or ""),
        created=moment(metadata.get("creationTimestamp")) or 0.0,
        restarts=int(container.get("restartCount") or 0),
        started=bool("running" in state or terminated or container.get("restartCount")),
        running="running" in state,
        exit_code=terminated.get("exitCode"),
        ended_at=moment(terminated.get("finishedAt")),
        deleting=bool(metadata.get("deletionTimestamp")),
        submission=str(labels.get(SUBMISSION_LABEL) or ""),
        address=str(status.get("podIP") or ""),
        delete_by=moment(metadata.get("deletionTimestamp")),
        ignored_failures=_count((metadata.get("annotations") or {}).get(IGNORED_FAILURES)),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _container(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    containers: list[dict[str, Any]] = status.get("containerStatuses") or []
    return next((container for container in containers if container.get("name") == name), {})


def _why(status: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[str, str]:
    """The reason that a pod is not running, in Kubernetes' own word, and its text."""
    if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded: the pod's own, and the last word
        return str(status["reason"]), str(status.get("message") or "")
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    if ended:
        return str(ended.get("reason") or ""), str(ended.get("message") or "")
    initial = [container_state.get("state") or {} for container_state in status.get("initContainerStatuses") or ()]
    for container_state in [*initial, state]:
        waiting = container_state.get("waiting") or {}
        if waiting.get("reason") not in (None, *STARTING):
            return str(waiting["reason"]), str(waiting.get("message") or "")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or "")
    if "running" in state:
        return "", ""
    return ("ContainerCreating" if status.get("phase") == "Pending" else ""), ""


def newest_by_node(pods: Iterable[Pod]) -> dict[int, Pod]:
    """Of each node rank the pod that counts: one that is not on its way out before one that is, then the newest."""
    best: dict[int, Pod] = {}
    for pod in pods:
        if pod.node_rank is None:
            continue
        other = best.get(pod.node_rank)
        if other is None or (not pod.deleting, pod.created) > (not other.deleting, other.created):
            best[pod.node_rank] = pod
    return dict(sorted(best.items()))


def row_of(pod: Pod, layout: PodLayout, now: float) -> PodRow:
    """A pod as tables show it."""
    ranks = layout.ranks_of(pod.node_rank) if pod.node_rank is not None else range(0)
    phase = "Terminating" if pod.deleting and not pod.ended else pod.phase
    return PodRow(pod.name, phase, pod.reason, pod.message, now - pod.created, pod.node, pod.restarts, tuple(ranks))


def phases(pods: Iterable[Pod]) -> str:
    """`2 Running, 1 Pending`"""
    counts = Counter("Terminating" if pod.deleting and not pod.ended else pod.phase for pod in pods)
    return ", ".join(f"{number} {phase}" for phase, number in counts.most_common())


def moment(text: str | None) -> float | None:
    """Seconds since 1970 of one of the API's timestamps."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None
