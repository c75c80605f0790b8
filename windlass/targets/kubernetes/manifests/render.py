"""Render a run as Kubernetes objects. Pure: run and cluster facts in, dicts out; nothing here talks to a cluster."""

from __future__ import annotations

import hashlib

import windlass
from windlass.errors import UserError
from windlass.spec import Run, dump_run
from windlass.targets.kubernetes.manifests import secrets
from windlass.targets.kubernetes.manifests.cluster_facts import (
    ALWAYS,
    GROUPS,
    PLURALS,
    ClusterFacts,
    JobKind,
    Served,
)
from windlass.targets.kubernetes.manifests.code import Carried, config_maps
from windlass.targets.kubernetes.manifests.environment import JOB_INDEX, KUBEFLOW_INDEX, KUBEFLOW_ROLE, host_name
from windlass.targets.kubernetes.manifests.job_kinds import hyperpod_job, indexed_job, is_elastic, pytorch_job
from windlass.targets.kubernetes.manifests.labels import (
    DIGEST_ANNOTATION,
    NAME_ANNOTATION,
    RUN_LABEL,
    VERSION_ANNOTATION,
    digest_of,
    labels_of,
    safe_name,
    selector_of,
)
from windlass.targets.kubernetes.manifests.pod import CONTAINERS, image_of, is_shared, may_lock_memory, pod_template
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, Manifest, PodLayout, with_options
from windlass.targets.kubernetes.manifests.resources import NodeShape, settle, shape_of
from windlass.targets.kubernetes.manifests.secrets import plain_secrets
from windlass.targets.kubernetes.manifests.trainjob import train_job
from windlass.targets.kubernetes.pod.interface import COORDINATOR_PORT, TOKEN_VARIABLE

__all__ = ["layout_of", "pick", "render", "settle"]

QUEUE_LABEL, QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
OPERATORS = {
    JobKind.TRAINJOB: "Kubeflow Trainer",
    JobKind.PYTORCHJOB: "Kubeflow's training operator",
    JobKind.HYPERPOD: "HyperPod's training operator",
}


def pick(run: Run, served: Served) -> JobKind:
    """The kind of job that a run becomes: the one it names, else the first that the cluster serves."""
    named = run.target.kubernetes.job or ("trainjob" if run.target.kubernetes.runtime else None)
    if named is None:
        return next((kind for kind in JobKind if kind in served.kinds), JobKind.INDEXED)
    kind = JobKind(named)
    if kind not in served.kinds and kind is not JobKind.INDEXED:
        known = ", ".join(kind for kind in JobKind if kind in served.kinds or kind is JobKind.INDEXED)
        raise UserError(
            f"the cluster has no {named}: {OPERATORS[kind]} is not installed",
            evidence=f"{PLURALS[kind]}.{GROUPS[kind]} is not served; it serves {known}",
            fix="leave target.kubernetes.job out, and windlass takes what is there",
        )
    return kind


def render(
    run: Run, cluster: ClusterFacts, carried: Carried, *, submission: str, faults: str | None = None
) -> KubernetesRequest:
    """The request for a settled, resolved run."""
    kind, shape, name = pick(run, cluster.served), shape_of(run, cluster), safe_name(run.name)
    warnings = [*check(run, kind), *unknown_amounts(run, shape)]
    if shape.efa and not may_lock_memory(cluster):
        warnings.append(
            f"the namespace {cluster.namespace} enforces PodSecurity {cluster.pod_security}: the pods go without "
            "IPC_LOCK, and EFA needs nodes whose containers may lock memory without a limit, as EKS' are"
        )
    parts = config_maps(name, carried)
    names = [part["metadata"]["name"] for part in parts]
    template = pod_template(run, kind, shape, cluster, carried, submission=submission, config_maps=names, faults=faults)
    # without the names that only the submitting machine's kubeconfig knows: from elsewhere it is the same run
    run_text = dump_run(with_options(run, context=None, namespace=None))
    job_metadata = metadata(run, name)
    job_metadata["labels"] |= _queue_labels(run)
    dependents: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(run, f"{name}-run"),
            "data": {"run.yaml": run_text},
        },
        *({**part, "metadata": metadata(run, part["metadata"]["name"])} for part in parts),
    ]
    coordinates = kind is not JobKind.HYPERPOD  # the pods find each other by windlass, not by HyperPod's operator
    secret_values = {**carried.secret_values, **({TOKEN_VARIABLE: carried.token} if coordinates else {})}
    if coordinates or secrets.own_names(run):
        own = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(run, secrets.secret_name(name))}
        dependents.append({**own, "type": "Opaque"})
    if coordinates:
        dependents.append(_host_service(run, kind))
    objects = [*dependents, *_job(run, kind, job_metadata, template, cluster.served)]
    for value in objects:
        value["metadata"]["namespace"] = cluster.namespace
    # not of the objects: they follow from these and from what the cluster has, which changes while a job runs
    code = {archive: hashlib.sha256(data).hexdigest() for archive, data in sorted(carried.archives.items())}
    digest = digest_of({"run": run_text, "kind": str(kind), "code": code, "faults": faults})
    objects[-1]["metadata"]["annotations"] |= {DIGEST_ANNOTATION: digest, VERSION_ANNOTATION: windlass.__version__}
    return KubernetesRequest(
        name=run.name,
        object_name=name,
        namespace=cluster.namespace,
        context=cluster.context,
        kind=kind,
        objects=tuple(objects),
        pods=layout_of(kind, run),
        digest=digest,
        submission=submission,
        template=template,
        warnings=tuple(warnings),
        secret_values=secret_values,
    )


