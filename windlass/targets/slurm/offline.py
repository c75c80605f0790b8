"""Render for Slurm without a scheduler: the run file is all there is."""

from __future__ import annotations

from windlass.catalog.instances import instance
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.protocol import with_ranks
from windlass.targets.slurm import queue
from windlass.targets.slurm.client import SlurmTarget
from windlass.targets.slurm.render import SlurmRequest


class OfflineSlurm(SlurmTarget):
    """Any cluster that has what the run file asks for."""

    def settle(self, run: Run) -> Run:
        asked = run.resources
        num_gpus, threads = asked.gpus_per_node, asked.threads_per_process
        kind = instance(asked.instance) if asked.instance else None
        if num_gpus is None and run.target.slurm.gres:
            num_gpus = queue.parse_gpus(run.target.slurm.gres)
        if num_gpus is None:
            num_gpus = kind.gpus if kind else None
        if num_gpus is None:
            raise UserError(
                "how many GPUs a node has is not known: no scheduler was asked, and the run file does not say",
                fix="resources.gpus_per_node=8    or 0 for CPUs, or resources.instance=TYPE",
            )
        if threads is None:
            threads = max(1, kind.vcpus // (num_gpus or asked.processes_per_node or 1)) if kind else 1
        return with_ranks(run, num_gpus, threads)

    def check_run(self, run: Run) -> None:
        """Nothing: limits and paths may still be completed where the script is submitted."""

    def check(self, run: Run, request: SlurmRequest, *, bytes_needed: int | None) -> list[str]:
        unknown = ["partitions, limits, free nodes and disk were not checked: no scheduler was asked"]
        if not run.resources.instance:
            unknown.append("CPU threads of a rank are as resources.threads_per_process says, 1 where it does not")
        return unknown
