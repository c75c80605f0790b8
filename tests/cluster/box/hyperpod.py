"""A stand-in for HyperPod's training operator, which is not public. Test data and test double, nothing more.

The definition follows the fields of the public Python model (sagemaker-hyperpod-cli), so that manifests can be checked
against it. The controller does the smallest honest part of the real one's work: it creates a job's pods, tells them
where their master is, restarts the job when one fails, and reports conditions. It knows no log monitoring, no elastic
policy, no spares.
"""

from __future__ import annotations

import datetime
import http.client
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.box.api import Api, ApiError

GROUP, VERSION, PLURAL, KIND = "sagemaker.amazonaws.com", "v1", "hyperpodpytorchjobs", "HyperPodPyTorchJob"
LABEL = "training.windlass.test/hyperpod-job"
JOBS = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
PORT = 29500

_INTEGER, _STRING, _BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def _one(**properties: Any) -> dict[str, Any]:
    """An object; a name that ends in _ is required."""
    required = sorted(name.rstrip("_") for name in properties if name.endswith("_"))
    schema = {"type": "object", "properties": {name.rstrip("_"): value for name, value in properties.items()}}
    return schema | ({"required": required} if required else {})


def _many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _default(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    return schema | {"default": value}


def _choice(*values: str) -> dict[str, Any]:
    return _STRING | {"enum": list(values)}


_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}  # a pod template: the API server checks pods

_LOG_RULE = _one(
    name_=_STRING,
    logPattern_=_STRING,
    expectedStartCutOffInSeconds=_INTEGER,
    expectedRecurringFrequencyInSeconds=_INTEGER,
    metricThreshold=_INTEGER,
    operator=_choice("gt", "lt", "eq", "gteq", "lteq"),
    metricEvaluationDataPoints=_default(_INTEGER, 1),
    stopPattern=_STRING,
)
_RESTART_POLICY = _one(
    evalPeriodSeconds_=_INTEGER,
    numRestartBeforeFullJobRestart=_INTEGER,
    maxFullJobRestarts=_INTEGER,
    maxNumRepeatOffendersToAvoid=_INTEGER,
    scaleUpSnoozeTimeInSeconds=_default(_INTEGER, 0),
)
_RUN_POLICY = _one(
    activeDeadlineSeconds=_INTEGER,
    cleanPodPolicy=_default(_choice("All", "OnlyComplete", "None"), "All"),
    faultDeadlineSeconds=_INTEGER,
    startupDeadlineSeconds=_INTEGER,
    jobMaxRetryCount=_INTEGER,
    suspend=_BOOLEAN,
    ttlSecondsAfterFinished=_default(_INTEGER, 0),
    workloadMode=_STRING,
    restartPolicy=_RESTART_POLICY,
    logMonitoringConfiguration=_many(_LOG_RULE),
)
_ELASTIC_POLICY = _one(
    minReplicas=_INTEGER,
    maxReplicas=_INTEGER,
    replicaIncrementStep=_INTEGER,
    replicaDiscreteValues=_many(_INTEGER),
    scalingTimeoutInSeconds=_INTEGER,
    gracefulShutdownTimeoutInSeconds=_INTEGER,
    faultyScaleDownTimeoutInSeconds=_INTEGER,
)
_REPLICAS = _one(
    name_=_STRING,
    replicas=_default(_INTEGER | {"minimum": 0}, 0),
    maxReplicas=_INTEGER,
    spares=_default(_INTEGER, 0),
    template=_OPEN,
)
SPEC = _one(nprocPerNode=_STRING, replicaSpecs=_many(_REPLICAS), runPolicy=_RUN_POLICY, elasticPolicy=_ELASTIC_POLICY)


