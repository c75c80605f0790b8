"""Volumes of a pod: run folders, shared memory, the run file, carried code, scratch. Pure."""

from __future__ import annotations

from typing import Any

from windlass.spec import Run
from windlass.targets.kubernetes.manifests.environment import CARRIED, RUN_FILE, RUNS, SCRATCH
from windlass.targets.kubernetes.manifests.resources import NodeShape

Volume = dict[str, Any]
RUNS_VOLUME = "windlass-runs"


def is_shared(run: Run) -> bool:
    """Whether all pods of the run see one run folder."""
    return run.target.kubernetes.storage != "none"


def run_folders(run: Run) -> tuple[Volume, Volume]:
    """The volume with the run folders, and its mount."""
    kind, _, place = run.target.kubernetes.storage.partition(":")
    mount = {"name": RUNS_VOLUME, "mountPath": RUNS}
    match kind:
        case "pvc":
            claim, _, folder = place.partition("/")
            if folder:
                mount["subPath"] = folder
            return {"name": RUNS_VOLUME, "persistentVolumeClaim": {"claimName": claim}}, mount
        case "hostpath":
            return {"name": RUNS_VOLUME, "hostPath": {"path": place, "type": "Directory"}}, mount
    return {"name": RUNS_VOLUME, "emptyDir": {}}, mount


def shared_memory(run: Run, shape: NodeShape) -> tuple[Volume, Volume]:
    """What torch's loaders and NCCL exchange within a node; a container's own 64 MB are not enough."""
    size = run.target.kubernetes.shm or (f"{max(1, int(shape.memory_gib * 512))}Mi" if shape.memory_gib else None)
    limit = {"sizeLimit": size} if size else {}
    return {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}, {"name": "shm", "mountPath": "/dev/shm"}


def run_file(config_map: str) -> tuple[Volume, Volume]:
    folder = RUN_FILE.rpartition("/")[0]
    volume = {"name": "windlass-run", "configMap": {"name": config_map}}
    return volume, {"name": "windlass-run", "mountPath": folder, "readOnly": True}


def carried(config_maps: list[str]) -> tuple[Volume, Volume]:
    """The parts of the carried archives in one folder, mounted whole: changes of the ConfigMaps come through."""
    sources = [{"configMap": {"name": name}} for name in config_maps]
    volume = {"name": "windlass-carried", "projected": {"sources": sources}}
    return volume, {"name": "windlass-carried", "mountPath": CARRIED, "readOnly": True}


def scratch() -> tuple[Volume, Volume]:
    return {"name": "windlass-scratch", "emptyDir": {}}, {"name": "windlass-scratch", "mountPath": SCRATCH}
