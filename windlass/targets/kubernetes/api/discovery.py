"""Ask a cluster what it serves and what nodes it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windlass.errors import UserError
from windlass.targets.kubernetes.api.errors import RefusedError, if_allowed
from windlass.targets.kubernetes.api.http import LARGE_PAGE, Api, Object
from windlass.targets.kubernetes.jobfile import object_path
from windlass.targets.kubernetes.manifests.cluster_facts import (
    ALWAYS,
    GROUPS,
    PLURALS,
    ClusterFacts,
    JobKind,
    NodeFacts,
    Served,
    ServedKind,
)

POD_SECURITY = "pod-security.kubernetes.io/enforce"
KUEUE = "kueue.x-k8s.io"


def facts(api: Api, wanted: JobKind | None) -> ClusterFacts:
    """Everything that rendering asks; with `wanted`, the schema of that kind alone is read."""
    namespace = api.access.namespace
    namespace_object = must_have_namespace(api, namespace)
    labels = ((namespace_object or {}).get("metadata") or {}).get("labels") or {}
    return ClusterFacts(
        served=served(api, wanted),
        namespace=namespace,
        nodes=nodes(api),
        context=api.access.context,
        pod_security=labels.get(POD_SECURITY),
    )


def served(api: Api, wanted: JobKind | None = None, *, schemas: bool = True) -> Served:
    groups = {group["name"]: group for group in api.get("/apis").get("groups") or ()}
    kinds: dict[JobKind, ServedKind] = {}
    for kind in JobKind:  # the preferred one first
        if kind is JobKind.INDEXED:
            kinds[kind] = ALWAYS
        elif GROUPS[kind] in groups:
            served_kind = _served_kind(api, kind, groups[GROUPS[kind]])
            if served_kind is not None:
                needed = schemas and (kind is wanted or (wanted is None and not kinds))
                if needed:
                    schema = _from_definition(api, served_kind, kind) or _from_openapi(api, served_kind)
                    served_kind = replace(served_kind, schema=schema)
                kinds[kind] = served_kind
    version = api.get("/version")
    return Served(
        kinds=kinds,
        volcano="scheduling.volcano.sh" in groups,
        coscheduling="scheduling.x-k8s.io" in groups,
        kubernetes=(number_in(version.get("major")), number_in(version.get("minor"))),
    )


def kueue_version(api: Api) -> str | None:
    """The version of Kueue's objects that the cluster prefers: `kueue.x-k8s.io/v1beta2`; None without Kueue."""
    group = api.find(f"/apis/{KUEUE}")
    version: str | None = ((group or {}).get("preferredVersion") or {}).get("groupVersion")
    return version


def _served_kind(api: Api, kind: JobKind, group: Mapping[str, Any]) -> ServedKind | None:
    preferred = group["preferredVersion"]["groupVersion"]
    for version in dict.fromkeys([preferred, *(release["groupVersion"] for release in group["versions"])]):
        for resource in api.get(f"/apis/{version}").get("resources") or ():
            if resource.get("name") == PLURALS[kind]:
                return ServedKind(version, str(resource["kind"]), PLURALS[kind])
    return None


def _from_definition(api: Api, served_kind: ServedKind, kind: JobKind) -> Object | None:
    path = object_path(
        "apiextensions.k8s.io/v1", "customresourcedefinitions", None, f"{served_kind.plural}.{GROUPS[kind]}"
    )
    definition = if_allowed(api.find, path)  # reading definitions is for administrators on many clusters
    for version in ((definition or {}).get("spec") or {}).get("versions") or ():
        if version.get("name") == served_kind.api_version.split("/")[-1]:
            schema: Object | None = (version.get("schema") or {}).get("openAPIV3Schema")
            return schema
    return None


def _from_openapi(api: Api, served_kind: ServedKind) -> Object | None:
    """The same schema as every user may read it; in it the schemas of custom kinds refer to nothing but metadata."""
    document = if_allowed(api.find, f"/openapi/v3/apis/{served_kind.api_version}") or {}
    group, _, version = served_kind.api_version.partition("/")
    identity = {"group": group, "version": version, "kind": served_kind.kind}
    for schema in (document.get("components") or {}).get("schemas", {}).values():
        if identity in (schema.get("x-kubernetes-group-version-kind") or ()):
            properties = {key: value for key, value in schema.get("properties", {}).items() if "$ref" not in str(value)}
            return {**schema, "properties": {**properties, "metadata": {"type": "object"}}}
    return None


def nodes(api: Api) -> list[NodeFacts]:
    """The cluster's nodes; none where this user may not list them."""
    return if_allowed(lambda: list(map(NodeFacts.of, api.items("/api/v1/nodes", limit=LARGE_PAGE)))) or []


def must_have_namespace(api: Api, namespace: str) -> Object | None:
    """The namespace, where this user may read it; raises UserError if it is not there."""
    try:
        namespace_object = api.find(f"/api/v1/namespaces/{namespace}")
    except RefusedError as error:
        if error.code == 403:  # whoever may work in a namespace need not be allowed to read it; creating will tell
            return None
        raise
    if namespace_object is None:
        raise no_namespace(api, namespace)
    if (namespace_object.get("status") or {}).get("phase") == "Terminating":
        raise UserError(
            f"the namespace {namespace} is being deleted",
            evidence=f"context {api.access.context}",
            fix="target.kubernetes.namespace=OTHER",
        )
    return namespace_object


def no_namespace(api: Api, namespace: str) -> UserError:
    context = api.access.context
    return UserError(
        f"there is no namespace {namespace!r} in the cluster of the context {context}",
        fix=f"kubectl --context {context} create namespace {namespace}    or target.kubernetes.namespace=OTHER",
    )


def number_in(text: Any) -> int:
    """A part of the API server's version: EKS says "33+"."""
    digits = "".join(letter for letter in str(text or "") if letter.isdigit())
    return int(digits) if digits else 0
