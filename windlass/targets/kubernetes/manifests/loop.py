"""The retry loop of a run as a one-pod Job, with the role that it needs and no more. Pure.

The pod runs the loop of `windlass run` itself (`windlass.cli.runs.loop`), with what the run carried when it was
submitted. What it does is in a ConfigMap of its name, where every machine reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.spec import Run, dump_run
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind, ServedKind
from windlass.targets.kubernetes.manifests.code import Carried, config_maps
from windlass.targets.kubernetes.manifests.labels import LOOP_LABEL, MANAGED_BY, NAME_ANNOTATION, safe_name
from windlass.targets.kubernetes.manifests.pod import (
    CONTAINERS,
    carried_archives,
    image_of,
    merge_pod,
    run_file_volume,
    scratch,
    security,
)
from windlass.targets.kubernetes.manifests.request import Manifest, as_yaml, with_options
from windlass.targets.kubernetes.pod import interface as names
from windlass.targets.protocol import LOOP_VARIABLE

MODULE = "windlass.cli.runs.loop"
CONTAINER = CONTAINERS[JobKind.INDEXED]
ACCOUNT = "windlass-loop"  # of the namespace: all loops in it act as this account
NODE_READER = "windlass-loop-nodes"
RUN_KEY, HISTORY_KEY = "run.yaml", "history.jsonl"
SETTLED_KEY = "settled.yaml"  # the run of the newest job, edits included
MOST_RESTARTS = 20  # of the loop's own pod: an eviction, a lost node
LOST_SECONDS = 30
REQUESTS, LIMITS = {"cpu": "100m", "memory": "256Mi"}, {"memory": "1Gi"}
ALL = ["get", "list", "create", "patch", "delete"]
# Kinds of volumes that are there wherever the pod is; the loop must start where the run's own pods cannot.
PLAIN_VOLUMES = ("hostPath", "emptyDir")
OF_CONTAINERS = ("name", "image", "imagePullPolicy", "securityContext")  # what an overlay says of the loop's too


@dataclass(frozen=True)
class Loop:
    """What is created for a loop, in this order."""

    name: str
    namespace: str
    account: Manifest
    objects: tuple[Manifest, ...]  # the Job comes first and owns the others
    for_nodes: tuple[Manifest, ...]  # for the whole cluster; the loop does without where nobody may create them
    queue: str | None = None  # the run's queue of Kueue: the loop joins it only where every Job must be in one
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def job(self) -> Manifest:
        return self.objects[0]

    def __str__(self) -> str:
        return "---\n" + as_yaml([self.account, *self.for_nodes, *self.objects])


def loop_name(name: str) -> str:
    return f"{safe_name(name)}-loop"


def render_loop(
    run: Run,
    asked: Run,
    kind: JobKind,
    cluster: ClusterFacts,
    carried: Carried,
    *,
    patience: float,
    faults: str | None,
    history: str,
    notify: Mapping[str, str] | None = None,
) -> Loop:
    """The loop of a run: `asked` is what its user wants, `run` what it is here, `history` what was done so far.

    `notify`: the variables with which it tells people; they are kept in its Secret.
    """
    name, namespace = loop_name(run.name), cluster.namespace
    parts = config_maps(name, carried)
    part_names = [part["metadata"]["name"] for part in parts]
    variables = {LOOP_VARIABLE: run.name, "WINDLASS_RUNS": f"{names.SCRATCH}/runs", "HOME": names.SCRATCH}
    variables |= {names.PATIENCE_VARIABLE: f"{patience:g}", **({names.FAULTS_VARIABLE: faults} if faults else {})}
    as_pod_reads_it = with_options(asked, context=None, namespace=namespace)  # it knows its own cluster alone
    data = {RUN_KEY: dump_run(as_pod_reads_it), HISTORY_KEY: history}
    served = cluster.served.kinds.get(kind)
    objects: list[Manifest] = [
        {"apiVersion": "batch/v1", "kind": "Job", "spec": _job(run, name, part_names, variables, cluster)},
        {"apiVersion": "v1", "kind": "ConfigMap", "data": data},
        {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": rules(kind, served)},
        _binding("RoleBinding", "Role", name, namespace),
    ]
    for value in objects:
        value["metadata"] = {"name": name}
    objects += parts
    for value in objects:
        about = {"namespace": namespace, "labels": _labels(run), "annotations": {NAME_ANNOTATION: run.name}}
        value["metadata"] = {**value["metadata"], **about}
    about = {"name": ACCOUNT, "namespace": namespace, "labels": dict(MANAGED_BY)}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about}
    secrets = {**carried.secret_values, **(notify or {})}
    return Loop(name, namespace, account, tuple(objects), for_nodes(namespace), run.target.kubernetes.queue, secrets)


def rules(kind: JobKind, served: ServedKind | None) -> list[dict[str, Any]]:
    """What the loop does in its namespace, verb by verb."""
    granted = [
        _rule("", ["configmaps", "secrets", "services"], ALL),
        _rule("", ["pods"], ["get", "list", "watch", "create", "patch", "delete", "deletecollection"]),
        _rule("", ["pods/log"], ["get"]),
        _rule("", ["pods/exec"], ["get", "create"]),
        _rule("", ["events"], ["list", "watch"]),
        _rule("", ["namespaces"], ["get"]),
        _rule("", ["persistentvolumeclaims", "resourcequotas"], ["get", "list"]),
        _rule("batch", ["jobs"], [*ALL, "watch"]),
        _rule("kueue.x-k8s.io", ["workloads", "localqueues"], ["get", "list"]),
    ]
    if kind is not JobKind.INDEXED and served is not None:
        plurals = [served.plural, *(["trainingruntimes"] if kind is JobKind.TRAINJOB else [])]
        granted.append(_rule(served.api_version.partition("/")[0], plurals, [*ALL, "watch"]))
    return granted


def for_nodes(namespace: str) -> tuple[Manifest, ...]:
    """The right to see nodes: how much they have, and which are lost."""
    role: Manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": NODE_READER},
    }
    binding = _binding("ClusterRoleBinding", "ClusterRole", NODE_READER, namespace)
    binding["metadata"] = {"name": f"{NODE_READER}-{namespace}"}
    role["rules"] = [_rule("", ["nodes"], ["get", "list"])]
    for manifest in (role, binding):
        manifest["metadata"]["labels"] = dict(MANAGED_BY)
    return role, binding


def _rule(group: str, resources: list[str], verbs: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _binding(kind: str, of: str, role: str, namespace: str) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": of, "name": role},
    }


def _labels(run: Run) -> dict[str, str]:
    return {**MANAGED_BY, LOOP_LABEL: safe_name(run.name)}  # not the run's own label: it is no rank


def _job(
    run: Run, name: str, part_names: list[str], variables: Mapping[str, str], cluster: ClusterFacts
) -> dict[str, Any]:
    options = run.target.kubernetes
    carries = any(part.endswith(f"-{names.WINDLASS}-0") for part in part_names)
    start = [f"{names.CARRIED}/{names.BOOTSTRAP}", MODULE] if carries else ["-m", MODULE]
    pairs = [scratch(), run_file_volume(name), *([carried_archives(part_names)] if part_names else [])]
    container = {
        "name": CONTAINER,
        "image": image_of(run),
        **({"imagePullPolicy": options.image_pull_policy} if options.image_pull_policy else {}),
        "command": [options.python, *start],
        "env": [
            *({"name": key, "value": value} for key, value in variables.items()),
            {"name": "WINDLASS_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        ],
        "envFrom": [{"secretRef": {"name": name}}],
        "resources": {"requests": dict(REQUESTS), "limits": dict(LIMITS)},
        "volumeMounts": [mount for _, mount in pairs],
        **security(cluster),
    }
    lost = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECONDS}
        for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    ]
    spec = {
        "containers": [container],
        "volumes": [volume for volume, _ in pairs],
        "restartPolicy": "OnFailure",
        "serviceAccountName": ACCOUNT,
        "terminationGracePeriodSeconds": 5,
        "enableServiceLinks": False,
        "tolerations": [*lost, *(dict(toleration) for toleration in options.tolerations)],
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets],
    }
    template = {"metadata": {"labels": _labels(run)}, "spec": merge_pod(spec, _plain(options.pod), container=CONTAINER)}
    return {"backoffLimit": MOST_RESTARTS, "template": template}


def _plain(overlay: Mapping[str, Any]) -> dict[str, Any]:
    """The user's overlay, less what is for training alone and what may be missing: claims, secrets, devices."""
    volumes = [volume for volume in overlay.get("volumes", ()) if any(kind in volume for kind in PLAIN_VOLUMES)]
    mounted = {volume.get("name") for volume in volumes}
    containers = [
        {
            **{key: container[key] for key in OF_CONTAINERS if key in container},
            "env": [variable for variable in container.get("env", ()) if "valueFrom" not in variable],
            "volumeMounts": [mount for mount in container.get("volumeMounts", ()) if mount.get("name") in mounted],
        }
        for container in overlay.get("containers", ())
        if container.get("name") == CONTAINER
    ]
    kept = {key: overlay[key] for key in ("securityContext", "imagePullSecrets", "tolerations") if key in overlay}
    return {**kept, "containers": containers, "volumes": volumes}
