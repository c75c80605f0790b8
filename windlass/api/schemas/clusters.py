"""What `windlass cluster` prints."""

from __future__ import annotations

from typing import Any, Literal

from windlass.api.schemas import Printed


class ListedCluster(Printed):
    kind: Literal["eks", "hyperpod", "context"]
    name: str
    region: str | None
    status: str
    """EKS's or HyperPod's word; of a context the address of its server."""
    version: str | None
    """Of Kubernetes; of a HyperPod cluster who runs it: EKS or Slurm."""
    instances: str | None
    context: str | None
    is_current: bool


class ListedClusters(Printed):
    """Clusters of the AWS account and contexts of the kubeconfig."""

    clusters: list[ListedCluster]
    warnings: list[str]
    """What AWS did not answer."""


class UsedCluster(Printed):
    """The context that is current now."""

    kubeconfig: str
    context: str


class ClusterResult(Printed):
    check: str
    status: Literal["pass", "warn", "fail", "skip"]
    summary: str
    evidence: str | None
    fix: str | None


class CheckedCluster(Printed):
    """Whether a cluster can take a run."""

    context: str
    namespace: str
    status: Literal["pass", "warn", "fail", "skip"]
    """The gravest of the results."""
    requests: int
    """How many questions the API was asked."""
    results: list[ClusterResult]


class FixOutcome(Printed):
    object: str
    result: str
    """`created`, `there already`, `deleted`, or why not."""


class FixedCluster(Printed):
    """What was made, and the check after it."""

    outcomes: list[FixOutcome]
    results: list[ClusterResult]


class CreatedCluster(Printed):
    """What is asked of eksctl or of SageMaker, and its price."""

    request: dict[str, Any]
    usd_per_hour: float | None
    """Null where a part has no published price."""
    parts: list[str]
    created: bool


class DeletedCluster(Printed):
    deleted: list[str]
