"""`windlass cluster shell`: a shell on a node."""

from __future__ import annotations

import click

from windlass.cli.clusters.options import context_option, namespace_option


@click.command(short_help="Open a shell on a node.")
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
