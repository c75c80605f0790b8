"""A run as a PyTorchJob of Kubeflow's training operator 1.7 to 1.9. Pure."""

from __future__ import annotations

from typing import Any

from windlass.spec import Run
from windlass.targets.kubernetes.facts import Served, ServedKind
from windlass.targets.kubernetes.indexed import is_elastic, limits
from windlass.targets.kubernetes.request import Manifest


def pytorch_job(run: Run, metadata: Manifest, template: Manifest, kind: ServedKind, served: Served) -> list[Manifest]:
    num_nodes = run.resources.nodes
    spec = {
        "nprocPerNode": str(run.resources.processes_per_node or 1),
        **_elastic(run),
        "pytorchReplicaSpecs": _replicas(run, template),
        "runPolicy": {"cleanPodPolicy": "Running", **limits(run), **_gang(run, served, num_nodes)},
    }
    return [{"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}]


def _replicas(run: Run, template: Manifest) -> dict[str, Any]:
    """Codes below 128 end the job, others and lost pods bring a new pod: just what the entry means by them."""
    num_nodes = run.resources.nodes
    if is_elastic(run):
        return {"Worker": {"replicas": num_nodes, "restartPolicy": "ExitCode", "template": template}}
    master = {"Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": template}}
    if num_nodes == 1:
        return master
    return {**master, "Worker": {"replicas": num_nodes - 1, "restartPolicy": "ExitCode", "template": template}}


def _elastic(run: Run) -> dict[str, Any]:
    if not is_elastic(run):
        return {}
    least, most = run.target.kubernetes.min_nodes, run.resources.nodes
    return {"elasticPolicy": {"minReplicas": least, "maxReplicas": most, "rdzvBackend": "c10d", "rdzvPort": 29500}}


def _gang(run: Run, served: Served, num_nodes: int) -> dict[str, Any]:
    """Where the operator was installed with a gang scheduler it makes the PodGroup from this; else it is not read."""
    asked = run.target.kubernetes
    if asked.gang == "none" or num_nodes == 1 or asked.queue or not (served.volcano or served.coscheduling):
        return {}
    policy: dict[str, Any] = {"minAvailable": asked.min_nodes or num_nodes}
    if asked.priority_class:
        policy["priorityClass"] = asked.priority_class
    return {"schedulingPolicy": policy}
