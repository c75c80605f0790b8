"""The API server, what this user may do there, and the namespace: it lets such pods in, and has the service account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.clusters.needs import OPTIONAL_ACCESSES, Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Access, Refusal, Snapshot, name_of
from windlass.targets.kubernetes.api.discovery import number_in

OLDEST = (1, 28)  # sidecars, job failure policies and strict field validation are there
OPTIONAL = {str(access) for access in OPTIONAL_ACCESSES}
IRSA = "eks.amazonaws.com/role-arn"
# kubernetes.io/docs/concepts/security/pod-security-standards
BASELINE_CAPABILITIES = frozenset(
    {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"}
    | {"SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
)
RESTRICTED_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)


def api_server(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    major, minor = (number_in(snapshot.version.get(key)) for key in ("major", "minor"))
    version = str(snapshot.version.get("gitVersion") or f"{major}.{minor}")
    if (major, minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield warning(
            f"Kubernetes {version} is older than {oldest}",
            evidence=f"/version of the context {snapshot.context} says {version}",
            fix=f"upgrade the control plane to {oldest} or later",
        )
    else:
        yield passed(f"Kubernetes {version} answers")


def permissions(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    for access in snapshot.accesses:
        if access.is_allowed is None:
            yield skipped(f"whether you may {access} is not known", "the cluster did not answer")
        elif not access.is_allowed:
            is_optional = str(access) in OPTIONAL
            yield (warning if is_optional else failed)(
                f"you may not {access} in the namespace {snapshot.namespace}",
                evidence=access.reason or "SelfSubjectAccessReview: not allowed",
                fix=_role_command(snapshot.namespace, access),
            )
    num_allowed = sum(bool(access.is_allowed) for access in snapshot.accesses)
    if num_allowed == len(snapshot.accesses):
        yield passed(f"you may do all {num_allowed} things that a run needs")


def _role_command(namespace: str, access: Access) -> str:
    resource = access.resource + (f".{access.group}" if access.group else "")
    resource += f"/{access.subresource}" if access.subresource else ""
    kind, where = ("clusterrole", "") if access.resource == "nodes" else ("role", f" -n {namespace}")
    return f"kubectl{where} create {kind} windlass-{access.verb} --verb={access.verb} --resource={resource}"


def pod_security(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    value, name = snapshot.namespace_object, snapshot.namespace
    if isinstance(value, Refusal):
        yield skipped(f"the namespace {name} was not looked at", str(value))
        return
    if value is None:
        yield failed(f"there is no namespace {name}", "the API answers 404", f"kubectl create namespace {name}")
        return
    if (value.get("status") or {}).get("phase") == "Terminating":
        yield failed(f"the namespace {name} is being deleted", fix="target.kubernetes.namespace=OTHER")
        return
    level = snapshot.pod_security or "privileged"
    problems = list(_beyond(level, needs))
    if problems:
        yield failed(
            f"the namespace {name} enforces PodSecurity {level}, which does not let the run's pods in",
            evidence="\n".join(problems),
            fix="target.kubernetes.pod={securityContext: …}    (docs/kubernetes.md, PodSecurity), or another namespace",
        )
    else:
        yield passed(f"the namespace {name} enforces PodSecurity {level}")


def service_account(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    wanted = needs.service_account
    if wanted is None:
        return
    if isinstance(snapshot.service_accounts, Refusal):
        yield skipped("service accounts were not looked at", str(snapshot.service_accounts))
        return
    names = [name_of(account) for account in snapshot.service_accounts]
    if wanted not in names:
        yield failed(
            f"there is no service account {wanted} in the namespace {snapshot.namespace}",
            evidence=f"service accounts there: {', '.join(names) or 'none'}",
            fix=f"windlass cluster fix RUN_FILE    or kubectl -n {snapshot.namespace} create serviceaccount {wanted}",
        )
        return
    account = snapshot.service_accounts[names.index(wanted)]
    role = (account["metadata"].get("annotations") or {}).get(IRSA)
    if role:
        yield passed(f"the service account {wanted} is there, with an IAM role (IRSA)")
    else:
        why = f"no annotation {IRSA}; EKS Pod Identity associations are not visible in the cluster"
        yield passed(f"the service account {wanted} is there; it names no IAM role", why)


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
