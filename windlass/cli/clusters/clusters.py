"""What commands ask of a run on Kubernetes: its pods, and the checkpoints they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from windlass.checkpoint import Checkpoint
    from windlass.targets.kubernetes.client import KubernetesTarget
    from windlass.targets.kubernetes.pod_scripts import PodScripts
    from windlass.targets.kubernetes.watch.pods import Pod
    from windlass.targets.protocol import JobRef, KeepsRunFolder


def find_on_cluster(name: str, place: str | None) -> tuple[KubernetesTarget, JobRef]:
    from windlass.api.lookup import find
    from windlass.errors import UserError
    from windlass.targets.protocol import RunsInPods

    target, job = find(name, place)
    if not isinstance(target, RunsInPods):
        raise UserError(
            f"{name} is on the target {job.target}, which has no pods",
            fix=f"windlass show {name}",
        )
    return cast("KubernetesTarget", target), job


def keeper_of_checkpoints(name: str, tier: str | None) -> tuple[KeepsRunFolder, JobRef] | None:
    """Who has the checkpoints of a run that was not trained on this machine's file systems, if that tier is asked."""
    from windlass.api.lookup import find
    from windlass.targets.protocol import KeepsRunFolder

    if tier not in (None, "cluster"):
        return None
    target, job = find(name)
    if isinstance(target, KeepsRunFolder):
        run = job.folder.load_run()
        # pods with disks of their own have no run folder to speak of; a store then has what is worth having
        elsewhere = tier is None and run.target.kubernetes.storage == "none" and run.checkpoint.store
        return None if elsewhere else (target, job)
    if tier is None:
        return None
    from windlass.errors import UserError

    raise UserError(f"{name} is on the target {job.target}, and not in a cluster", fix=f"windlass ckpt ls {name}")


def rows_in_cluster(name: str, tier: str | None) -> list[dict[str, Any]]:
    keeper = keeper_of_checkpoints(name, tier)
    return list(keeper[0].checkpoints(keeper[1])) if keeper else []


def fetch_from_cluster(name: str, step: int | None, tier: str | None, to: Path | None) -> Checkpoint | None:
    keeper = keeper_of_checkpoints(name, tier)
    return keeper[0].fetch_checkpoint(keeper[1], step, to or keeper[1].folder.checkpoints) if keeper else None


def pod_scripts_of(target: KubernetesTarget, job: JobRef) -> tuple[Sequence[Pod], list[PodScripts]]:
    """The running pods of a job, and a way to ask each of them something."""
    from windlass.targets.kubernetes.pod_scripts import PodScripts

    api, cluster_job, pods = target.running_pods(job)
    python = job.folder.load_run().target.kubernetes.python
    container = cluster_job.layout.container
    return pods, [PodScripts(api, cluster_job.namespace, pod.name, container, python) for pod in pods]
