"""The checks that every run on a cluster gets before it is sent: those that its target does not make itself."""

from __future__ import annotations

from windlass.clusters.checks.devices import driver, efa_plugin, gpu_plugin, rdma_plugin
from windlass.clusters.checks.nodes import zones
from windlass.clusters.checks.operators import job_operators
from windlass.clusters.needs import needs_of
from windlass.clusters.snapshot import take
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.manifests.request import KubernetesRequest

LISTS = ("nodes", "daemonsets", "deployments")
NEVER_STARTS = (job_operators,)  # what fails here fails for certain
# some nodes may do; an image may bring CUDA's compatibility
STARTS_BADLY = (driver, gpu_plugin, efa_plugin, rdma_plugin, zones)


def preflight(run: Run, request: KubernetesRequest) -> list[str]:
    """Raise what would keep the run from ever starting; return what may."""
    options = run.target.kubernetes
    api = Api(access(options.context, options.namespace))
    try:
        snapshot = take(api, request.namespace, only=LISTS)
    finally:
        api.close()
    needs = needs_of(run, request)
    for check in NEVER_STARTS:
        for result in check(snapshot, needs):
            if result.status == "fail":
                raise UserError(result.summary, evidence=result.evidence, fix=result.fix)
    results = [result for check in STARTS_BADLY for result in check(snapshot, needs)]
    return [f"{result.summary}: {result.evidence}" for result in results if result.status == "fail"]
