"""Ask a cluster and check it: whole, or by what every run gets before it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.clusters import aws_facts
from windlass.clusters.checks import run_checks
from windlass.clusters.checks.aws import check_aws, instance_of
from windlass.clusters.checks.devices import driver, efa_plugin, gpu_plugin, rdma_plugin
from windlass.clusters.checks.nodes import zones
from windlass.clusters.checks.operators import job_operators
from windlass.clusters.needs import Needs, needs_of
from windlass.clusters.outside import check_outside
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Snapshot, take
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import Run, load_run
from windlass.targets.kubernetes.api.discovery import served
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access
from windlass.targets.kubernetes.client import KubernetesTarget
from windlass.targets.kubernetes.manifests.request import KubernetesRequest

LISTS = ("nodes", "daemonsets", "deployments")
NEVER_STARTS = (job_operators,)  # what fails here fails for certain
# some nodes may do; an image may bring CUDA's compatibility
STARTS_BADLY = (driver, gpu_plugin, efa_plugin, rdma_plugin, zones)


def preflight(run: Run, request: KubernetesRequest) -> list[str]:
    """What its target does not check itself: raise what would keep the run from ever starting; return what may."""
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


@dataclass(frozen=True)
class Checked:
    """A cluster that was looked at."""

    api: Api
    needs: Needs
    snapshot: Snapshot
    results: list[Result]


def look(run_file: str | None, overrides: Sequence[str], context: str | None, namespace: str | None) -> Checked:
    """Ask a cluster, and AWS where it is an EKS cluster, and run the checks."""
    where, needs, problems = KubernetesTarget(), Needs(), list[Result]()
    run: Run | None = None
    if run_file:
        chosen = [("context", context), ("namespace", namespace)]
        changes = [f"target.kubernetes.{key}={value}" for key, value in chosen if value]
        run = load_run(run_file, [*overrides, "target.kind=kubernetes", *changes])
        context, namespace = run.target.kubernetes.context, run.target.kubernetes.namespace
    api = where.connect(context, namespace)
    with api.remembering():
        if run:
            needs, problems, run = _needs(where, run)
        jobs = served(api, schemas=False).kinds
        kinds = {kind: job.api_version.rpartition("/")[2] for kind, job in jobs.items()}
        snapshot = take(api, api.access.namespace, needs.accesses(list(kinds)), kinds=kinds)
    problems += run_checks(snapshot, needs)
    if run and needs.pod:
        problems += check_outside(api, snapshot, run)
    region = aws_facts.region_of(api.access.server)
    if region:
        problems += _check_aws(api, region, snapshot, needs)
    return Checked(api, needs, snapshot, problems)


def _check_aws(api: Api, region: str, snapshot: Snapshot, needs: Needs) -> list[Result]:
    try:
        facts = aws_facts.ask(api.access.server, region, snapshot.namespace, instance_of(needs))
    except UserError as error:
        why = f"{error.what}: {error.evidence}"
        return [Result("aws", "skip", "AWS was not asked about the cluster", why, error.fix)]
    if facts is None:
        why = f"no EKS cluster in {region} has its address"
        return [Result("aws", "skip", "the cluster is of another AWS account", why)]
    return check_aws(facts, snapshot, needs)


def _needs(where: KubernetesTarget, run: Run) -> tuple[Needs, list[Result], Run]:
    """What a run asks of the cluster, and the run as it would be sent. One that cannot even be rendered is a failed
    check of its own."""
    try:
        settled = resolve(where.settle(run))
        request = where.render(settled, where.gather(settled))
    except UserError as error:
        problem = Result("run", "fail", error.what, error.evidence or error.cause, error.fix)
        options = run.target.kubernetes
        return Needs(queue=options.queue, service_account=options.service_account), [problem], run
    return needs_of(settled, request), [], settled
