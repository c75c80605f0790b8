"""The facts about a job that its cluster has now, for `windlass why`: objects as the API returns them."""

from __future__ import annotations

from typing import Any

from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path

MOST_NODES = 200  # that are asked for one by one


def collect(api: Api, job: ClusterJob) -> dict[str, Any]:
    """The job, its pods, their nodes and events. What this user may not read is left out."""
    pods = _readable(lambda: list(api.items(job.pods_path, labelSelector=job.layout.selector)))
    names = sorted({str((pod.get("spec") or {}).get("nodeName") or "") for pod in pods} - {""})
    nodes = [node for name in names[:MOST_NODES] for node in _readable(lambda name=name: _found(api, name))]
    if not names:  # nothing is scheduled: what the nodes offer says why
        nodes = _readable(lambda: list(api.items("/api/v1/nodes")))
    return {
        "job": next(iter(_readable(lambda: [api.find(job.path) or {}])), {}),
        "pods": pods,
        "nodes": nodes,
        "events": _readable(lambda: _events(api, job)),
        "workload": _workloads(api, job),
    }


def _events(api: Api, job: ClusterJob) -> list[Object]:
    """What the cluster remembers about the job's objects, all of which are named after it."""
    events = api.items(object_path("v1", "events", job.namespace))
    return [event for event in events if job.names(str((event.get("involvedObject") or {}).get("name") or ""))]


def _found(api: Api, name: str) -> list[Object]:
    node = api.find(object_path("v1", "nodes", None, name))
    return [node] if node else []


def _workloads(api: Api, job: ClusterJob) -> list[Object]:
    from windlass.targets.kubernetes.api.discovery import kueue_version
    from windlass.targets.kubernetes.watch.waiting import WORKLOAD_OF

    version = next(iter(_readable(lambda: [kueue_version(api)])), None)
    if not version:
        return []
    path = object_path(version, "workloads", job.namespace)
    return _readable(lambda: list(api.items(path, labelSelector=f"{WORKLOAD_OF}={job.uid}")))


def _readable(ask: Any) -> list[Any]:
    try:
        return list(ask())
    except RefusedError:
        return []
