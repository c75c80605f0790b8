"""The namespace: it is there, lets such pods in, and has the service account."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.needs import Needs
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Refusal, Snapshot

IRSA = "eks.amazonaws.com/role-arn"


def pod_security(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    value, name = snapshot.namespace_object, snapshot.namespace
    if isinstance(value, Refusal):
        yield Result("namespace", "skip", f"the namespace {name} was not looked at", str(value))
        return
    if value is None:
        yield Result(
            "namespace",
            "fail",
            f"there is no namespace {name}",
            "the API answers 404",
            f"kubectl create namespace {name}",
        )
        return
    if (value.get("status") or {}).get("phase") == "Terminating":
        yield Result(
            "namespace", "fail", f"the namespace {name} is being deleted", fix="target.kubernetes.namespace=OTHER"
        )
        return
    level = snapshot.pod_security or "privileged"
    problems = list(_beyond(level, needs))
    if problems:
        yield Result(
            "namespace",
            "fail",
            f"the namespace {name} enforces PodSecurity {level}, which does not let the run's pods in",
            evidence="\n".join(problems),
            fix="target.kubernetes.pod={securityContext: …}    (docs/kubernetes.md, PodSecurity), or another namespace",
        )
    else:
        yield Result("namespace", "pass", f"the namespace {name} enforces PodSecurity {level}")


def service_account(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if isinstance(snapshot.service_accounts, Refusal):
        if needs.service_account:
            yield Result(
                "service-account", "skip", "service accounts were not looked at", str(snapshot.service_accounts)
            )
        return
    wanted = needs.service_account
    names = [account["metadata"]["name"] for account in snapshot.service_accounts]
    if wanted is None:
        return
    if wanted not in names:
        yield Result(
            "service-account",
            "fail",
            f"there is no service account {wanted} in the namespace {snapshot.namespace}",
            evidence=f"service accounts there: {', '.join(names) or 'none'}",
            fix=f"kubectl -n {snapshot.namespace} create serviceaccount {wanted}",
        )
        return
    account = snapshot.service_accounts[names.index(wanted)]
    role = (account["metadata"].get("annotations") or {}).get(IRSA)
    yield Result(
        "service-account",
        "pass",
        f"the service account {wanted} is there" + (", with an IAM role (IRSA)" if role else "; it names no IAM role"),
        evidence=None
        if role
        else f"no annotation {IRSA}; EKS Pod Identity associations are not visible in the cluster",
    )


def _beyond(level: str, needs: Needs) -> Iterator[str]:
    """What `baseline` and `restricted` refuse and training pods often have."""
    if level == "privileged" or needs.pod is None:
        return
    spec = needs.pod["spec"]
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield f"spec.{key} is true"
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            yield f"the volume {volume['name']} is a hostPath"
    for container in spec["containers"]:
        security = container.get("securityContext") or {}
        if security.get("privileged"):
            yield f"the container {container['name']} is privileged"
        if level == "restricted":
            pod_level = spec.get("securityContext") or {}
            if not (security.get("runAsNonRoot") or pod_level.get("runAsNonRoot")):
                yield f"the container {container['name']} does not say runAsNonRoot"
            if security.get("allowPrivilegeEscalation") is not False:
                yield f"the container {container['name']} does not say allowPrivilegeEscalation: false"
