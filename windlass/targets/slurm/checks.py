"""What Slurm would refuse, or never start, said before anything is created."""

from __future__ import annotations

import difflib

from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.targets.launch.machine import folder_can_be_made, space_is_there
from windlass.targets.slurm.queue import Partition
from windlass.targets.slurm.render import signal_lead, time_seconds


def check(run: Run, folder: RunFolder, partitions: dict[str, Partition], *, bytes_needed: int | None) -> list[str]:
    """Raise the first thing that cannot work; return what will work, but badly."""
    partition = partition_of(run, partitions)
    folder_can_be_made(folder.path)
    space_is_there(folder.path, bytes_needed)
    if not partition.is_up:
        return [f"the partition {partition.name} is down: the job waits until it is up"]
    if run.resources.nodes > partition.nodes:
        have = f"the partition {partition.name} has {partition.nodes} node{'s' if partition.nodes != 1 else ''}"
        return [f"resources.nodes is {run.resources.nodes} but {have}"]
    return []


def partition_of(run: Run, partitions: dict[str, Partition]) -> Partition:
    named = run.target.slurm.partition
    known = f"partitions: {', '.join(partitions)}" if partitions else "sinfo lists no partition"
    if named is None:
        default = next((partition for partition in partitions.values() if partition.is_default), None)
        if default is None:
            raise UserError(
                "the cluster has no default partition",
                evidence=known,
                fix=f"target.slurm.partition={next(iter(partitions), '…')}",
            )
        return default
    names = [name.strip() for name in named.split(",")]  # Slurm takes several and starts where it can first
    for name in names:
        if name not in partitions:
            near = difflib.get_close_matches(name, partitions, 1)
            raise UserError(
                f"the cluster has no partition {name!r}",
                evidence=known,
                fix=f"target.slurm.partition={near[0] if near else next(iter(partitions), '…')}",
            )
    return max((partitions[name] for name in names), key=lambda partition: partition.nodes)


def limit_leaves_time(run: Run) -> None:
    text = run.target.slurm.time
    limit = time_seconds(text) if text else None
    if limit is not None and limit <= signal_lead(run):
        raise UserError(
            f"target.slurm.time {text} leaves no time to train",
            cause=f"the ranks are told to save {signal_lead(run)} s before the limit: "
            f"checkpoint.grace_seconds is {run.checkpoint.grace_seconds}",
            fix="target.slurm.time=4h    or a smaller checkpoint.grace_seconds",
        )


def has_an_environment(run: Run) -> None:
    slurm = run.target.slurm
    host = run.target.host
    if host and not slurm.environment and not slurm.container:
        raise UserError(
            f"it is not said where windlass is installed on {host}'s cluster",
            fix="target.slurm.environment=/path/of/a/virtual/environment    or target.slurm.container=IMAGE",
        )
