"""Mend what a check found: objects that are missing are created, shown first, and can be taken away again.

Nothing that is there is ever changed, so that undoing is deleting what was made. Every object carries a label by which
it is found again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from windlass.clusters.needs import Needs
from windlass.clusters.snapshot import Access, Refusal, Snapshot, name_of
from windlass.errors import UserError
from windlass.targets.kubernetes.api.errors import RefusedError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import object_path

FIX_LABEL = "windlass.dev/cluster-fix"
CLAIM_SIZE = "1200Gi"  # the smallest file system of FSx for Lustre


@dataclass(frozen=True)
class Proposal:
    """Objects that would mend one finding."""

    check: str
    what: str
    objects: Sequence[Object]
    namespace: str | None = None  # of objects that name none; None: the run's


@dataclass(frozen=True)
class Outcome:
    """What became of one object."""

    name: str  # kind and name
    result: str  # created, there already, or why not


def propose(snapshot: Snapshot, needs: Needs, *, user: str, is_self: bool, storage_class: str | None) -> list[Proposal]:
    """What windlass can make itself: the namespace, a role, a service account, a claim.

    You get the permissions that you lack; somebody else, whose are not known, gets all that a run needs.
    """
    missing = [access for access in snapshot.accesses if access.is_allowed is False or not is_self]
    return list(_proposals(snapshot, needs, user, missing, storage_class))


def from_manifests(paths: Iterable[Path]) -> list[Proposal]:
    """Objects of files that the user gives: an operator's release, a device plugin."""
    proposals = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read", evidence=str(error), fix=f"ls -l {path}") from None
        proposals.append(Proposal("manifest", str(path), objects_in(text, str(path))))
    return proposals


def objects_in(text: str, source: str) -> list[Object]:
    """The Kubernetes objects of a YAML text, those of Lists too."""
    try:
        documents = [value for value in yaml.safe_load_all(text) if value]
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{source} cannot be read",
            evidence=str(error).splitlines()[0],
            fix=f"{source}: valid YAML; kubectl apply --dry-run=client -f says more",
        ) from None
    objects = [value for document in documents for value in _listed(document)]
    wrong = next((value for value in objects if not _is_object(value)), None)
    if wrong is not None:
        raise UserError(
            f"{source} holds something that is no Kubernetes object",
            evidence=str(wrong)[:200],
            fix=f"{source}: apiVersion, kind and metadata.name in each",
        )
    return objects


def _listed(document: Any) -> list[Any]:
    is_list = isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list)
    return list(document["items"]) if is_list else [document]


def apply(api: Api, proposals: Sequence[Proposal], namespace: str) -> list[Outcome]:
    """Create what is missing, in order. What is refused is said, and the rest is tried."""
    create = partial(_create, api, Plurals(api))
    return [_outcome(create, _labelled(value), place) for value, place in _placed(proposals, namespace)]


def undo(api: Api, proposals: Sequence[Proposal], namespace: str) -> list[Outcome]:
    """Delete what `apply` made, the last first; an object without our label is somebody else's and stays."""
    delete = partial(_delete, api, Plurals(api))
    return [_outcome(delete, value, place) for value, place in reversed(_placed(proposals, namespace))]


