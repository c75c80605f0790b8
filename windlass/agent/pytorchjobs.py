"""PyTorchJobs of a cluster, whoever made them: made, deleted, listed, read."""

from __future__ import annotations

import shlex
from typing import Any

from windlass.agent.results import PyTorchJob, PyTorchJobs
from windlass.errors import UserError
from windlass.targets.kubernetes.api.discovery import must_have_namespace, served
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.jobfile import object_path
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind

JOB_LABEL = "training.kubeflow.org/job-name"
CONTAINER = "pytorch"  # the operator takes a container of this name alone
LAST_LINES = 200


def manage(
    action: str,
    name: str | None,
    namespace: str | None,
    image: str | None,
    num_workers: int,
    num_gpus_per_worker: int,
    command: str | None,
    context: str,
) -> PyTorchJobs:
    api = Api(access(context, namespace))
    namespace = api.access.namespace
    kind = served(api, schemas=False).kinds.get(JobKind.PYTORCHJOB)
    result = PyTorchJobs(action=action, served=kind is not None)
    if action == "check_crd":
        return result
    if kind is None:
        raise UserError(
            f"the cluster {context} knows no PyTorchJobs",
            cause="Kubeflow's training operator is not installed",
            fix="windlass cluster fix --manifest OPERATOR.yaml",
        )
    jobs = object_path(kind.api_version, kind.plural, namespace)
    if action == "list":
        result.jobs = [_described(job) for job in api.items(jobs)]
        return result
    if not name:
        raise UserError(f"{action} needs the name of a job", fix="name=…")
    path = object_path(kind.api_version, kind.plural, namespace, name)
    if action == "create":
        must_have_namespace(api, namespace)
        manifest = pytorchjob(name, image, num_workers, num_gpus_per_worker, command, kind.api_version, kind.kind)
        result.jobs = [_described(api.create(jobs, manifest))]
        return result
    job = api.delete(path) if action == "delete" else api.find(path)
    if job is None:
        raise UserError(
            f"there is no PyTorchJob {name!r} in the namespace {namespace}",
            fix='manage_pytorchjob("list")',
            error_code="no-such-run",
        )
    result.jobs = [_described(job)] if action == "status" else []
    if action == "logs":
        pods = api.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"{JOB_LABEL}={name}")
        result.logs = [line for pod in pods for line in _log(api, namespace, pod)]
    return result


def pytorchjob(
    name: str, image: str | None, num_workers: int, num_gpus: int, command: str | None, api_version: str, kind: str
) -> dict[str, Any]:
    """A job whose pods run `torchrun COMMAND`; the operator tells torchrun where the others are."""
    if not image or not command:
        raise UserError(
            "a PyTorchJob needs an image and a command",
            fix='image=…, command="train.py --max_steps 100"    or deploy_training_job(…) for a run of windlass',
        )
    resources = {"limits": {"nvidia.com/gpu": num_gpus}} if num_gpus else {}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": ["torchrun", *shlex.split(command)],
        "resources": resources,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    template = {"spec": {"containers": [container], "volumes": volumes}}
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if num_workers > 1:
        replicas["Worker"] = {"replicas": num_workers - 1, **replica}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"nprocPerNode": str(max(1, num_gpus)), "pytorchReplicaSpecs": replicas},
    }


def _described(job: dict[str, Any]) -> PyTorchJob:
    conditions = (job.get("status") or {}).get("conditions") or []
    true = [condition["type"] for condition in conditions if condition.get("status") == "True"]
    replicas = (job["spec"].get("pytorchReplicaSpecs") or {}).values()
    return PyTorchJob(
        name=job["metadata"]["name"],
        namespace=job["metadata"].get("namespace") or "default",
        state=true[-1] if true else "unknown",
        workers=sum(replica.get("replicas") or 1 for replica in replicas),
    )


def _log(api: Api, namespace: str, pod: dict[str, Any]) -> list[str]:
    name = pod["metadata"]["name"]
    lines = api.lines(
        f"/api/v1/namespaces/{namespace}/pods/{name}/log", {"container": CONTAINER, "tailLines": LAST_LINES}
    )
    return [f"[{name}] {line.decode('utf-8', 'replace')}" for line in lines]
