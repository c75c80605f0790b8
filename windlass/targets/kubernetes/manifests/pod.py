"""The pod that trains: one per node, the same for every kind of job, with the user's own pod spec merged in. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.manifests import secrets
from windlass.targets.kubernetes.manifests.capacity import REQUIRED
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind
from windlass.targets.kubernetes.manifests.code import Carried
from windlass.targets.kubernetes.manifests.environment import variables
from windlass.targets.kubernetes.manifests.labels import (
    NAME_ANNOTATION,
    RUN_LABEL,
    SUBMISSION_LABEL,
    labels_of,
    safe_name,
)
from windlass.targets.kubernetes.manifests.request import Manifest
from windlass.targets.kubernetes.manifests.resources import (
    INSTANCE_LABEL,
    OS_LABEL,
    NodeShape,
    gpu_taint,
    instance_label,
    is_windows,
    limits_of,
    requests_of,
)
from windlass.targets.kubernetes.pod import interface as names

CONTAINERS = {  # Kubeflow's operators look for theirs by name
    JobKind.TRAINJOB: "node",
    JobKind.PYTORCHJOB: "pytorch",
    JobKind.HYPERPOD: "trainer",
    JobKind.INDEXED: "trainer",
}
RUNS_VOLUME = "windlass-runs"
GRACE_MARGIN = 60  # seconds beside the save itself: ranks finish their step first, and files are synced after
HYPERPOD_HEALTH = "sagemaker.amazonaws.com/node-health-status"
HYPERPOD_UNHEALTHY = ("Unschedulable", "UnschedulablePendingReboot", "UnschedulablePendingReplacement")
LOST_NODE_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
ZONE, HOSTNAME = "topology.kubernetes.io/zone", "kubernetes.io/hostname"


def pod_template(
    run: Run,
    kind: JobKind,
    shape: NodeShape,
    cluster: ClusterFacts,
    carried: Carried,
    *,
    submission: str,
    config_maps: list[str],
    faults: str | None,
) -> Manifest:
    """Metadata and spec of the pods, with the user's overlay on top."""
    options, name = run.target.kubernetes, safe_name(run.name)
    pairs = [
        runs_volume(run),
        run_file_volume(f"{name}-run"),
        scratch(),
        _shared_memory(run, shape),
        *([carried_archives(config_maps)] if config_maps else []),
    ]
    container = {
        "name": CONTAINERS[kind],
        "image": image_of(run),
        **({"imagePullPolicy": options.image_pull_policy} if options.image_pull_policy else {}),
        "command": _command(run, carried),
        "env": [
            *variables(run, kind, shape, shared=is_shared(run), faults=faults),
            *secrets.references(run, name, token=names.TOKEN_VARIABLE if kind is not JobKind.HYPERPOD else None),
        ],
        "ports": _ports(run, kind),
        "resources": _resources(shape),
        "volumeMounts": [mount for _, mount in pairs],
        **security(cluster, efa=bool(shape.efa)),
    }
    spec = {
        "containers": [container],
        "volumes": [volume for volume, _ in pairs],
        # a lost pod is replaced by a new one, so that its log stays; Kubeflow's and HyperPod's jobs say it themselves
        **({"restartPolicy": "Never"} if kind in (JobKind.INDEXED, JobKind.TRAINJOB) else {}),
        "terminationGracePeriodSeconds": run.checkpoint.grace_seconds + GRACE_MARGIN,  # a save must fit in
        "enableServiceLinks": False,  # one variable per service of the namespace is no help to anybody
        **_identity(run),
        **_placement(run, kind, shape, cluster),
    }
    return {
        "metadata": {
            "labels": {**options.labels, **labels_of(run.name), SUBMISSION_LABEL: submission},
            "annotations": {**_kueue_topology(run), **options.annotations, NAME_ANNOTATION: run.name},
        },
        "spec": _with_names(merge_pod(spec, options.pod, container=CONTAINERS[kind])),
    }


def _with_names(spec: Manifest) -> Manifest:
    """On the host's network the cluster's names are found only if that is said: the pods look for node 0 by name."""
    return {"dnsPolicy": "ClusterFirstWithHostNet", **spec} if spec.get("hostNetwork") else spec


def image_of(run: Run) -> str:
    image = run.target.kubernetes.image or run.image.name
    containers = run.target.kubernetes.pod.get("containers", ())
    overlaid = next((container["image"] for container in containers if container.get("image")), "")
    if not image and not overlaid:
        raise UserError(
            "it is not said which image the pods run",
            fix="image.name=REGISTRY/IMAGE:TAG    (`windlass image build` makes one)",
        )
    return str(image or overlaid)


def _command(run: Run, carried: Carried) -> list[str]:
    if names.WINDLASS in carried.archives:
        return [run.target.kubernetes.python, f"{names.CARRIED}/{names.BOOTSTRAP}"]
    return [run.target.kubernetes.python, "-m", "windlass.targets.kubernetes.entry"]