def unknown_amounts(run: Run, shape: NodeShape) -> list[str]:
    """What a pod with GPUs does not ask for because nobody has said what its nodes have."""
    if not shape.gpus or shape.missing is None:
        return []
    options = run.target.kubernetes
    amounts = {"CPUs": options.cpu, "memory": options.memory, "EFA": options.efa}
    unsaid = [what for what, value in amounts.items() if value is None]
    if run.resources.nodes > 1 and options.spread is None:
        unsaid.append("nodes of their own")
    if not unsaid:
        return []
    fix = "resources.instance=TYPE says it all, or target.kubernetes.cpu, memory, efa and spread do"
    return [f"{shape.missing}: the pods ask for GPUs, but for no {', '.join(unsaid)}; {fix}"]


def check(run: Run, kind: JobKind = JobKind.INDEXED) -> list[str]:
    """Raise what cannot work on any cluster; return what works badly."""
    options, num_nodes = run.target.kubernetes, run.resources.nodes
    image_of(run)
    if options.gang in ("coscheduling", "volcano") and kind in (JobKind.INDEXED, JobKind.HYPERPOD) and num_nodes > 1:
        raise UserError(
            f"target.kubernetes.gang is {options.gang}, which a {kind} does not do",
            cause="only Kubeflow's operators make the group that such a scheduler looks at",
            fix="target.kubernetes.job=trainjob    or pytorchjob; target.kubernetes.queue=NAME has Kueue admit the job "
            "as a whole; target.kubernetes.gang=none starts pods one by one",
        )
    if options.spares and kind is not JobKind.HYPERPOD:
        raise UserError(
            f"target.kubernetes.spares is {options.spares}, which a {kind} does not have",
            cause="only HyperPod's training operator keeps pods ready for lost ones",
            fix="target.kubernetes.job=hyperpod    or leave target.kubernetes.spares out",
        )
    if options.min_nodes and options.min_nodes > num_nodes:
        raise UserError(
            f"target.kubernetes.min_nodes is {options.min_nodes} but the run has {num_nodes} nodes",
            fix=f"target.kubernetes.min_nodes={num_nodes}",
        )
    warnings = plain_secrets(run)
    if is_shared(run):
        return warnings
    if num_nodes > 1 and not run.checkpoint.store:
        raise UserError(
            f"{num_nodes} pods have no place in common for their checkpoints",
            cause="target.kubernetes.storage is none: every pod writes to its own disk, and no checkpoint is whole",
            fix="target.kubernetes.storage=pvc:CLAIM    a ReadWriteMany claim, such as FSx or EFS; or "
            "checkpoint.store=s3://BUCKET/PREFIX",
        )
    if num_nodes > 1 and run.checkpoint.export:
        raise UserError(
            "checkpoint.export needs a whole checkpoint in one place, and every pod has its own files alone",
            cause="target.kubernetes.storage is none",
            fix="checkpoint.export=false; at the end `windlass ckpt get NAME` and `windlass ckpt export NAME`",
        )
    if run.checkpoint.store:
        return warnings
    lost = "target.kubernetes.storage is none: checkpoints are lost with the pod"
    return [*warnings, f"{lost}; pvc:CLAIM or checkpoint.store keeps them"]


def layout_of(kind: JobKind, run: Run) -> PodLayout:
    """How the pods of a run are found and which ranks they hold."""
    elastic = is_elastic(run)
    by_kind = {
        JobKind.PYTORCHJOB: ((KUBEFLOW_INDEX,), None if elastic else (KUBEFLOW_ROLE, "master")),
        JobKind.HYPERPOD: ((KUBEFLOW_INDEX, JOB_INDEX), None),
    }
    index_labels, first_by = by_kind.get(kind, ((JOB_INDEX,), None))
    return PodLayout(
        selector=selector_of(run.name),
        index_labels=index_labels,
        first_by=first_by,
        num_pods=run.resources.nodes,
        ranks_per_pod=run.resources.processes_per_node or 1,
        container=CONTAINERS[kind],
    )


def metadata(run: Run, name: str) -> Manifest:
    return {"name": name, "labels": labels_of(run.name), "annotations": {NAME_ANNOTATION: run.name}}


def _job(run: Run, kind: JobKind, about: Manifest, template: Manifest, served: Served) -> list[Manifest]:
    """The job, last; before it what it needs of its own kind."""
    as_served = served.kinds.get(kind, ALWAYS)
    match kind:
        case JobKind.TRAINJOB:
            return train_job(run, about, template, as_served, served)
        case JobKind.PYTORCHJOB:
            return pytorch_job(run, about, template, as_served, served)
        case JobKind.HYPERPOD:
            return hyperpod_job(run, about, template, as_served)
    return indexed_job(run, about, template, served)


def _queue_labels(run: Run) -> dict[str, str]:
    options = run.target.kubernetes
    labels = {QUEUE_LABEL: options.queue, QUEUE_PRIORITY_LABEL: options.queue_priority}
    return {label: value for label, value in labels.items() if value}


def _host_service(run: Run, kind: JobKind) -> Manifest:
    """A name for node 0's pod, found also before it is ready: the others wait for it there."""
    match kind:
        case JobKind.PYTORCHJOB if not is_elastic(run):
            first = {KUBEFLOW_ROLE: "master"}
        case JobKind.PYTORCHJOB:
            first = {KUBEFLOW_INDEX: "0"}
        case _:
            first = {JOB_INDEX: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run, host_name(run)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: safe_name(run.name), **first},
            "ports": [{"name": "meeting", "port": run.target.port or COORDINATOR_PORT}],
        },
    }
