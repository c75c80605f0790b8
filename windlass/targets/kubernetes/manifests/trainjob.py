"""A run as a TrainJob of Kubeflow Trainer 2, with a TrainingRuntime of its own or on top of a named one. Pure."""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.kubernetes import seconds
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind, Served, ServedKind
from windlass.targets.kubernetes.manifests.job_kinds import job_spec
from windlass.targets.kubernetes.manifests.labels import DOMAIN
from windlass.targets.kubernetes.manifests.pod import CONTAINERS
from windlass.targets.kubernetes.manifests.request import Manifest

STEP = "node"  # the replicated job that trains, by Trainer's own convention
ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
# How a TrainJob changes the pods of a runtime: from Trainer 2.2 on, in 2.1, in 2.0.
PATCHES, TEMPLATES, SPECS = "runtimePatches", "podTemplateOverrides", "podSpecOverrides"
POD_OF_PATCH = "trainingRuntimeSpec.template.spec.replicatedJobs.template.spec.template.spec"
# What a patch of somebody else's runtime may say of its pods.
PATCHABLE = (
    "volumes",
    "nodeSelector",
    "tolerations",
    "affinity",
    "serviceAccountName",
    "imagePullSecrets",
    "terminationGracePeriodSeconds",
)
GANG_SECONDS = 600
GANG_SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}  # as their charts name them


def train_job(run: Run, metadata: Manifest, template: Manifest, kind: ServedKind, served: Served) -> list[Manifest]:
    gang = gang_of(run, served)
    if gang:
        template = {**template, "spec": {"schedulerName": GANG_SCHEDULERS[gang], **template["spec"]}}
    if run.target.kubernetes.runtime:
        return [_on_named_runtime(run, metadata, template, kind)]
    runtime = {
        "apiVersion": kind.api_version,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": metadata["name"],
            "labels": {**metadata["labels"], "trainer.kubeflow.org/framework": "torch"},
            "annotations": dict(metadata["annotations"]),
        },
        "spec": {
            "mlPolicy": {"numNodes": run.resources.nodes, "torch": {}},
            **_gang(run, served),
            "template": {"spec": _job_set(run, template, served)},
        },
    }
    reference = {"apiGroup": kind.api_version.partition("/")[0], "kind": "TrainingRuntime", "name": metadata["name"]}
    trainer = {
        "numNodes": run.resources.nodes,
        "numProcPerNode": run.resources.processes_per_node or 1,
    }
    return [runtime, _train_job(kind, metadata, {"runtimeRef": reference, "trainer": trainer})]


def _train_job(kind: ServedKind, metadata: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}


def _job_set(run: Run, template: Manifest, served: Served) -> dict[str, Any]:
    options = run.target.kubernetes
    spec = job_spec(run, template, served, container=CONTAINERS[JobKind.TRAINJOB])
    if options.deadline:
        spec["activeDeadlineSeconds"] = seconds(options.deadline)  # holds in every version of Trainer
    job_set: dict[str, Any] = {
        "failurePolicy": {"maxRestarts": 0},  # the Job inside replaces its pods itself
        "network": {"publishNotReadyAddresses": True},
        "replicatedJobs": [
            {"name": STEP, "replicas": 1, "template": {"metadata": {"labels": ANCESTOR}, "spec": spec}},
        ],
    }
    if options.keep_for:
        job_set["ttlSecondsAfterFinished"] = seconds(options.keep_for)
    return job_set


def _gang(run: Run, served: Served) -> dict[str, Any]:
    match gang_of(run, served):
        case "volcano":
            return {"podGroupPolicy": {"volcano": {}}}
        case "coscheduling":
            return {"podGroupPolicy": {"coscheduling": {"scheduleTimeoutSeconds": GANG_SECONDS}}}
    return {}


