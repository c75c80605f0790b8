"""Checkpoints in a cluster: listed, and copied here file by file, each proven by its manifest.

They are read in a pod of the run, or in one that only holds the volume of run folders open.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest, damage
from windlass.checkpoint.manifest import MANIFEST_NAME
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

ATTEMPTS = 3
STREAM_SECONDS = 300.0  # of silence
LIFE_SECONDS = 3600  # of the reader pod: it ends by itself if nobody deletes it
START_SECONDS = 300.0
POLL_SECONDS = 0.5
CONTAINER = CONTAINERS[JobKind.INDEXED]


def list_in_cluster(scripts: PodScripts, run_name: str) -> list[dict[str, Any]]:
    rows = scripts.ask("checkpoints", f"{RUNS}/{run_name}/checkpoints")
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise UserError(
            "the answer of a pod about its checkpoints is not understood",
            evidence=str(rows)[:200],
            fix="target.kubernetes.image must be one that nobody else changes",
            exit_code=ExitCode.FAILED,
        )
    return [{"created": None, "world_size": None, "tokens": None, **row, "tier": "cluster"} for row in rows]


def _is_row(row: object) -> bool:
    """Pods are not trusted: what they say becomes names of folders here."""
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and row["step"] >= 0
        and isinstance(row.get("path"), str)
        and type(row.get("bytes")) is int
        and isinstance(row.get("complete"), bool)
    )


def fetch(scripts: PodScripts, run_name: str, step: int | None, to: Path) -> Checkpoint:
    """Bring one checkpoint here, beside one that may be there: what is here and whole is not brought again."""
    rows = list_in_cluster(scripts, run_name)
    complete = [row for row in rows if row["complete"]]
    chosen = [row for row in complete if step is None or row["step"] == step]
    if not chosen:
        steps = ", ".join(str(row["step"]) for row in complete)
        raise UserError(
            "no complete checkpoint" + (f" of step {step}" if step is not None else "") + f" of {run_name} is there",
            evidence=f"complete: {steps}" if steps else "nothing complete in the cluster",
            fix=f"windlass ckpt ls {run_name}",
        )
    row = chosen[-1]
    text = scripts.read("part", f"{row['path']}/{MANIFEST_NAME}", "0", "0").decode()
    try:
        manifest = Manifest.parse(text, step=row["step"])
    except ValueError as error:
        raise UserError(f"the manifest of step {row['step']} is damaged in the cluster", evidence=str(error)) from None
    folder = CheckpointFolder(to)
    incoming = folder.incoming(row["step"])
    incoming.prepare(manifest)
    for attempt in range(ATTEMPTS + 1):
        here = folder.at(row["step"])
        wrong = [name for name, part in sorted(manifest.files.items()) if not incoming.holds(name, part, former=here)]
        if not wrong:
            incoming.publish(manifest)
            return folder.take(incoming)
        if attempt < ATTEMPTS:
            _bring(scripts, row["path"], wrong, incoming.path)
    raise UserError(
        f"the checkpoint of step {row['step']} does not come here whole",
        evidence=f"{wrong[0]}: {damage(incoming.path / wrong[0], manifest.files[wrong[0]])}",
        cause="it is damaged where it is, or the connection breaks",
        fix=f"windlass ckpt get {run_name} --step {row['step']}    tries again, from where it was",
        exit_code=ExitCode.FAILED,
    )


def _bring(scripts: PodScripts, origin: str, names: list[str], to: Path) -> None:
    """Unpack a tar stream as it comes; where it breaks off, the whole files are kept."""
    to.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with open(reader, "rb") as received:
        unpacker = threading.Thread(target=_unpack, args=(received, to, set(names)), daemon=True)
        unpacker.start()
        try:
            # what is missing afterwards is asked for again, and said if it stays so
            with open(writer, "wb") as sent, contextlib.suppress(UserError):
                scripts.stream("tar", origin, json.dumps(names), to=sent.write, timeout=STREAM_SECONDS)
        finally:
            unpacker.join()


def _unpack(received: BinaryIO, to: Path, names: set[str]) -> None:
    try:
        with tarfile.open(fileobj=received, mode="r|") as archive:
            for entry in archive:
                if entry.name in names and entry.isfile():
                    target = to / entry.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(entry)
                    if content is not None:
                        with target.open("wb") as file:
                            shutil.copyfileobj(content, file)
    except (tarfile.TarError, OSError):
        pass
    finally:
        while received.read(1 << 20):  # let the writer go on although nothing is unpacked any more
            pass


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
    options = run.target.kubernetes
    volume, mount = runs_volume(run)
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": CONTAINER,
                "image": image_of(run),
                "command": [options.python, "-c", f"import time; time.sleep({LIFE_SECONDS})"],
                "volumeMounts": [{**mount, "mountPath": RUNS, "readOnly": read_only}],
            }
        ],
        "volumes": [volume],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIFE_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [dict(toleration) for toleration in options.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets],
    }
    labels = {**MANAGED_BY, "windlass.dev/reader": safe_name(run.name)}  # not the run's own label: it is no rank
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    merged = merge_pod(spec, _without_resources(options.pod), container=CONTAINER)
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
        states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
        if any(state.get("running") for state in states):
            return
        waiting = [state.get("waiting") or {} for state in states]
        problems = [f"{wait['reason']}: {wait.get('message')}" for wait in waiting if wait.get("reason") in HELD_BACK]
        if problems or status.get("phase") == "Failed" or time.monotonic() > deadline:
            conditions = [text for part in status.get("conditions") or () if (text := part.get("message"))]
            raise UserError(
                f"the pod {name}, which was to read the checkpoints, does not start",
                evidence=problems[0] if problems else "; ".join(conditions) or status.get("phase"),
                fix=f"kubectl -n {api.access.namespace} describe pod {name}",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(POLL_SECONDS)