def _ports(run: Run, kind: JobKind) -> list[dict[str, Any]]:
    coordinator = {"name": "meeting", "containerPort": run.target.port or names.COORDINATOR_PORT}
    agent = {"name": "agent", "containerPort": names.HYPERPOD_AGENT_PORT}
    return [coordinator, agent] if kind is JobKind.HYPERPOD else [coordinator]


def _resources(shape: NodeShape) -> dict[str, Any]:
    requests, limits = requests_of(shape), limits_of(shape)
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


def may_lock_memory(cluster: ClusterFacts) -> bool:
    return cluster.pod_security not in ("baseline", "restricted")


def security(cluster: ClusterFacts, *, efa: bool = False) -> dict[str, Any]:
    """EFA pins memory; containers of EKS' own nodes may do so without IPC_LOCK. PodSecurity `restricted` lets no pod in
    that does not say all of this, and an image that runs as root is then refused by the node, by name."""
    if cluster.pod_security == "restricted":
        allowed = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
        return {"securityContext": {**allowed, "seccompProfile": {"type": "RuntimeDefault"}}}
    if efa and may_lock_memory(cluster):
        return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    return {}


def _identity(run: Run) -> dict[str, Any]:
    options = run.target.kubernetes
    identity: dict[str, Any] = {}
    if options.service_account:
        identity["serviceAccountName"] = options.service_account
    else:
        identity["automountServiceAccountToken"] = False  # ranks have nothing to say to the API server
    if options.image_pull_secrets:
        identity["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    if options.priority_class:
        identity["priorityClassName"] = options.priority_class
    return identity


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _placement(run: Run, kind: JobKind, shape: NodeShape, cluster: ClusterFacts) -> dict[str, Any]:
    options = run.target.kubernetes
    selector = dict(options.node_selector)
    label = instance_label(run, cluster)
    if label:
        selector.setdefault(INSTANCE_LABEL, label)
    if kind is JobKind.HYPERPOD:
        selector.setdefault(HYPERPOD_HEALTH, "Schedulable")
    if any(is_windows(node) for node in cluster.nodes):  # no taint need keep pods off those
        selector.setdefault(OS_LABEL, "linux")
    tolerations = [*_of_lost_nodes(run), *(dict(toleration) for toleration in options.tolerations)]
    if shape.gpus:
        tolerations.insert(0, {"key": gpu_taint(run), "operator": "Exists", "effect": "NoSchedule"})
    placement: dict[str, Any] = {"schedulerName": options.scheduler} if options.scheduler else {}
    if selector:
        placement["nodeSelector"] = selector
    if tolerations:
        placement["tolerations"] = tolerations
    if run.resources.nodes > 1:
        placement |= _together_and_apart(run, shape)
    term: dict[str, Any] = {}
    if options.exclude_nodes:  # a field takes one value, and all fields of a term must fit
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in options.exclude_nodes]
        term["matchFields"] = fields
    if kind is not JobKind.HYPERPOD and any(HYPERPOD_HEALTH in node.labels for node in cluster.nodes):
        unfit = {"key": HYPERPOD_HEALTH, "operator": "NotIn", "values": list(HYPERPOD_UNHEALTHY)}
        term["matchExpressions"] = [unfit]  # fits nodes without the label too: not all need be HyperPod's
    if term:
        away = {REQUIRED: {"nodeSelectorTerms": [term]}}
        placement["affinity"] = {**placement.get("affinity", {}), "nodeAffinity": away}
    return placement


def _kueue_topology(run: Run) -> dict[str, str]:
    options = run.target.kubernetes
    labels = {"required": options.required_topology, "preferred": options.preferred_topology} if options.queue else {}
    return {f"kueue.x-k8s.io/podset-{how}-topology": label for how, label in labels.items() if label}


def _of_lost_nodes(run: Run) -> Iterator[dict[str, Any]]:
    """A dead node costs so long, and not the five minutes that Kubernetes gives every pod by default."""
    options = run.target.kubernetes
    named = {toleration.get("key") for toleration in (*options.tolerations, *options.pod.get("tolerations", ()))}
    for key in LOST_NODE_TAINTS:
        if key not in named:
            yield {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": options.node_lost_seconds,
            }