def made_here(api: Api, namespace: str) -> list[Proposal]:
    """What an earlier fix made of the kinds that windlass proposes itself."""
    group = "rbac.authorization.k8s.io/v1"
    places = (
        ("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
        ("v1", "ServiceAccount", "serviceaccounts"),
        (group, "Role", "roles"),
        (group, "RoleBinding", "rolebindings"),
    )
    objects = [
        _object(version, kind, value["metadata"]["name"], namespace)
        for version, kind, plural in places
        for value in api.items(object_path(version, plural, namespace), labelSelector=f"{FIX_LABEL}=true")
    ]
    current = api.find(f"/api/v1/namespaces/{namespace}")
    if current is not None and (current["metadata"].get("labels") or {}).get(FIX_LABEL) == "true":
        objects.insert(0, _object("v1", "Namespace", namespace))
    return [Proposal("undo", "what an earlier fix made", objects)]


def who_am_i(api: Api) -> str:
    """This user's name, as the cluster knows it."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {}}
    answer = api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    return str(answer["status"]["userInfo"]["username"])


class Plurals:
    """The plural under which the cluster serves a kind, asked once per API version."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[str, dict[str, Object]] = {}

    def path(self, value: Object, namespace: str) -> str:
        """Where objects of this kind are listed. Raises UserError for a kind that is not served."""
        version, kind = str(value["apiVersion"]), str(value["kind"])
        if version not in self._known:
            found = self._api.find(f"/apis/{version}" if "/" in version else f"/api/{version}") or {}
            resources = [entry for entry in found.get("resources") or () if "/" not in entry["name"]]
            self._known[version] = {entry["kind"]: entry for entry in resources}
        if kind not in self._known[version]:
            raise UserError(
                f"the cluster does not serve {kind} of {version}", fix="kubectl api-resources    says what it serves"
            )
        served = self._known[version][kind]
        place = (value["metadata"].get("namespace") or namespace) if served["namespaced"] else None
        return object_path(version, served["name"], place)


def _proposals(
    snapshot: Snapshot, needs: Needs, user: str, missing: Sequence[Access], storage_class: str | None
) -> Iterator[Proposal]:
    namespace = snapshot.namespace
    if snapshot.namespace_object is None:
        yield Proposal("namespace", f"namespace {namespace}", [_object("v1", "Namespace", namespace)])
    rules = [
        {
            "apiGroups": [access.group],
            "resources": [access.resource + (f"/{access.subresource}" if access.subresource else "")],
            "verbs": [access.verb],
        }
        for access in missing
        if access.resource != "nodes"  # no role of a namespace can grant those
    ]
    if rules:
        group = "rbac.authorization.k8s.io"
        # what is there is never changed: another user, or other verbs, get a role of their own
        name = f"windlass-user-{hashlib.sha256(json.dumps([user, rules]).encode()).hexdigest()[:8]}"
        role = {**_object(f"{group}/v1", "Role", name, namespace), "rules": rules}
        binding = {
            **_object(f"{group}/v1", "RoleBinding", name, namespace),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        }
        yield Proposal("permissions", f"a role for {user}", [role, binding])
    if needs.service_account and not _has(snapshot.service_accounts, needs.service_account):
        account = _object("v1", "ServiceAccount", needs.service_account, namespace)
        yield Proposal("service-account", f"service account {needs.service_account}", [account])
    if needs.claim and storage_class and not _has(snapshot.claims, needs.claim):
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": CLAIM_SIZE}},
        }
        claim = {**_object("v1", "PersistentVolumeClaim", needs.claim, namespace), "spec": spec}
        yield Proposal("claim", f"claim {needs.claim} of {CLAIM_SIZE}", [claim])


def _has(objects: Sequence[Object] | Refusal, name: str) -> bool:
    """Whether an object is there; what may not be listed is taken to be."""
    return isinstance(objects, Refusal) or any(name_of(value) == name for value in objects)


def _object(version: str, kind: str, name: str, namespace: str | None = None) -> Object:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _is_object(value: Any) -> bool:
    metadata = value.get("metadata") if isinstance(value, dict) else None
    return isinstance(metadata, dict) and "name" in metadata and {"apiVersion", "kind"} <= set(value)


def _labelled(value: Object) -> Object:
    labels = {**(value["metadata"].get("labels") or {}), FIX_LABEL: "true"}
    return {**value, "metadata": {**value["metadata"], "labels": labels}}


def _placed(proposals: Sequence[Proposal], namespace: str) -> list[tuple[Object, str]]:
    return [(value, proposal.namespace or namespace) for proposal in proposals for value in proposal.objects]


def _outcome(change: Callable[[Object, str], str], value: Object, namespace: str) -> Outcome:
    try:
        result = change(value, namespace)
    except RefusedError as error:
        result = "there already" if (error.code, error.reason) == (409, "AlreadyExists") else error.message
    except UserError as error:
        result = error.what
    return Outcome(f"{value['kind']} {value['metadata']['name']}", result)


def _create(api: Api, plurals: Plurals, value: Object, namespace: str) -> str:
    api.create(plurals.path(value, namespace), value)
    return "created"


def _delete(api: Api, plurals: Plurals, value: Object, namespace: str) -> str:
    path = f"{plurals.path(value, namespace)}/{value['metadata']['name']}"
    current = api.find(path)
    if current is None:
        return "not there"
    if (current["metadata"].get("labels") or {}).get(FIX_LABEL) != "true":
        return "not made by windlass, so it stays"
    if value["kind"] == "Namespace" and _is_used(api, value["metadata"]["name"]):
        return "others have something in it, so it stays"
    api.delete(path, uid=current["metadata"].get("uid"))
    return "deleted"


def _is_used(api: Api, namespace: str) -> bool:
    """Whether claims or pods would go with a namespace."""
    kinds = ("persistentvolumeclaims", "pods")
    return any(any(True for _ in api.items(object_path("v1", kind, namespace))) for kind in kinds)
