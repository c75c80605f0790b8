"""The checks of a cluster: one idea each, a snapshot and a run's needs in, results out. Pure."""

from collections.abc import Callable, Iterator

from windlass.clusters.checks.access import api_server, permissions
from windlass.clusters.checks.capacity import free_devices, quotas
from windlass.clusters.checks.devices import driver, efa_plugin, gpu_plugin, rdma_plugin
from windlass.clusters.checks.namespace import pod_security, service_account
from windlass.clusters.checks.nodes import health, readiness, zones
from windlass.clusters.checks.operators import job_operators
from windlass.clusters.checks.queues import kueue, volcano
from windlass.clusters.checks.storage import claim, storage_classes
from windlass.clusters.needs import Needs
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Snapshot

Check = Callable[[Snapshot, Needs], Iterator[Result]]
CHECKS: tuple[Check, ...] = (
    api_server,
    permissions,
    job_operators,
    readiness,
    health,
    zones,
    gpu_plugin,
    efa_plugin,
    rdma_plugin,
    driver,
    free_devices,
    quotas,
    kueue,
    volcano,
    pod_security,
    service_account,
    claim,
    storage_classes,
)


def run_checks(snapshot: Snapshot, needs: Needs) -> list[Result]:
    return [result for check in CHECKS for result in check(snapshot, needs)]