def definition() -> dict[str, Any]:
    schema = _one(apiVersion=_STRING, kind=_STRING, metadata={"type": "object"}, spec=SPEC, status=_OPEN)
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    names = {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": {"windlass.test/stand-in": "not AWS's definition"}},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


# --- the controller


def reconcile(api: Api, job: dict[str, Any]) -> None:
    """Bring one job a step nearer to what it asks for."""
    if job["metadata"].get("deletionTimestamp") or _condition(job, "Completed") or _condition(job, "Failed"):
        return
    if job["spec"].get("runPolicy", {}).get("suspend"):
        return
    attempt = job.get("status", {}).get("restartCount", 0)
    wanted = {pod["metadata"]["name"]: pod for pod in _pods(job, attempt)}
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    path = f"/api/v1/namespaces/{namespace}/pods"
    every = {p["metadata"]["name"]: p for p in api.get(f"{path}?labelSelector={LABEL}={name}")["items"]}
    existing = {called: every[called] for called in wanted.keys() & every.keys()}  # not those of earlier attempts
    phases = [p["status"].get("phase") for p in existing.values()]
    lost = _condition(job, "Running") and wanted.keys() - existing.keys()  # deleted by somebody: as good as failed
    if "Failed" in phases or lost:
        _restart(api, job, attempt, existing)
        return
    _ensure_service(api, job)
    for missing in sorted(wanted.keys() - existing.keys()):
        api.post(path, wanted[missing])
    if not _condition(job, "Created"):
        _report(api, job, "Created", masterAddr=_master(job), masterPort=str(PORT), restartCount=attempt)
    elif phases and all(phase == "Succeeded" for phase in phases) and len(phases) == len(wanted):
        _report(api, job, "Completed", completionTime=_now())
        if job["spec"].get("runPolicy", {}).get("cleanPodPolicy", "All") == "All":
            _delete(api, existing)
    elif phases and all(phase in ("Running", "Succeeded") for phase in phases) and not _condition(job, "Running"):
        _report(api, job, "Running")


def _restart(api: Api, job: dict[str, Any], attempt: int, existing: dict[str, dict[str, Any]]) -> None:
    allowed = job["spec"].get("runPolicy", {}).get("jobMaxRetryCount", 0)
    if attempt >= allowed:
        faulty = [name for name, pod in existing.items() if pod["status"].get("phase") == "Failed"]
        _report(api, job, "Failed", latestFaultyPodInstanceList={"restartType": "JLR", "faultyPodList": faulty})
        return
    _delete(api, existing)
    api.merge(_path(job) + "/status", {"status": {"restartCount": attempt + 1, "conditions": []}})


def _delete(api: Api, pods: dict[str, dict[str, Any]]) -> None:
    for name, pod in pods.items():
        api.delete(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{name}")


def _pods(job: dict[str, Any], attempt: int) -> list[dict[str, Any]]:
    name, spec = job["metadata"]["name"], job["spec"]
    groups = spec.get("replicaSpecs", [])
    total = sum(group.get("replicas", 0) for group in groups)
    pods, rank = [], 0
    for group in groups:
        for index in range(group.get("replicas", 0)):
            template = group.get("template", {})
            hostname = f"{name}-{group['name']}-{index}"
            environment = {
                "PET_NNODES": str(total),
                "PET_NODE_RANK": str(rank),
                "PET_NPROC_PER_NODE": spec.get("nprocPerNode", "auto"),
                "PET_MASTER_ADDR": _master(job),
                "PET_MASTER_PORT": str(PORT),
            }
            extra = [{"name": key, "value": value} for key, value in environment.items()]
            described = template.get("spec", {})
            containers = [c | {"env": [*c.get("env", []), *extra]} for c in described.get("containers", [])]
            own = {"restartPolicy": "Never", "hostname": hostname, "subdomain": name, "containers": containers}
            # a new name for every attempt: the old pod may still be ending
            called = hostname if attempt == 0 else f"{hostname}-{attempt}"
            labels = template.get("metadata", {}).get("labels", {}) | {LABEL: name}
            metadata = {"name": called, "labels": labels, "ownerReferences": [_owner(job)]}
            metadata |= {"annotations": template.get("metadata", {}).get("annotations", {})}
            pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": described | own})
            rank += 1
    return pods


def _master(job: dict[str, Any]) -> str:
    name = job["metadata"]["name"]
    return f"{name}-{job['spec']['replicaSpecs'][0]['name']}-0.{name}.{job['metadata']['namespace']}.svc"


def _ensure_service(api: Api, job: dict[str, Any]) -> None:
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    path = f"/api/v1/namespaces/{namespace}/services"
    if not api.exists(f"{path}/{name}"):
        spec = {"clusterIP": "None", "selector": {LABEL: name}, "publishNotReadyAddresses": True}
        metadata = {"name": name, "ownerReferences": [_owner(job)]}
        api.post(path, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


def _owner(job: dict[str, Any]) -> dict[str, Any]:
    metadata = job["metadata"]
    kind = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND}
    return kind | {"name": metadata["name"], "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True}


def _condition(job: dict[str, Any], kind: str) -> bool:
    return any(one["type"] == kind and one["status"] == "True" for one in job.get("status", {}).get("conditions", []))


def _report(api: Api, job: dict[str, Any], kind: str, **status: Any) -> None:
    conditions = [*job.get("status", {}).get("conditions", [])]
    conditions.append({"type": kind, "status": "True", "lastTransitionTime": _now(), "reason": f"Job{kind}"})
    api.merge(f"{_path(job)}/status", {"status": status | {"conditions": conditions}})


def _path(job: dict[str, Any]) -> str:
    metadata = job["metadata"]
    return f"/apis/{GROUP}/{VERSION}/namespaces/{metadata['namespace']}/{PLURAL}/{metadata['name']}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main(kubeconfig: Path) -> None:
    api = Api(kubeconfig)
    while True:
        try:
            for job in api.get(JOBS)["items"]:
                reconcile(api, job)
        except (ApiError, OSError, http.client.HTTPException) as error:  # changed meanwhile, or the server restarts
            print(error, file=sys.stderr, flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
