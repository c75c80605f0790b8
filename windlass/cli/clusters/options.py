"""Options that several `windlass cluster` commands have."""

from __future__ import annotations

import click

region_option = click.option("--region", metavar="REGION", help="AWS region. Default: that of your AWS configuration.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
context_option = click.option(
    "--context", metavar="CONTEXT", help="Context of your kubeconfig. Default: the run file's, or the current."
)
namespace_option = click.option(
    "-n", "--namespace", metavar="NAMESPACE", help="Namespace. Default: the run file's, or the context's."
)
