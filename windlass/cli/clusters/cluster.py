"""`windlass cluster`: which clusters there are, and whether one can take a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from windlass.clusters.needs import Needs
    from windlass.clusters.result import Result
    from windlass.targets.kubernetes.api.http import Api

region_option = click.option("--region", metavar="REGION", help="AWS region. Default: that of your AWS configuration.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group(short_help="Clusters: list, use, check.")
def cluster() -> None:
    """Clusters: list, use, check."""


@cluster.command(short_help="List the clusters of your AWS account and of your kubeconfig.")
@region_option
@click.option("--no-aws", is_flag=True, help="Ask AWS nothing: contexts of the kubeconfig alone.")
@json_option
def ls(region: str | None, no_aws: bool, as_json: bool) -> None:
    """List EKS and HyperPod clusters, and the contexts of your kubeconfig.

    What AWS refuses is a warning: the rest is listed.
    """
    from windlass.cli.output import print_json, print_table, warn
    from windlass.clusters import kubeconfig, listing
    from windlass.errors import UserError

    rows = list(kubeconfig.contexts())
    warnings = []
    for clusters in () if no_aws else (listing.eks_clusters, listing.hyperpod_clusters):
        try:
            rows += clusters(region)
        except UserError as error:
            warnings.append(f"{error.what}: {error.evidence}" if error.evidence else error.what)
    if as_json:
        print_json({"clusters": [row.as_dict() for row in rows], "warnings": warnings})
        return
    print_table(
        ["KIND", "NAME", "REGION", "STATUS", "VERSION", "INSTANCES"],
        [
            [
                row.kind,
                ("* " if row.is_current else "") + row.name,
                row.region or "–",
                row.status,
                row.version or "–",
                row.instances or "–",
            ]
            for row in rows
        ],
    )
    for text in warnings:
        warn(text)


@cluster.command(short_help="Make an EKS or HyperPod cluster the current context.")
@click.argument("name")
@region_option
@click.option("--alias", metavar="CONTEXT", help="Name of the context. Default: the cluster's ARN.")
@click.option("-n", "--namespace", metavar="NAMESPACE", help="Namespace of the context.")
@json_option
def use(name: str, region: str | None, alias: str | None, namespace: str | None, as_json: bool) -> None:
    """Write a kubeconfig entry for an EKS cluster, or for the one below a HyperPod cluster, and make it current.

    Other entries stay as they are. Neither kubectl nor the aws command is needed: windlass signs in itself.
    """
    from windlass.cli.output import print_json
    from windlass.clusters import kubeconfig, listing

    path, context = kubeconfig.use(listing.find_eks(name, region), alias=alias, namespace=namespace)
    if as_json:
        print_json({"kubeconfig": str(path), "context": context})
    else:
        click.echo(f"{path}: the current context is {context}\n  windlass cluster check")


@cluster.command(hidden=True)
@click.argument("name")
@region_option
def token(name: str, region: str | None) -> None:
    """Print a credential for kubeconfig's exec: what `use` writes calls this."""
    import datetime
    import json

    from windlass.clusters import kubeconfig

    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=kubeconfig.TOKEN_SECONDS)
    status = {"expirationTimestamp": until.strftime("%Y-%m-%dT%H:%M:%SZ"), "token": kubeconfig.token(name, region)}
    click.echo(json.dumps({"apiVersion": kubeconfig.EXEC_API, "kind": "ExecCredential", "status": status}))


@cluster.command(short_help="Say whether a cluster can take a run.")
@click.argument("run_file", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--context", metavar="CONTEXT", help="Context of your kubeconfig. Default: the run file's, or the current one."
)
@click.option("-n", "--namespace", metavar="NAMESPACE", help="Namespace. Default: the run file's, or the context's.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JUnit XML too.")
@json_option
def check(
    run_file: str | None,
    overrides: tuple[str, ...],
    context: str | None,
    namespace: str | None,
    junit: Path | None,
    as_json: bool,
) -> int:
    """Check a cluster: the API, permissions, operators, nodes, devices, room, queues and storage.

    With a run file: against what that run needs. Creates nothing. Exit code 1 where a check fails.
    """
    import time

    from windlass.cli.output import print_json
    from windlass.clusters import result as results
    from windlass.errors import ExitCode

    begin = time.monotonic()
    api, found = _check(run_file, overrides, context, namespace)
    seconds = time.monotonic() - begin
    status = results.overall(found)
    if junit:
        junit.write_text(results.junit(found, cluster=api.access.context, seconds=seconds), encoding="utf-8")
    if as_json:
        print_json(
            {
                "context": api.access.context,
                "namespace": api.access.namespace,
                "status": status,
                "requests": api.num_requests,
                "results": [result.as_dict() for result in found],
            }
        )
    else:
        _print(found, api, seconds)
    return ExitCode.FAILED if status == "fail" else ExitCode.OK


def _check(
    run_file: str | None, overrides: tuple[str, ...], context: str | None, namespace: str | None
) -> tuple[Api, list[Result]]:
    from windlass.clusters.checks import run_checks
    from windlass.clusters.needs import Needs
    from windlass.clusters.result import Result
    from windlass.clusters.snapshot import take
    from windlass.targets.kubernetes.api.discovery import served
    from windlass.targets.kubernetes.api.http import Api
    from windlass.targets.kubernetes.api.kubeconfig import access

    needs, problems = Needs(), list[Result]()
    if run_file:
        needs, problems, options = _needs(run_file, overrides, context, namespace)
        context, namespace = options.context, options.namespace
    api = Api(access(context, namespace))
    kinds = list(served(api, schemas=False).kinds)
    snapshot = take(api, api.access.namespace, needs.accesses(kinds))
    return api, problems + run_checks(snapshot, needs)


def _needs(
    run_file: str, overrides: tuple[str, ...], context: str | None, namespace: str | None
) -> tuple[Needs, list[Result], Any]:
    """What a run asks of the cluster. A run that cannot even be rendered for it is a failed check of its own."""
    from windlass.clusters.needs import Needs, needs_of
    from windlass.clusters.result import Result
    from windlass.errors import UserError
    from windlass.plan import resolve
    from windlass.spec import load_run
    from windlass.targets import target

    chosen = [("context", context), ("namespace", namespace)]
    changes = [f"target.kubernetes.{key}={value}" for key, value in chosen if value]
    run = load_run(run_file, [*overrides, "target.kind=kubernetes", *changes])
    options, where = run.target.kubernetes, target(run.target)
    try:
        settled = resolve(where.settle(run))
        request = where.render(settled, where.gather(settled))
    except UserError as error:
        problem = Result("run", "fail", error.what, error.evidence or error.cause, error.fix)
        return Needs(queue=options.queue, service_account=options.service_account), [problem], options
    return needs_of(settled, request), [], options


def _print(found: list[Result], api: Api, seconds: float) -> None:
    from windlass.cli.output import print_table, styled

    style = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
    print_table(
        ["", "CHECK", "WHAT"],
        [[styled(result.status, style[result.status]), result.check, result.summary] for result in found],
        notes=[_note(result) for result in found],
    )
    counts = ", ".join(
        f"{number} {status}" for status in style if (number := sum(result.status == status for result in found))
    )
    click.echo(f"{api.access.context}: {counts} ({api.num_requests} requests, {seconds:.1f} s)")


def _note(result: Result) -> str | None:
    if result.status == "pass":
        return None
    parts = [result.evidence, f"fix: {result.fix}" if result.fix else None]
    return "\n".join(part for part in parts if part) or None
