"""Everything that checks look at, asked of a cluster once and in parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from windlass.targets.kubernetes.api.discovery import KUEUE, POD_SECURITY
from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import object_path
from windlass.targets.kubernetes.manifests.capacity import NodeRoom, charge, node_room
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.labels import RUN_LABEL

AT_ONCE = 8
LARGE_PAGE = 1000  # nodes and pods of a large cluster: few requests count more than small answers
PODS = "/api/v1/pods"
ALIVE = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True)
class Refusal:
    """A question that the cluster did not answer this user."""

    code: int
    message: str

    def __str__(self) -> str:
        return self.message


Objects = Sequence[Object] | Refusal
NOT_ASKED = Refusal(0, "it was not asked for")


@dataclass(frozen=True)
class Access:
    """One verb on one kind of object, and whether this user may."""

    verb: str
    resource: str
    group: str
    subresource: str = ""
    is_allowed: bool | None = None  # None: the cluster did not say
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'/' + self.subresource if self.subresource else ''}"


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment, as one user sees it. A part that was refused holds the refusal."""

    context: str
    namespace: str
    version: Object
    groups: Mapping[str, Object]
    namespace_object: Object | Refusal | None
    nodes: Objects
    pods: Objects
    daemonsets: Objects
    deployments: Objects
    storage_classes: Objects
    csi_drivers: Objects
    claims: Objects
    quotas: Objects
    service_accounts: Objects
    local_queues: Objects
    cluster_queues: Objects
    accesses: Sequence[Access]
    kinds: Collection[JobKind] = tuple(JobKind)  # of jobs that are served

    @cached_property
    def rooms(self) -> dict[str, NodeRoom]:
        """Each node with what its pods hold, where pods may be listed; empty where nodes may not."""
        if isinstance(self.nodes, Refusal):
            return {}
        rooms = {room.name: room for room in map(node_room, self.nodes)}
        if not isinstance(self.pods, Refusal):
            charge(rooms, self.pods, RUN_LABEL)
        return rooms

    @property
    def pod_security(self) -> str | None:
        value = self.namespace_object
        if value is None or isinstance(value, Refusal):
            return None
        level: str | None = (value["metadata"].get("labels") or {}).get(POD_SECURITY)
        return level

    def served_versions(self, group: str) -> list[str]:
        """The versions of an API group, the preferred one first; none where the group is not served."""
        entry = self.groups.get(group)
        if entry is None:
            return []
        preferred = (entry.get("preferredVersion") or {}).get("version")
        versions = [version["version"] for version in entry.get("versions") or ()]
        return sorted(versions, key=lambda version: version != preferred)


def take(
    api: Api,
    namespace: str,
    accesses: Sequence[Access] = (),
    *,
    kinds: Collection[JobKind] = tuple(JobKind),
    only: Collection[str] | None = None,
) -> Snapshot:
    """Ask for everything, or for some lists only. What is not read becomes a Refusal; a cluster that does not answer
    raises."""
    groups = {group["name"]: group for group in api.get("/apis").get("groups") or ()}  # raises where nobody answers
    kueue = ((groups.get(KUEUE) or {}).get("preferredVersion") or {}).get("groupVersion")
    lists: dict[str, tuple[str, dict[str, str | int]]] = {
        "nodes": ("/api/v1/nodes", {"limit": LARGE_PAGE}),
        "pods": (PODS, {"limit": LARGE_PAGE, "fieldSelector": ALIVE}),
        "daemonsets": ("/apis/apps/v1/daemonsets", {}),
        "deployments": ("/apis/apps/v1/deployments", {"limit": LARGE_PAGE}),
        "storage_classes": ("/apis/storage.k8s.io/v1/storageclasses", {}),
        "csi_drivers": ("/apis/storage.k8s.io/v1/csidrivers", {}),
        "claims": (object_path("v1", "persistentvolumeclaims", namespace), {}),
        "quotas": (object_path("v1", "resourcequotas", namespace), {}),
        "service_accounts": (object_path("v1", "serviceaccounts", namespace), {}),
    }
    if kueue:
        lists["local_queues"] = (object_path(kueue, "localqueues", namespace), {})
        lists["cluster_queues"] = (object_path(kueue, "clusterqueues", None), {})
    asked = {name: question for name, question in lists.items() if only is None or name in only}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        version = pool.submit(api.get, "/version")
        namespace_object = pool.submit(_or_refusal, lambda: api.find(f"/api/v1/namespaces/{namespace}"))
        listed = {
            name: pool.submit(_or_refusal, partial(_list, api, path, params)) for name, (path, params) in asked.items()
        }
        reviewed = [pool.submit(_or_refusal, partial(_review, api, namespace, access)) for access in accesses]
    answers = [review.result() for review in reviewed]
    objects: dict[str, Objects] = {"local_queues": (), "cluster_queues": (), **dict.fromkeys(lists, NOT_ASKED)}
    return Snapshot(
        context=api.access.context,
        namespace=namespace,
        version=version.result(),
        groups=groups,
        namespace_object=namespace_object.result(),
        accesses=[
            access if isinstance(answer, Refusal) else answer for access, answer in zip(accesses, answers, strict=True)
        ],
        kinds=kinds,
        **(objects | {name: answer.result() for name, answer in listed.items()}),
    )


def _or_refusal(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except RefusedError as error:
        return Refusal(error.code, error.message)


def _list(api: Api, path: str, params: Mapping[str, str | int]) -> list[Object]:
    items = api.items(path, **params)
    return [_what_it_holds(pod) for pod in items] if path == PODS else list(items)


def _what_it_holds(pod: Object) -> Object:
    """The parts of a pod that are counted: thirty thousand whole ones take gigabytes."""
    spec = pod.get("spec") or {}
    containers = {
        key: [{"resources": container.get("resources")} for container in spec.get(key) or ()]
        for key in ("containers", "initContainers")
    }
    return {
        "metadata": {key: pod["metadata"].get(key) for key in ("name", "namespace", "labels")},
        "spec": {"nodeName": spec.get("nodeName"), "overhead": spec.get("overhead"), **containers},
        "status": {"phase": (pod.get("status") or {}).get("phase")},
    }


def _review(api: Api, namespace: str, access: Access) -> Access:
    """Ask the cluster whether this user may, as `kubectl auth can-i` does."""
    attributes: dict[str, Any] = {
        "namespace": "" if access.resource == "nodes" else namespace,  # a role of the namespace may not grant those
        "verb": access.verb,
        "group": access.group,
        "resource": access.resource,
        "subresource": access.subresource,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "metadata": {},
        "spec": {"resourceAttributes": attributes},
    }
    status = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review).get("status") or {}
    return Access(
        access.verb,
        access.resource,
        access.group,
        access.subresource,
        is_allowed=bool(status.get("allowed")),
        reason=str(status.get("reason") or status.get("evaluationError") or ""),
    )
