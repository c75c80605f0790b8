"""A pod that only holds the run folders' volume open, for as long as somebody reads from it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

from windlass.errors import ExitCode, UserError
from windlass.spec import Run
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.jobfile import object_path
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.labels import MANAGED_BY, safe_name
from windlass.targets.kubernetes.manifests.pod import CONTAINERS, image_of, is_shared, merge_pod, runs_volume
from windlass.targets.kubernetes.pod.interface import RUNS
from windlass.targets.kubernetes.pod_scripts import PodScripts
from windlass.targets.kubernetes.watch.pods import HELD_BACK

LIFE_SECONDS = 3600  # the pod ends by itself if nobody deletes it
START_SECONDS = 300.0
POLL_SECONDS = 0.5
CONTAINER = CONTAINERS[JobKind.INDEXED]


@contextlib.contextmanager
def reader_pod(api: Api, run: Run, *, read_only: bool = True) -> Iterator[PodScripts]:
    """A running pod with the volume; it is deleted afterwards."""
    if not is_shared(run):
        raise UserError(
            f"the checkpoints of {run.name} were on its pods' own disks, and are gone with them",
            cause="target.kubernetes.storage is none",
            fix="target.kubernetes.storage=pvc:CLAIM    for the next run",
        )
    namespace = api.access.namespace
    name = f"{safe_name(run.name)}-reader-{secrets.token_hex(3)}"
    manifest = reader_manifest(run, namespace, name, read_only=read_only)
    path = object_path("v1", "pods", namespace)
    api.create(path, manifest)
    try:
        _wait_until_running(api, f"{path}/{name}", name)
        yield PodScripts(api, namespace, name, CONTAINER, run.target.kubernetes.python)
    finally:
        with contextlib.suppress(UserError):  # it ends by itself; what was read counts
            api.delete(f"{path}/{name}", grace=0)


def reader_manifest(run: Run, namespace: str, name: str, *, read_only: bool) -> dict[str, Any]:
    """The run's own image and volume with a program that waits; it asks for no GPU and carries no secret."""
    asked = run.target.kubernetes
    volume, mount = runs_volume(run)
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": CONTAINER,
                "image": image_of(run),
                "command": [asked.python, "-c", f"import time; time.sleep({LIFE_SECONDS})"],
                "volumeMounts": [{**mount, "mountPath": RUNS, "readOnly": read_only}],
            }
        ],
        "volumes": [volume],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [dict(toleration) for toleration in asked.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in asked.image_pull_secrets],
    }
    labels = {**MANAGED_BY, "windlass.dev/reader": safe_name(run.name)}  # not the run's own label: it is no rank
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    merged = merge_pod(spec, _without_resources(asked.pod), container=CONTAINER)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": merged}


def _without_resources(overlay: dict[str, Any]) -> dict[str, Any]:
    """The user's overlay, less what is for training alone."""
    containers = [
        {key: container[key] for key in container if key != "resources"} for container in overlay.get("containers", ())
    ]
    kept = {key: value for key, value in overlay.items() if key not in ("affinity", "containers")}
    return {**kept, "containers": containers} if containers else kept


def _wait_until_running(api: Api, path: str, name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        status = api.get(path).get("status") or {}
        waiting = [
            (container.get("state") or {}).get("waiting") or {} for container in status.get("containerStatuses") or ()
        ]
        said = next((state for state in waiting if state.get("reason") in HELD_BACK), None)
        if any((container.get("state") or {}).get("running") for container in status.get("containerStatuses") or ()):
            return
        if said or status.get("phase") == "Failed" or time.monotonic() > deadline:
            conditions = [
                condition.get("message") for condition in status.get("conditions") or () if condition.get("message")
            ]
            evidence = (
                f"{said['reason']}: {said.get('message')}" if said else "; ".join(conditions) or status.get("phase")
            )
            raise UserError(
                f"the pod {name}, which was to read the checkpoints, does not start",
                evidence=evidence,
                fix=f"kubectl -n {api.access.namespace} describe pod {name}",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)
