"""The facts about a job that its cluster has now, for `windlass why`: objects as the API returns them, and logs.

A job that windlass did not launch is found by its kind and name; what this user may not read is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from windlass.errors import UserError
from windlass.targets.kubernetes.api.discovery import kueue_version
from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.watch.waiting import WORKLOAD_OF

MOST_NODES = 200  # that are asked for one by one
MOST_PODS_WITH_LOGS = 64
LAST_LINES = 2000
# By the word that a user types: the API group and the plural of the kind.
KINDS = {
    "pytorchjob": ("kubeflow.org", "pytorchjobs"),
    "mpijob": ("kubeflow.org", "mpijobs"),
    "trainjob": ("trainer.kubeflow.org", "trainjobs"),
    "jobset": ("jobset.x-k8s.io", "jobsets"),
    "job": ("batch", "jobs"),
    "rayjob": ("ray.io", "rayjobs"),
    "vcjob": ("batch.volcano.sh", "jobs"),
    "hyperpodpytorchjob": ("sagemaker.amazonaws.com", "hyperpodpytorchjobs"),
}


def collect(api: Api, job: ClusterJob) -> dict[str, Any]:
    """What the cluster knows about a run of windlass; its logs are archived elsewhere."""
    pods = _readable(lambda: api.items(job.pods_path, labelSelector=job.layout.selector))
    job_objects: list[Object | None] = _readable(lambda: [api.find(job.path)])
    return _facts(api, job.namespace, (job_objects[0] if job_objects else None) or {}, pods, job.object_name)


def collect_named(api: Api, kind: str, name: str) -> dict[str, Any]:
    """What the cluster knows about a pod or a job that anybody launched, and what its pods printed."""
    namespace = api.access.namespace
    pods_path = object_path("v1", "pods", namespace)
    if kind in ("pod", "pods", "po"):
        pod = api.find(f"{pods_path}/{name}")
        if pod is None:
            raise _missing(kind, name, namespace)
        facts = _facts(api, namespace, {}, [pod], name)
    else:
        job = api.find(f"{_path_of(api, kind, namespace)}/{name}")
        if job is None:
            raise _missing(kind, name, namespace)
        pods = [pod for pod in _readable(lambda: api.items(pods_path)) if _belongs(pod, job, name)]
        facts = _facts(api, namespace, job, pods, name)
    return {**facts, "target": "kubernetes", "logs": dict(_logs(api, facts["pods"]))}


def _facts(api: Api, namespace: str, job: Object, pods: Sequence[Object], name: str) -> dict[str, Any]:
    node_names = sorted({str((pod.get("spec") or {}).get("nodeName") or "") for pod in pods} - {""})
    nodes = [node for host in node_names[:MOST_NODES] if (node := _node(api, host))]
    if not node_names:  # nothing is scheduled: what the nodes offer says why
        nodes = _readable(lambda: api.items("/api/v1/nodes"))
    claims = {
        str((volume.get("persistentVolumeClaim") or {}).get("claimName"))
        for pod in pods
        for volume in (pod.get("spec") or {}).get("volumes") or ()
    }
    events = _readable(lambda: api.items(object_path("v1", "events", namespace)))
    if node_names:  # events of nodes are kept in another namespace
        events += _readable(lambda: api.items("/api/v1/events", fieldSelector="involvedObject.kind=Node"))

    def is_about(event: Object) -> bool:
        about = event.get("involvedObject") or {}
        named = str(about.get("name") or "")
        if about.get("kind") == "Node":
            return named in node_names
        is_of_loop = named == f"{name}-loop" or named.startswith(f"{name}-loop-")
        return named == name or (named.startswith(f"{name}-") and not is_of_loop) or named in claims

    return {
        "job": job,
        "pods": list(pods),
        "nodes": nodes,
        "events": [event for event in events if is_about(event)],
        "workload": _workloads(api, namespace, str((job.get("metadata") or {}).get("uid") or "")),
    }


def _path_of(api: Api, kind: str, namespace: str) -> str:
    """The path of a kind's objects, in the version that the cluster prefers."""
    known = KINDS.get(kind.lower().removesuffix("s")) or KINDS.get(kind.lower())
    if known is None:
        raise UserError(f"{kind} is no kind that windlass knows", fix=f"one of pod, {', '.join(KINDS)}: KIND/NAME")
    group, plural = known
    served = api.find(f"/apis/{group}")
    if served is None:
        raise UserError(
            f"this cluster does not serve {plural}.{group}", fix="kubectl api-resources lists what it serves"
        )
    version = str((served.get("preferredVersion") or {}).get("groupVersion") or f"{group}/v1")
    return object_path(version, plural, namespace)


def _belongs(pod: Object, job: Object, name: str) -> bool:
    """Whether a pod is the job's: by its owner, or by a label that operators put on what they make for it."""
    metadata = pod.get("metadata") or {}
    uid = (job.get("metadata") or {}).get("uid")
    is_owned = any(owner.get("uid") == uid for owner in metadata.get("ownerReferences") or ()) if uid else False
    ray_cluster = (job.get("status") or {}).get("rayClusterName")
    labels = {str(label) for key, label in (metadata.get("labels") or {}).items() if "name" in key or "cluster" in key}
    return is_owned or name in labels or (ray_cluster is not None and ray_cluster in labels)


def _logs(api: Api, pods: Sequence[Object]) -> Iterator[tuple[str, str]]:
    """The last lines of every container that has run, and of the one before it where it was restarted."""
    for pod in pods[:MOST_PODS_WITH_LOGS]:
        metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
        pod_name = str(metadata.get("name"))
        path = object_path("v1", "pods", str(metadata.get("namespace")), pod_name) + "/log"
        containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
        for container in containers:
            name = pod_name if len(containers) == 1 else f"{pod_name}.{container.get('name')}"
            if "waiting" not in (container.get("state") or {}):
                yield name, _log(api, path, container)
            if container.get("lastState"):
                yield f"{name}-previous", _log(api, path, container, previous="true")


def _log(api: Api, path: str, container: Mapping[str, Any], **more: str) -> str:
    params = {"container": str(container.get("name")), "tailLines": str(LAST_LINES), "timestamps": "true", **more}
    return b"\n".join(_readable(lambda: api.lines(path, params))).decode("utf-8", "replace")


def _node(api: Api, name: str) -> Object | None:
    nodes: list[Object | None] = _readable(lambda: [api.find(object_path("v1", "nodes", None, name))])
    return nodes[0] if nodes else None


def _workloads(api: Api, namespace: str, uid: str) -> list[Object]:
    version = next(iter(_readable(lambda: [kueue_version(api)])), None) if uid else None
    if not version:
        return []
    path = object_path(version, "workloads", namespace)
    return _readable(lambda: api.items(path, labelSelector=f"{WORKLOAD_OF}={uid}"))


def _readable(ask: Callable[[], Any]) -> list[Any]:
    try:
        return list(ask())
    except RefusedError:
        return []


def _missing(kind: str, name: str, namespace: str) -> UserError:
    return UserError(
        f"there is no {kind} {name} in the namespace {namespace}",
        fix=f"kubectl get {kind} --all-namespaces, then windlass why {kind}/{name} -n NAMESPACE",
    )
