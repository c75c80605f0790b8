"""What a cluster has: the job kinds it serves and the nodes it has. Filled by discovery; rendering only reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobKind(StrEnum):
    """The kinds of object a run can become, the preferred one first. The values are those of target.kubernetes.job."""

    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"
    HYPERPOD = "hyperpod"
    INDEXED = "job"


GROUPS: Mapping[JobKind, str] = {
    JobKind.TRAINJOB: "trainer.kubeflow.org",
    JobKind.PYTORCHJOB: "kubeflow.org",
    JobKind.HYPERPOD: "sagemaker.amazonaws.com",
    JobKind.INDEXED: "batch",
}
PLURALS: Mapping[JobKind, str] = {
    JobKind.TRAINJOB: "trainjobs",
    JobKind.PYTORCHJOB: "pytorchjobs",
    JobKind.HYPERPOD: "hyperpodpytorchjobs",
    JobKind.INDEXED: "jobs",
}


@dataclass(frozen=True)
class ServedKind:
    """One job kind as the cluster serves it."""

    api_version: str  # "kubeflow.org/v1"
    kind: str  # as the cluster spells it: HyperPodPyTorchJob or HyperPodPytorchJob
    plural: str
    schema: Mapping[str, Any] | None = None  # the served version's OpenAPI v3 schema; None where it may not be read

    def has(self, path: str) -> bool | None:
        """Whether the schema knows a dotted path, `spec.runtimePatches` say; None where there is no schema."""
        if self.schema is None:
            return None
        here: Any = self.schema
        for part in path.split("."):
            here = here.get("items", here) if here.get("type") == "array" else here
            here = (here.get("properties") or {}).get(part)
            if here is None:
                return False
        return True


ALWAYS = ServedKind("batch/v1", "Job", PLURALS[JobKind.INDEXED])  # whatever the cluster


@dataclass(frozen=True)
class Served:
    """Which kinds are there. `batch/v1` always is."""

    kinds: Mapping[JobKind, ServedKind]
    volcano: bool = False  # scheduling.volcano.sh PodGroup
    coscheduling: bool = False  # scheduling.x-k8s.io PodGroup
    kubernetes: tuple[int, int] = (1, 33)  # major, minor of the API server


@dataclass(frozen=True)
class NodeFacts:
    """One node that pods can be scheduled to."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)  # quantities as the API gives them
    taints: Sequence[Mapping[str, Any]] = ()
    ready: bool = True
    schedulable: bool = True  # not cordoned

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeFacts:
        metadata, spec, status = (node.get(part) or {} for part in ("metadata", "spec", "status"))
        conditions = {condition.get("type"): condition.get("status") for condition in status.get("conditions") or ()}
        return cls(
            name=metadata.get("name", ""),
            labels=metadata.get("labels") or {},
            allocatable=status.get("allocatable") or {},
            taints=spec.get("taints") or (),
            ready=conditions.get("Ready") == "True",
            schedulable=not spec.get("unschedulable"),
        )


@dataclass(frozen=True)
class ClusterFacts:
    """Everything rendering needs to know of a cluster."""

    served: Served
    namespace: str
    nodes: Sequence[NodeFacts] = ()  # empty: they may not be listed
    context: str | None = None
    pod_security: str | None = None  # the level that the namespace enforces; None: none, or it may not be read
