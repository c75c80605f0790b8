"""What the functions of the seeds return."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from windlass.api.schemas.clusters import CheckedCluster, CreatedCluster, FixedCluster, ListedClusters
from windlass.api.schemas.data import ListedCheckpoint
from windlass.api.schemas.runs import LogLine, ShownRun, Use, WhyResult


class Result(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Deployment(Result):
    """A job that was submitted."""

    run_file: str
    """Written by this call; `windlass run` takes it too."""
    context: str
    """Of the kubeconfig."""
    run: ShownRun
    """Where it stood at last."""
    warnings: list[str]


class ManagedCluster(Result):
    """A cluster, or without a name all clusters, and what was found and done."""

    clusters: ListedClusters | None = None
    context: str | None = None
    created: CreatedCluster | None = None
    check: CheckedCluster | None = None
    fix: FixedCluster | None = None


class PyTorchJob(Result):
    name: str
    namespace: str
    state: str
    """The newest condition that is true: Created, Running, Restarting, Succeeded, Failed; or unknown."""
    workers: int


class PyTorchJobs(Result):
    """What an action on PyTorchJobs came to."""

    action: str
    served: bool
    """Whether the cluster knows PyTorchJobs at all."""
    jobs: list[PyTorchJob] = []
    logs: list[str] = []


class TrainingHealth(Result):
    """What `monitor_training` was asked for; what was not asked for is null."""

    run: ShownRun
    seconds_since_step: float | None = None
    stalled: bool | None = None
    why: WhyResult | None = None
    """Of a run that failed, stalls or waits."""
    use: Use | None = None
    logs: list[LogLine] | None = None
    transport: Literal["efa", "tcp"] | None = None
    """What NCCL said that it uses; null where it said nothing."""
    checkpoints: list[ListedCheckpoint] | None = None
