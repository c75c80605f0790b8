"""`windlass cluster`: the group, and which clusters there are."""

from __future__ import annotations

from dataclasses import asdict

import click

from windlass.cli.clusters.check import check, fix
from windlass.cli.clusters.create import create, delete
from windlass.cli.jobs import context_option, json_option, namespace_option

region_option = click.option("--region", metavar="REGION", help="AWS region. Default: that of your AWS configuration.")


@click.group(short_help="Clusters: list, use, check, fix, create.")
def cluster() -> None:
    """Clusters: list, use, check, fix, create."""


for command in (check, fix, create, delete):
    cluster.add_command(command)


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
        print_json({"clusters": [asdict(row) for row in rows], "warnings": warnings})
        return
    if not rows:
        account = "AWS was not asked" if no_aws else "AWS did not answer" if warnings else "no cluster in the region"
        click.echo(f"no context in your kubeconfig, and {account}")
        click.echo("  windlass cluster ls --region REGION    or windlass cluster create")
    else:
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


@cluster.command(short_help="Open a shell on a node.")
@click.argument("node")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--debug-pod", metavar="IMAGE", help="By a privileged pod of this image; the node's files are under /host."
)
@context_option
@namespace_option
def shell(
    node: str, command: tuple[str, ...], debug_pod: str | None, context: str | None, namespace: str | None
) -> int:
    """Open a shell on a node: an SSM session on AWS, or a privileged pod with --debug-pod IMAGE.

    The exit code is the shell's. The pod is deleted when it ends.
    """
    import difflib

    from windlass.clusters import shell as shells
    from windlass.errors import UserError
    from windlass.targets.kubernetes.api.http import Api
    from windlass.targets.kubernetes.api.kubeconfig import access

    api = Api(access(context, namespace))
    found = api.find(f"/api/v1/nodes/{node}")
    if found is None:
        names = [value["metadata"]["name"] for value in api.items("/api/v1/nodes")]
        near = difflib.get_close_matches(node, names, 1) or names[:1]
        raise UserError(
            f"there is no node {node}",
            evidence=f"nodes: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
            fix=f"windlass cluster shell {near[0]}" if near else None,
        )
    if debug_pod is None:
        return shells.ssm(found)
    return shells.debug_pod(api, found, api.access.namespace, debug_pod, command or ("/bin/sh",))
