"""Everything that checks look at, asked of a cluster once and in parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from windlass.targets.kubernetes.api.discovery import KUEUE, POD_SECURITY
from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import ALL_PODS, LARGE_PAGE, Api, Object
from windlass.targets.kubernetes.jobfile import object_path
from windlass.targets.kubernetes.manifests.capacity import NodeRoom, charge, node_room
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind

AT_ONCE = 8
VOLCANO = "scheduling.volcano.sh"
REVIEWS = "/apis/authorization.k8s.io/v1"
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
    volcano_queues: Objects
    accesses: Sequence[Access]
    # the kinds of jobs that are served, and in which version; None: not known
    kinds: Mapping[JobKind, str | None] = field(default_factory=lambda: dict.fromkeys(JobKind))

    @cached_property
    def rooms(self) -> dict[str, NodeRoom]:
        """Each node with what its pods hold, where pods may be listed; empty where nodes may not."""
        if isinstance(self.nodes, Refusal):
            return {}
        rooms = {room.name: room for room in map(node_room, self.nodes)}
        if not isinstance(self.pods, Refusal):
            charge(rooms, self.pods)
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
    kinds: Mapping[JobKind, str | None] | None = None,
    only: Collection[str] | None = None,
) -> Snapshot:
    """Ask for everything, or for some lists only. What is not read becomes a Refusal; a cluster that does not answer
    raises."""
    groups = {group["name"]: group for group in api.get("/apis").get("groups") or ()}  # raises where nobody answers
    kueue = ((groups.get(KUEUE) or {}).get("preferredVersion") or {}).get("groupVersion")
    lists: dict[str, tuple[str, dict[str, str | int]]] = {
        "nodes": ("/api/v1/nodes", {"limit": LARGE_PAGE}),
        "pods": (ALL_PODS, {"limit": LARGE_PAGE, "fieldSelector": ALIVE}),
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
    if VOLCANO in groups:
        lists["volcano_queues"] = (object_path(f"{VOLCANO}/v1beta1", "queues", None), {})
    asked = {name: question for name, question in lists.items() if only is None or name in only}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        version = pool.submit(api.get, "/version")
        namespace_object = pool.submit(_or_refusal, lambda: api.find(f"/api/v1/namespaces/{namespace}"))
        listed = {
            name: pool.submit(_or_refusal, partial(_list, api, path, params)) for name, (path, params) in asked.items()
        }
        reviewed = pool.submit(_review, api, namespace, [access for access in accesses if access.resource != "nodes"])
    objects: dict[str, Objects] = dict.fromkeys(("local_queues", "cluster_queues", "volcano_queues"), ())
    objects |= dict.fromkeys(lists, NOT_ASKED)
    objects |= {name: answer.result() for name, answer in listed.items()}
    answers = {str(access): access for access in reviewed.result()}
    return Snapshot(
        context=api.access.context,
        namespace=namespace,
        version=version.result(),
        groups=groups,
        namespace_object=namespace_object.result(),
        accesses=[answers.get(str(access)) or _as_listed(access, objects["nodes"]) for access in accesses],
        kinds=dict.fromkeys(JobKind) if kinds is None else kinds,
        **objects,
    )


def name_of(value: Object) -> str:
    return str(value["metadata"]["name"])


def condition_of(value: Object, kind: str) -> Object:
    """A condition of its status; empty where it has none of that kind."""
    conditions = (value.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def _or_refusal(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except RefusedError as error:
        return Refusal(error.code, error.message)


def _list(api: Api, path: str, params: Mapping[str, str | int]) -> list[Object]:
    items = api.items(path, **params)
    return [_what_it_holds(pod) for pod in items] if path == ALL_PODS else list(items)


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


def _review(api: Api, namespace: str, accesses: Sequence[Access]) -> list[Access]:
    """Which verbs this user has in a namespace: by the rules that the cluster lists at once, as `kubectl auth can-i
    --list` does; one by one where the cluster says that it has other rules too."""
    if not accesses:
        return []
    status = _or_refusal(lambda: _ask(api, "SelfSubjectRulesReview", {"namespace": namespace}))
    rules = () if isinstance(status, Refusal) else status.get("resourceRules") or ()
    granted = {str(access) for access in accesses if any(_grants(rule, access) for rule in rules)}
    is_complete = not isinstance(status, Refusal) and not status.get("incomplete")
    # Rules of webhooks are not listed. What RBAC grants counts as granted: only a webhook before it could still deny.
    unsure = [access for access in accesses if str(access) not in granted] if not is_complete else []
    if unsure and _may(api, namespace, Access("*", "*", "*")).is_allowed:
        granted |= {str(access) for access in unsure}
        unsure = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {str(access): access for access in pool.map(partial(_may, api, namespace), unsure)}
    none = f"no rule that you have in the namespace {namespace} grants it (SelfSubjectRulesReview)"
    return [
        asked.get(str(access))
        or replace(access, is_allowed=str(access) in granted, reason="" if str(access) in granted else none)
        for access in accesses
    ]


def _grants(rule: Object, access: Access) -> bool:
    """Whether a rule covers every object of the kind; one that names objects does not."""
    below = f"/{access.subresource}" if access.subresource else ""
    return (
        not rule.get("resourceNames")
        and bool({"*", access.verb} & set(rule.get("verbs") or ()))
        and bool({"*", access.group} & set(rule.get("apiGroups") or ()))
        and bool({"*", f"{access.resource}{below}", f"*{below}"} & set(rule.get("resources") or ()))
    )


def _may(api: Api, namespace: str, access: Access) -> Access:
    """Ask the cluster about one verb, as `kubectl auth can-i` does; it may not say."""
    attributes = {"namespace": namespace, "verb": access.verb, "group": access.group, "resource": access.resource}
    attributes |= {"subresource": access.subresource}
    status = _or_refusal(lambda: _ask(api, "SelfSubjectAccessReview", {"resourceAttributes": attributes}))
    if isinstance(status, Refusal):
        return access
    reason = str(status.get("reason") or status.get("evaluationError") or "")
    return replace(access, is_allowed=bool(status.get("allowed")), reason=reason)


def _ask(api: Api, kind: str, spec: Object) -> Object:
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "metadata": {}, "spec": spec}
    status: Object = api.create(f"{REVIEWS}/{kind.lower()}s", review).get("status") or {}
    return status


def _as_listed(access: Access, nodes: Objects) -> Access:
    """Whether nodes may be listed is known from listing them: a namespace's rules do not say it."""
    if not isinstance(nodes, Refusal):
        return replace(access, is_allowed=True)
    return replace(access, is_allowed=False if nodes.code == 403 else None, reason=nodes.message)
