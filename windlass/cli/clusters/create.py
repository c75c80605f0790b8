"""`windlass cluster create` and `delete`: EKS clusters with eksctl, HyperPod clusters through SageMaker."""

from __future__ import annotations

import click

from windlass.cli.jobs import json_option


@click.command(short_help="Make an EKS or HyperPod cluster.")
@click.argument("name")
@click.option("--region", required=True, metavar="REGION", help="AWS region.")
@click.option(
    "--instance", default="m6i.2xlarge", show_default=True, metavar="TYPE", help="Instance type of the nodes."
)
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), default=2, show_default=True, help="How many.")
@click.option("--zone", metavar="ZONE", help="Availability zone of the nodes. Default: the region's first.")
@click.option("--spot", is_flag=True, help="Spot instances.")
@click.option("--bucket", metavar="BUCKET", help="Bucket for checkpoints; made if it is not there.")
@click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of the service account.")
@click.option("--on-eks", metavar="ARN", help="Make a HyperPod cluster, on top of this EKS cluster.")
@click.option("--role", metavar="ARN", help="HyperPod: the role of its instances.")
@click.option(
    "--lifecycle",
    metavar="S3-URI",
    help="HyperPod: the folder with on_create.sh, in a bucket whose name begins with sagemaker-.",
)
@click.option(
    "--tiered-storage",
    type=click.IntRange(20, 100),
    metavar="PERCENT",
    help="HyperPod: Managed Tiered Checkpointing, in this share of the instances' memory (checkpoint.managed_every).",
)
@click.option("--if-missing", is_flag=True, help="Make nothing where an EKS cluster of this name is there already.")
@click.option("--dry-run", is_flag=True, help="Print what would be asked of AWS, and its price. Nothing is made.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def create(
    name: str,
    region: str,
    instance: str,
    num_nodes: int,
    zone: str | None,
    spot: bool,
    bucket: str | None,
    namespace: str,
    on_eks: str | None,
    role: str | None,
    lifecycle: str | None,
    tiered_storage: int | None,
    if_missing: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make a cluster: EKS with eksctl; with --on-eks, HyperPod through SageMaker's API.

    What will be asked and what it costs per hour is printed first.
    """
    from windlass.cli.clusters.check import confirm
    from windlass.cli.output import print_json
    from windlass.clusters import creating
    from windlass.errors import UserError

    request = creating.ClusterRequest(name, region, instance, num_nodes, zone, spot, bucket, namespace)
    if not on_eks:
        asked = creating.cluster_config(request)
    elif role and lifecycle:
        asked = creating.hyperpod_request(
            request, eks_arn=on_eks, role_arn=role, lifecycle_uri=lifecycle, tiered_percent=tiered_storage
        )
    else:
        fix = "--role ARN --lifecycle S3-URI"
        raise UserError("a HyperPod cluster needs a role and a folder of lifecycle scripts", fix=fix)
    if if_missing and not on_eks and creating.exists(name, region):
        click.echo(f"{name} is there already: windlass cluster use {name} --region {region}", err=True)
        if as_json:
            print_json({"request": asked, "usd_per_hour": None, "parts": [], "created": False})
        return
    cost = creating.price(request, hyperpod=bool(on_eks))
    click.echo(creating.as_text(asked), nl=False, err=as_json)
    total = f"{cost.usd_per_hour:.2f} USD per hour" if cost.usd_per_hour is not None else "price not known"
    click.echo(f"# {total}: {'; '.join(cost.parts)}", err=as_json)
    if not dry_run:
        if not on_eks:
            creating.must_have_eksctl()
        confirm(f"Make the cluster {name}?", yes=yes)
        for line in creating.make_bucket(bucket, region) if bucket else ():
            click.echo(line, err=True)
        if on_eks:
            click.echo(creating.create_hyperpod(asked, region), err=as_json)
        else:
            creating.create_with_eksctl(asked)
        click.echo(f"windlass cluster use {name} --region {region}", err=True)
    if as_json:
        print_json(
            {"request": asked, "usd_per_hour": cost.usd_per_hour, "parts": list(cost.parts), "created": not dry_run}
        )


@click.command(short_help="Delete an EKS or HyperPod cluster.")
@click.argument("name")
@click.option("--region", required=True, metavar="REGION", help="AWS region.")
@click.option("--hyperpod", is_flag=True, help="It is a HyperPod cluster. The EKS cluster below it stays.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def delete(name: str, region: str, hyperpod: bool, yes: bool, as_json: bool) -> None:
    """Delete a cluster. What goes with it is shown first; buckets and their checkpoints stay."""
    from windlass.cli.clusters.check import confirm
    from windlass.cli.output import print_json
    from windlass.clusters import creating

    going = [f"HyperPod cluster {name}"] if hyperpod else creating.what_goes(name, region)
    for line in going:
        click.echo(line, err=as_json)
    confirm(f"Delete {name}?", yes=yes)
    if hyperpod:
        creating.delete_hyperpod(name, region)
    else:
        creating.delete_with_eksctl(name, region)
    if as_json:
        print_json({"deleted": going})
