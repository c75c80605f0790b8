"""A run as a HyperPodPyTorchJob of SageMaker HyperPod's training operator. Pure."""

from __future__ import annotations

from typing import Any

from windlass.spec import Run
from windlass.spec.kubernetes import seconds
from windlass.targets.kubernetes.facts import ServedKind
from windlass.targets.kubernetes.indexed import is_elastic
from windlass.targets.kubernetes.request import Manifest

REPLICAS = "pod"
EVALUATION_SECONDS = 3600  # the time within which restarts are counted; a node's replacement takes half of it


def hyperpod_job(run: Run, metadata: Manifest, template: Manifest, kind: ServedKind) -> list[Manifest]:
    asked, num_nodes = run.target.kubernetes, run.resources.nodes
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None",  # the pods' logs stay until the job is deleted
        "jobMaxRetryCount": run.target.max_restarts,
        "restartPolicy": {
            "evalPeriodSeconds": EVALUATION_SECONDS,
            "numRestartBeforeFullJobRestart": run.target.max_restarts,
            "maxFullJobRestarts": run.target.max_restarts,
        },
        "ttlSecondsAfterFinished": seconds(asked.keep_for) if asked.keep_for else -1,
    }
    if asked.deadline:
        policy["activeDeadlineSeconds"] = seconds(asked.deadline)
    replicas: dict[str, Any] = {"name": REPLICAS, "replicas": num_nodes, "template": template}
    spec: dict[str, Any] = {
        "nprocPerNode": str(run.resources.processes_per_node or 1),
        "replicaSpecs": [replicas],
        "runPolicy": policy,
    }
    if is_elastic(run):
        replicas["maxReplicas"] = num_nodes
        spec["elasticPolicy"] = {
            "minReplicas": asked.min_nodes,
            "maxReplicas": num_nodes,
            "replicaIncrementStep": 1,
            "gracefulShutdownTimeoutInSeconds": run.checkpoint.grace_seconds,
        }
    return [{"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}]
