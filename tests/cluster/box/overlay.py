"""What makes any pod of the box a trainer: image, interpreter, environment and repository, as a pod overlay.

The host's folders are mounted read-only at their own paths, so that the environment's absolute paths hold inside too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.cluster.box.layout import CLAIM, TRAINER_IMAGE

REPOSITORY = Path(__file__).parents[3]
RUNS = "/runs"


def mounted_folders() -> list[Path]:
    """The host's folders that Python, torch and windlass come from; none inside another."""
    wanted = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), REPOSITORY}
    resolved = {path.resolve() for path in wanted} | {Path(sys.prefix)}
    return sorted(path for path in resolved if not any(other in path.parents for other in resolved))


def box_overlay(container: str = "trainer", claim: str | None = CLAIM) -> dict[str, Any]:
    """To be merged into a pod's spec: lists of named things by name, so `container` says which one trains."""
    folders = {f"host-{number}": str(path) for number, path in enumerate(mounted_folders())}
    volumes: list[dict[str, Any]] = [
        {"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in folders.items()
    ]
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": path, "readOnly": True} for name, path in folders.items()
    ]
    # libraries outside the default folders are found by this list
    volumes.append({"name": "loader", "hostPath": {"path": "/etc/ld.so.cache", "type": "File"}})
    mounts.append({"name": "loader", "mountPath": "/etc/ld.so.cache", "readOnly": True})
    if claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "runs", "mountPath": RUNS})
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    trainer = {
        "name": container,
        "image": TRAINER_IMAGE.removeprefix("docker.io/"),
        "imagePullPolicy": "IfNotPresent",
        "volumeMounts": mounts,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
    }
    return {"containers": [trainer], "volumes": volumes}


def python() -> str:
    """The interpreter, as pods see it."""
    return os.path.join(sys.prefix, "bin", "python")