def _together_and_apart(run: Run, shape: NodeShape) -> dict[str, Any]:
    options = run.target.kubernetes
    mine = {"labelSelector": {"matchLabels": {RUN_LABEL: safe_name(run.name)}}}
    affinity: dict[str, Any] = {}
    together = [ZONE] if (options.same_zone if options.same_zone is not None else shape.efa) else []
    if options.required_topology and not options.queue:
        together.append(options.required_topology)
    if together:
        affinity["podAffinity"] = {REQUIRED: [{**mine, "topologyKey": label} for label in together]}
    if options.preferred_topology and not options.queue:
        near = {"weight": 100, "podAffinityTerm": {**mine, "topologyKey": options.preferred_topology}}
        affinity["podAffinity"] = {**affinity.get("podAffinity", {}), PREFERRED: [near]}
    spread = options.spread or ("hosts" if shape.whole_node else None)
    if spread == "hosts":
        affinity["podAntiAffinity"] = {REQUIRED: [{**mine, "topologyKey": HOSTNAME}]}
    placement: dict[str, Any] = {"affinity": affinity} if affinity else {}
    if spread is None:  # where there is room; a small cluster may still hold them all
        placement["topologySpreadConstraints"] = [
            {"maxSkew": 1, "topologyKey": HOSTNAME, "whenUnsatisfiable": "ScheduleAnyway", **mine}
        ]
    return placement


def is_shared(run: Run) -> bool:
    """Whether all pods of the run see one run folder."""
    return run.target.kubernetes.storage != "none"


def runs_volume(run: Run) -> tuple[Manifest, Manifest]:
    """The volume with the run folders, and its mount."""
    kind, _, place = run.target.kubernetes.storage.partition(":")
    mount = {"name": RUNS_VOLUME, "mountPath": names.RUNS}
    match kind:
        case "pvc":
            claim, _, folder = place.partition("/")
            if folder:
                mount["subPath"] = folder
            return {"name": RUNS_VOLUME, "persistentVolumeClaim": {"claimName": claim}}, mount
        case "hostpath":
            return {"name": RUNS_VOLUME, "hostPath": {"path": place, "type": "Directory"}}, mount
    return {"name": RUNS_VOLUME, "emptyDir": {}}, mount


def _shared_memory(run: Run, shape: NodeShape) -> tuple[Manifest, Manifest]:
    """What torch's loaders and NCCL exchange within a node; a container's own 64 MB are not enough."""
    size = run.target.kubernetes.shm or (f"{max(1, int(shape.memory_gib * 512))}Mi" if shape.memory_gib else None)
    limit = {"sizeLimit": size} if size else {}
    return {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}, {"name": "shm", "mountPath": "/dev/shm"}


def run_file_volume(config_map: str) -> tuple[Manifest, Manifest]:
    folder = names.RUN_FILE.rpartition("/")[0]
    volume = {"name": "windlass-run", "configMap": {"name": config_map}}
    return volume, {"name": "windlass-run", "mountPath": folder, "readOnly": True}


def carried_archives(config_maps: list[str]) -> tuple[Manifest, Manifest]:
    """The parts of the carried archives in one folder, mounted whole: changes of the ConfigMaps come through."""
    sources = [{"configMap": {"name": name}} for name in config_maps]
    volume = {"name": "windlass-carried", "projected": {"sources": sources}}
    return volume, {"name": "windlass-carried", "mountPath": names.CARRIED, "readOnly": True}


def scratch() -> tuple[Manifest, Manifest]:
    return {"name": "windlass-scratch", "emptyDir": {}}, {"name": "windlass-scratch", "mountPath": names.SCRATCH}


# Lists of things that have a key of their own: merged thing by thing, as `kubectl patch` does.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
ONE_SOURCE = frozenset(("env", "volumes"))  # a variable or volume from elsewhere is not the old one with more
ADDED = frozenset(("tolerations", "topologySpreadConstraints"))  # lists whose members stand beside each other
TRAINER = "trainer"  # what users call the ranks' container, whatever the job kind wants it to be called


def merge_pod(spec: Mapping[str, Any], overlay: Mapping[str, Any], *, container: str) -> dict[str, Any]:
    """`spec` with `overlay` on top; the overlay's container `trainer` is the one called `container`."""
    renamed = dict(overlay)
    if "containers" in renamed:
        renamed["containers"] = [
            {**part, "name": container} if part.get("name") == TRAINER else part for part in renamed["containers"]
        ]
    return _merge(spec, renamed)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        former = merged.get(key)
        if value is None:  # as in a merge patch: nothing here, please
            merged.pop(key, None)
        elif isinstance(former, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(former, value)
        elif isinstance(former, list) and isinstance(value, list | tuple) and key in KEYS:
            merged[key] = _merge_named(former, list(value), key)
        elif isinstance(former, list) and isinstance(value, list | tuple) and key in ADDED:
            merged[key] = [*former, *(entry for entry in value if entry not in former)]
        else:
            merged[key] = list(value) if isinstance(value, tuple) else value
    return merged


def _merge_named(below: list[Any], above: list[Any], what: str) -> list[Any]:
    merged, key = list(below), KEYS[what]
    for entry in above:
        index = next((i for i, present in enumerate(merged) if present.get(key) == entry.get(key)), None)
        if index is None:
            merged.append(entry)
        elif what in ONE_SOURCE and set(entry) != set(merged[index]):
            merged[index] = dict(entry)
        else:
            merged[index] = _merge(merged[index], entry)
    return merged
