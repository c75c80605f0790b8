"""The API server and what this user may do there."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.needs import OPTIONAL_ACCESSES, Needs
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Access, Snapshot
from windlass.targets.kubernetes.api.discovery import number_in

OLDEST = (1, 28)  # sidecars, job failure policies and strict field validation are there
OPTIONAL = {str(access) for access in OPTIONAL_ACCESSES}


def api_server(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    major, minor = (number_in(snapshot.version.get(key)) for key in ("major", "minor"))
    version = str(snapshot.version.get("gitVersion") or f"{major}.{minor}")
    if (major, minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield Result(
            "api",
            "warn",
            f"Kubernetes {version} is older than {oldest}",
            evidence=f"/version of the context {snapshot.context} says {version}",
            fix=f"upgrade the control plane to {oldest} or later",
        )
    else:
        yield Result("api", "pass", f"Kubernetes {version} answers")


def permissions(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    for access in snapshot.accesses:
        if access.is_allowed is None:
            yield Result("permissions", "skip", f"whether you may {access} is not known", "the cluster did not answer")
        elif not access.is_allowed:
            is_optional = str(access) in OPTIONAL
            yield Result(
                "permissions",
                "warn" if is_optional else "fail",
                f"you may not {access} in the namespace {snapshot.namespace}",
                evidence=access.reason or "SelfSubjectAccessReview: not allowed",
                fix=_role_command(snapshot.namespace, access),
            )
    num_allowed = sum(bool(access.is_allowed) for access in snapshot.accesses)
    if num_allowed == len(snapshot.accesses):
        yield Result("permissions", "pass", f"you may do all {num_allowed} things that a run needs")


def _role_command(namespace: str, access: Access) -> str:
    resource = access.resource + (f".{access.group}" if access.group else "")
    resource += f"/{access.subresource}" if access.subresource else ""
    kind, where = ("clusterrole", "") if access.resource == "nodes" else ("role", f" -n {namespace}")
    return f"kubectl{where} create {kind} windlass-{access.verb} --verb={access.verb} --resource={resource}"
