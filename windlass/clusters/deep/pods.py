"""The job of a deep check: a run's own pods with another command. Made, followed to its end, read, deleted."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.clusters.deep import inside
from windlass.clusters.needs import Needs
from windlass.clusters.snapshot import condition_of
from windlass.common.files import parse_record
from windlass.errors import UserError
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import object_path, plural_of
from windlass.targets.kubernetes.manifests.pod import RUNS_VOLUME
from windlass.targets.kubernetes.manifests.render import QUEUE_LABEL
from windlass.targets.kubernetes.pod.interface import POD_VARIABLES, RUNS

LABEL = "windlass.dev/deep-check"
DEADLINE_SECONDS = 600  # without any pod that starts or ends
LONGEST_SECONDS = 1800  # with progress: a node is made, an image pulled
ASK_SECONDS = 2.0
PROGRESSING = ("ContainerCreating", "PodInitializing")  # also while an image is pulled
KEPT_VOLUMES = ("emptyDir", "persistentVolumeClaim", "hostPath", "ephemeral", "csi")


@dataclass(frozen=True)
class PodReport:
    """What one pod printed, or why it could not."""

    pod: str
    node: str
    index: int
    lines: Sequence[Mapping[str, Any]]
    phase: str
    reason: str = ""


def objects(needs: Needs, namespace: str, name: str) -> list[Object]:
    """A headless service for the pods' names, and an indexed Job of as many pods as the run has."""
    if needs.pod is None:
        raise UserError(
            "a deep check needs a run file: its pods say what to try", fix="windlass cluster check my.yaml --deep"
        )
    labels = {LABEL: name}
    queue = {QUEUE_LABEL: needs.queue} if needs.queue else {}  # or Kueue may keep the job suspended for ever
    metadata = {"name": name, "namespace": namespace, "labels": labels | queue}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": needs.num_pods,
            "parallelism": needs.num_pods,
            "backoffLimit": 0,
            "activeDeadlineSeconds": LONGEST_SECONDS,
            "ttlSecondsAfterFinished": DEADLINE_SECONDS,
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(needs, name)},
        },
    }
    return [service, job]


def run(api: Api, needs: Needs, namespace: str) -> list[PodReport]:
    """Make the job, wait until every pod has ended or the deadline, and take everything away again."""
    name = f"windlass-deep-{secrets.token_hex(3)}"
    made: list[str] = []
    try:
        for value in objects(needs, namespace, name):
            path = object_path(value["apiVersion"], plural_of(value["kind"]), namespace)
            api.create(path, value)
            made.append(f"{path}/{name}")
        return _wait(api, needs, namespace, name)
    finally:
        for path in reversed(made):
            api.delete(path)


def _pod_spec(needs: Needs, name: str) -> Object:
    spec = dict((needs.pod or {})["spec"])
    volumes = [volume for volume in spec.get("volumes") or () if any(kind in volume for kind in KEPT_VOLUMES)]
    kept = {volume["name"] for volume in volumes}
    trained, *beside = spec["containers"]
    source = Path(inside.__file__).read_text(encoding="utf-8")
    variables = {
        "WINDLASS_DEEP_SOURCE": source,
        "WINDLASS_DEEP_PODS": str(needs.num_pods),
        "WINDLASS_DEEP_HOSTS": f"{name}-{{}}.{name}",
        **({"WINDLASS_DEEP_FOLDER": RUNS} if needs.claim and RUNS_VOLUME in kept else {}),
    }
    own = [
        entry
        for entry in trained.get("env") or ()
        # secrets that go with a submission are not there without one
        if not entry["name"].startswith("WINDLASS_") and "secretKeyRef" not in (entry.get("valueFrom") or {})
    ]
    fields = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in POD_VARIABLES.items()]
    python = next((part for part in trained.get("command") or () if "python" in part), "python3")
    container = {
        **{key: value for key, value in trained.items() if key not in ("ports", "args", "livenessProbe")},
        "command": [python, "-c", "import os; exec(compile(os.environ['WINDLASS_DEEP_SOURCE'], 'deep', 'exec'))"],
        "env": [*own, *fields, *({"name": key, "value": value} for key, value in variables.items())],
        "volumeMounts": [mount for mount in trained.get("volumeMounts") or () if mount["name"] in kept],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {LABEL: name}},
    }
    return {
        "topologySpreadConstraints": [spread],  # small pods too try as many nodes as they can
        **{key: value for key, value in spec.items() if key not in ("initContainers", "containers", "volumes")},
        "containers": [container, *beside],
        "volumes": volumes,
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
    }


def _wait(api: Api, needs: Needs, namespace: str, name: str) -> list[PodReport]:
    begin = changed = time.monotonic()
    container, states = str((needs.pod or {})["spec"]["containers"][0]["name"]), Counter[str]()
    while True:
        pods = list(api.items(object_path("v1", "pods", namespace), labelSelector=f"{LABEL}={name}"))
        ended = [pod for pod in pods if _has_ended(pod, container)]
        now, before = time.monotonic(), states
        states = Counter(_state(pod) for pod in pods)
        if states != before or any(states[reason] for reason in PROGRESSING):
            changed = now
        if len(ended) >= needs.num_pods or now > min(changed + DEADLINE_SECONDS, begin + LONGEST_SECONDS):
            return [_report_of(api, namespace, pod, container) for pod in pods]
        time.sleep(ASK_SECONDS)


def _state(pod: Object) -> str:
    """The phase of a pod, or why its container waits."""
    status = pod.get("status") or {}
    states = [entry.get("state") or {} for entry in status.get("containerStatuses") or ()]
    waiting = [str(state["waiting"].get("reason")) for state in states if "waiting" in state]
    return next(iter(waiting), str(status.get("phase")))


def _has_ended(pod: Object, container: str) -> bool:
    """A sidecar that a mesh injects may run on after the container that counts."""
    status = pod.get("status") or {}
    states = [entry.get("state") or {} for entry in status.get("containerStatuses") or () if entry["name"] == container]
    return status.get("phase") in ("Succeeded", "Failed") or any("terminated" in state for state in states)


def _report_of(api: Api, namespace: str, pod: Object, container: str) -> PodReport:
    status = pod.get("status") or {}
    states = [
        state
        for entry in status.get("containerStatuses") or ()
        for kind, state in (entry.get("state") or {}).items()
        if kind == "waiting" or (kind == "terminated" and state.get("exitCode"))
    ]
    scheduled = condition_of(pod, "PodScheduled")
    unscheduled = [str(scheduled.get("message"))] if scheduled.get("status") == "False" else []
    return PodReport(
        pod=pod["metadata"]["name"],
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        index=int((pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-completion-index", "-1")),
        lines=list(_lines(api, namespace, pod["metadata"]["name"], container)),
        phase=str(status.get("phase") or ""),
        reason="; ".join([*unscheduled, *(str(state.get("message") or state.get("reason")) for state in states)]),
    )


def _lines(api: Api, namespace: str, pod: str, container: str) -> Iterator[Mapping[str, Any]]:
    try:
        for line in api.lines(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", {"container": container}):
            if line.startswith(inside.MARK.encode()):
                record = parse_record(line[len(inside.MARK) :])
                if record is not None:
                    yield record
    except UserError:  # not started, or its node is gone: what the pod's status says is the evidence
        return
