"""The namespace: it is there, lets such pods in, and has the service account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.clusters.needs import Needs
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Refusal, Snapshot

IRSA = "eks.amazonaws.com/role-arn"
# kubernetes.io/docs/concepts/security/pod-security-standards
BASELINE_CAPABILITIES = frozenset(
    {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"}
    | {"SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
)
RESTRICTED_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)


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
            fix=f"windlass cluster fix RUN_FILE    or kubectl -n {snapshot.namespace} create serviceaccount {wanted}",
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
    """What `baseline` and `restricted` refuse, of the rules that training pods touch."""
    if level not in ("baseline", "restricted") or needs.pod is None:
        return
    spec = needs.pod["spec"]
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield f"spec.{key} is true"
    for volume in spec.get("volumes") or ():
        for kind in set(volume) - {"name"}:
            if kind == "hostPath" or (level == "restricted" and kind not in RESTRICTED_VOLUMES):
                yield f"the volume {volume['name']} is of the kind {kind}"
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        if any(port.get("hostPort") for port in container.get("ports") or ()):
            yield f"the container {container['name']} has a hostPort"
        security = {**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
        yield from (f"the container {container['name']} {problem}" for problem in _insecure(security, level))


def _insecure(security: Mapping[str, Any], level: str) -> Iterator[str]:
    """What a container's security context, laid over the pod's, has or lacks."""
    capabilities, profile = security.get("capabilities") or {}, (security.get("seccompProfile") or {}).get("type")
    allowed = BASELINE_CAPABILITIES if level == "baseline" else {"NET_BIND_SERVICE"}
    if security.get("privileged"):
        yield "is privileged"
    if too_many := sorted(set(capabilities.get("add") or ()) - allowed):
        yield f"adds the capabilities {', '.join(too_many)}"
    if profile == "Unconfined" or (level == "restricted" and profile not in ("RuntimeDefault", "Localhost")):
        yield "does not say seccompProfile: {type: RuntimeDefault}"
    if level == "restricted":
        if security.get("runAsNonRoot") is not True:
            yield "does not say runAsNonRoot: true"
        if security.get("runAsUser") == 0:
            yield "says runAsUser: 0"
        if security.get("allowPrivilegeEscalation") is not False:
            yield "does not say allowPrivilegeEscalation: false"
        if "ALL" not in (capabilities.get("drop") or ()):
            yield "does not say capabilities: {drop: [ALL]}"