def gang_of(run: Run, served: Served) -> str | None:
    """Who starts the pods of a TrainJob together. Trainer makes the group; that their scheduler reads it is for the
    pods to say. Coscheduling's has no fixed name, so it is not taken unasked."""
    options = run.target.kubernetes
    if options.gang == "none" or run.resources.nodes == 1 or options.queue or options.runtime:
        return None
    if options.gang == "volcano" or (options.gang == "auto" and served.volcano):
        return "volcano"
    if options.gang == "coscheduling" or (options.gang == "auto" and served.coscheduling and options.scheduler):
        return "coscheduling"
    return None


def _on_named_runtime(run: Run, metadata: Manifest, template: Manifest, kind: ServedKind) -> Manifest:
    """Somebody else's runtime: only what a TrainJob may change in it."""
    options = run.target.kubernetes
    given = {
        "keep_for": options.keep_for is not None,
        "max_pod_failures": options.max_pod_failures is not None,
        "gang": options.gang in ("coscheduling", "volcano"),
        "scheduler": options.scheduler is not None,
    }
    unheard = [f"target.kubernetes.{key}" for key, is_given in given.items() if is_given]
    if unheard:
        raise UserError(
            f"{', '.join(unheard)} cannot be changed in a named runtime",
            cause="it is for the runtime to say, and a TrainJob has no word in it",
            fix="leave it out, or leave target.kubernetes.runtime out: the run then brings a runtime of its own",
        )
    pod = template["spec"]
    name = CONTAINERS[JobKind.TRAINJOB]
    container = next(part for part in pod["containers"] if part["name"] == name)
    changes = {key: pod[key] for key in PATCHABLE if key in pod}
    changes["containers"] = [{"name": name, "volumeMounts": container["volumeMounts"]}]
    about = template["metadata"]
    spec = {
        "runtimeRef": {"name": run.target.kubernetes.runtime},
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "env": container["env"],
            "numNodes": run.resources.nodes,
            "numProcPerNode": run.resources.processes_per_node or 1,
            "resourcesPerNode": container["resources"],
        },
        **_deadline(run, kind),
    }
    way = next((field for field in (PATCHES, TEMPLATES, SPECS) if kind.has(f"spec.{field}")), PATCHES)
    if way != PATCHES or kind.has(f"spec.{PATCHES}.{POD_OF_PATCH}.terminationGracePeriodSeconds") is False:
        changes.pop("terminationGracePeriodSeconds", None)  # known to patches from Trainer 2.3 on
    target = {"targetJobs": [{"name": STEP}]}
    match way:
        case "podSpecOverrides":
            unknown = [key for key in changes if kind.has(f"spec.{SPECS}.{key}") is False]
            if unknown:
                raise UserError(
                    f"Kubeflow Trainer 2.0 cannot change {', '.join(unknown)} of the pods of a named runtime",
                    fix="leave target.kubernetes.runtime out: the run then brings a runtime of its own",
                )
            spec |= {"labels": about["labels"], "annotations": about["annotations"], SPECS: [{**target, **changes}]}
        case "podTemplateOverrides":
            spec[TEMPLATES] = [{**target, "metadata": about, "spec": changes}]
        case _:
            job = {"name": STEP, "template": {"spec": {"template": {"metadata": about, "spec": changes}}}}
            patch = {"template": {"spec": {"replicatedJobs": [job]}}}
            spec[PATCHES] = [{"manager": f"{DOMAIN}/run", "trainingRuntimeSpec": patch}]
    return _train_job(kind, metadata, spec)


def _deadline(run: Run, kind: ServedKind) -> dict[str, int]:
    deadline = run.target.kubernetes.deadline
    if not deadline:
        return {}
    if kind.has("spec.activeDeadlineSeconds") is False:
        raise UserError(
            "this version of Kubeflow Trainer knows no deadline of a TrainJob on a named runtime",
            fix="leave target.kubernetes.deadline or target.kubernetes.runtime out",
        )
    return {"activeDeadlineSeconds": seconds(deadline)}
