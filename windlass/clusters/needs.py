"""What a run needs of a cluster. Without a run: what any training would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.clusters.snapshot import Access
from windlass.spec import Run
from windlass.targets.kubernetes.manifests.capacity import requests
from windlass.targets.kubernetes.manifests.cluster_facts import GROUPS, PLURALS, JobKind
from windlass.targets.kubernetes.manifests.request import KubernetesRequest, Manifest

GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
# What `windlass run` and the commands after it do with objects of the core group.
CORE_ACCESSES = (
    Access("create", "secrets", ""),
    Access("create", "configmaps", ""),
    Access("create", "services", ""),
    Access("get", "pods", ""),
    Access("list", "pods", ""),
    Access("watch", "pods", ""),
    Access("delete", "pods", ""),
    Access("get", "pods", "", "log"),
    Access("list", "events", ""),
)
OPTIONAL_ACCESSES = (
    Access("create", "pods", "", "exec"),  # windlass exec, top, ckpt fetch
    Access("list", "nodes", ""),  # how much is free, and why a pod waits
)


@dataclass(frozen=True)
class Needs:
    """The parts of a run that a cluster must be able to satisfy."""

    kind: JobKind | None = None  # None: any
    pod: Manifest | None = None  # one of the run's pods
    num_pods: int = 0
    num_spares: int = 0  # further pods that HyperPod keeps ready
    claim: str | None = None
    service_account: str | None = None
    queue: str | None = None
    image: str | None = None

    def asked(self, *prefixes: str) -> list[str]:
        """The resources of the run's pods that begin so."""
        return [key for key, amount in requests(self.pod or {}).items() if amount and key.startswith(prefixes)]

    def asks(self, resource: str) -> bool:
        return resource in self.asked(resource)

    def accesses(self, served: Sequence[JobKind]) -> list[Access]:
        """The verbs to ask about: those on the job's kind, then those every run needs."""
        kinds = [self.kind] if self.kind else list(served) or [JobKind.INDEXED]
        jobs = [Access(verb, PLURALS[kind], GROUPS[kind]) for kind in kinds for verb in ("create", "watch", "delete")]
        return [*jobs, *CORE_ACCESSES, *OPTIONAL_ACCESSES]


def needs_of(run: Run, request: KubernetesRequest) -> Needs:
    options = run.target.kubernetes
    storage, _, place = options.storage.partition(":")
    return Needs(
        kind=request.kind,
        pod=request.example_pod,
        num_pods=request.pods.num_pods,
        num_spares=options.spares,
        claim=place.partition("/")[0] if storage == "pvc" else None,
        service_account=options.service_account,
        queue=options.queue,
        image=options.image or run.image.name,
    )
