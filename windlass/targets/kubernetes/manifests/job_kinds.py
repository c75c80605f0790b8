"""A run as a plain indexed Job, which every cluster serves, as a PyTorchJob of Kubeflow's training operator 1.7 to 1.9,
and as a HyperPodPyTorchJob of SageMaker HyperPod's. Pure.
"""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.kubernetes import seconds
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind, Served, ServedKind
from windlass.targets.kubernetes.manifests.pod import CONTAINERS
from windlass.targets.kubernetes.manifests.request import Manifest
from windlass.targets.kubernetes.pod.verdict import LEFT

SUCCESS_POLICY_SINCE = (1, 31)
LIMIT_PER_INDEX_SINCE = (1, 29)
LARGEST_LIMIT = 2**31 - 1


def job_spec(run: Run, template: Manifest, served: Served, *, container: str) -> dict[str, Any]:
    """The spec of a batch/v1 Job, alone or inside a JobSet.

    Pods that had to leave (a drain, a preemption, a lost node) count for nothing; other losses count up to the limit;
    a run that failed for good ends its job. A pod is replaced once it has ended: one on a dead node is taken out by
    whoever looks at the run (`recovery`), or when the node's object goes.
    """
    options, num_nodes = run.target.kubernetes, run.resources.nodes
    limit = options.max_pod_failures
    limit = min(run.target.max_restarts * num_nodes if limit is None else limit, LARGEST_LIMIT - 1)
    by_index = served.kubernetes >= LIMIT_PER_INDEX_SINCE
    return {
        "completions": num_nodes,
        "parallelism": num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": limit,
        **(_by_index(run, limit) if by_index else {}),
        "podReplacementPolicy": "Failed",  # the only one that goes with a failure policy
        "podFailurePolicy": _failure_policy(container, "FailIndex" if by_index else "FailJob"),
        **_success(run, served),
        "template": template,
    }


def _by_index(run: Run, limit: int) -> dict[str, int]:
    """Failures are counted for each pod, so that the wait before a new one (10 s, doubled each time) grows with that
    pod's losses and not with everybody's. What ends the job is the limit for all."""
    limits = {"backoffLimitPerIndex": limit + 1}
    if is_elastic(run):  # the others may never have been there
        limits["maxFailedIndexes"] = (run.target.kubernetes.min_nodes or 1) - 1
    return limits


def _failure_policy(container: str, for_good: str) -> dict[str, Any]:
    """`for_good` leaves every pod to end by itself where it can: a job that fails at once deletes the others' logs."""
    return {
        "rules": [
            {"action": for_good, "onExitCodes": {"containerName": container, "operator": "In", "values": [1, 2]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"containerName": container, "operator": "In", "values": [LEFT]}},
        ]
    }


def _success(run: Run, served: Served) -> dict[str, Any]:
    """With fewer nodes than pods a run may end while some pod has not started: node 0 speaks for all."""
    if not is_elastic(run):
        return {}
    if served.kubernetes < SUCCESS_POLICY_SINCE:
        version = ".".join(map(str, served.kubernetes))
        raise UserError(
            f"target.kubernetes.min_nodes needs Kubernetes 1.31 for this kind of job, the cluster has {version}",
            fix="leave target.kubernetes.min_nodes out, or target.kubernetes.job=pytorchjob",
        )
    return {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}}


def is_elastic(run: Run) -> bool:
    least = run.target.kubernetes.min_nodes
    return least is not None and least < run.resources.nodes


def limits(run: Run) -> dict[str, int]:
    """When a job is ended, and when its remains are deleted."""
    options = run.target.kubernetes
    times = {"activeDeadlineSeconds": options.deadline, "ttlSecondsAfterFinished": options.keep_for}
    return {key: seconds(time) for key, time in times.items() if time}


def indexed_job(run: Run, metadata: Manifest, template: Manifest, served: Served) -> list[Manifest]:
    spec = {**job_spec(run, template, served, container=CONTAINERS[JobKind.INDEXED]), **limits(run)}
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


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
    options = run.target.kubernetes
    if options.gang == "none" or num_nodes == 1 or options.queue or not (served.volcano or served.coscheduling):
        return {}
    policy: dict[str, Any] = {"minAvailable": options.min_nodes or num_nodes}
    if options.priority_class:
        policy["priorityClass"] = options.priority_class
    return {"schedulingPolicy": policy}


REPLICAS = "pod"
EVALUATION_SECONDS = 3600  # the time within which restarts are counted; a node's replacement takes half of it
# HyperPod's agent restarts a job whose lines stop. It comes after windlass' own watch, which names the rank: so it
# waits long, and a save or a validation between two lines fits in.
START_SECONDS, STEP_SECONDS, SHORTEST_SECONDS = 3600, 180, 1800


def hyperpod_job(run: Run, metadata: Manifest, template: Manifest, kind: ServedKind) -> list[Manifest]:
    options, num_nodes = run.target.kubernetes, run.resources.nodes
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None",  # the pods' logs stay until the job is deleted
        "jobMaxRetryCount": run.target.max_restarts,
        "restartPolicy": {
            "evalPeriodSeconds": EVALUATION_SECONDS,
            "numRestartBeforeFullJobRestart": run.target.max_restarts,
            "maxFullJobRestarts": run.target.max_restarts,
        },
        "ttlSecondsAfterFinished": seconds(options.keep_for) if options.keep_for else -1,
        **({"logMonitoringConfiguration": log_rules(run)} if run.parallel.hang_seconds != 0 else {}),
    }
    if options.deadline:
        policy["activeDeadlineSeconds"] = seconds(options.deadline)
    replicas: dict[str, Any] = {"name": REPLICAS, "replicas": num_nodes, "template": template}
    if options.spares:
        replicas["spares"] = options.spares
    spec: dict[str, Any] = {
        "nprocPerNode": str(run.resources.processes_per_node or 1),
        "replicaSpecs": [replicas],
        "runPolicy": policy,
    }
    if is_elastic(run):
        replicas["maxReplicas"] = num_nodes
        spec["elasticPolicy"] = {
            "minReplicas": options.min_nodes,
            "maxReplicas": num_nodes,
            "replicaIncrementStep": 1,
            "gracefulShutdownTimeoutInSeconds": run.checkpoint.grace_seconds,
        }
    return [{"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}]


def log_rules(run: Run) -> list[dict[str, Any]]:
    """Which lines HyperPod's agent expects, of the first rank of every pod, matched from the beginning of each line.

    Every rank says that it is ready, so that line has a deadline; steps are said by rank 0 alone, and a rule without a
    deadline waits for ever on the other pods.
    """
    between = max(SHORTEST_SECONDS, STEP_SECONDS * run.train.log_every, int(2 * (run.parallel.hang_seconds or 0)))
    ready = {"logPattern": r".* rank \d+ INFO every rank takes ", "expectedStartCutOffInSeconds": START_SECONDS}
    steps = {"logPattern": r".* rank 0 INFO step \d+/\d+ ", "expectedRecurringFrequencyInSeconds": between}
    stop = r".* INFO finished after step "
    return [{"name": "ready", **ready}, {"name": "steps", **steps, "stopPattern": stop}]
