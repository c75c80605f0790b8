"""The checks of a cluster: one idea each, a snapshot and a run's needs in, results out. Pure."""

from collections.abc import Callable, Iterator, Sequence

from windlass.clusters.checks.capacity import free_devices, quotas
from windlass.clusters.checks.devices import driver, efa_plugin, gpu_plugin, rdma_plugin
from windlass.clusters.checks.namespace import api_server, permissions, pod_security, service_account
from windlass.clusters.checks.nodes import health, readiness, zones
from windlass.clusters.checks.operators import job_operators
from windlass.clusters.checks.queues import kueue, volcano
from windlass.clusters.checks.storage import claim, storage_classes
from windlass.clusters.needs import Needs
from windlass.clusters.result import Result, named
from windlass.clusters.snapshot import Snapshot

Check = Callable[[Snapshot, Needs], Iterator[Result]]
CHECKS: Sequence[tuple[str, Check]] = (
    ("api", api_server),
    ("permissions", permissions),
    ("operators", job_operators),
    ("nodes", readiness),
    ("health", health),
    ("zones", zones),
    ("gpu-plugin", gpu_plugin),
    ("efa-plugin", efa_plugin),
    ("rdma-plugin", rdma_plugin),
    ("driver", driver),
    ("capacity", free_devices),
    ("quota", quotas),
    ("queue", kueue),
    ("queue", volcano),
    ("namespace", pod_security),
    ("service-account", service_account),
    ("claim", claim),
    ("storage", storage_classes),
)


def run_checks(snapshot: Snapshot, needs: Needs) -> list[Result]:
    return [result for name, check in CHECKS for result in named(name, check(snapshot, needs))]
