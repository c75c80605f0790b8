"""Which clusters there are: EKS and HyperPod clusters of an AWS account, and the contexts of kubeconfig files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from windlass.common import aws
from windlass.errors import UserError

Kind = Literal["eks", "hyperpod", "context"]


@dataclass(frozen=True)
class Listed:
    """One cluster, or one context of a kubeconfig."""

    kind: Kind
    name: str
    region: str | None
    status: str
    version: str | None = None
    instances: str | None = None  # HyperPod: how many of which type
    context: str | None = None  # the kubeconfig context that leads to it
    is_current: bool = False


@dataclass(frozen=True)
class EksCluster:
    """What a kubeconfig entry needs to know of an EKS cluster."""

    name: str
    arn: str
    region: str
    endpoint: str
    certificate: str  # base64, as kubeconfig files have it


def eks_clusters(region: str | None) -> Iterator[Listed]:
    client = aws.client("eks", region)
    with aws.asking("listing EKS clusters"):
        for page in client.get_paginator("list_clusters").paginate():
            for name in page["clusters"]:
                cluster = client.describe_cluster(name=name)["cluster"]
                yield Listed("eks", name, client.meta.region_name, cluster["status"], cluster.get("version"))


def hyperpod_clusters(region: str | None) -> Iterator[Listed]:
    client = aws.client("sagemaker", region)
    with aws.asking("listing HyperPod clusters"):
        for page in client.get_paginator("list_clusters").paginate():
            for summary in page["ClusterSummaries"]:
                details = client.describe_cluster(ClusterName=summary["ClusterName"])
                groups = details.get("InstanceGroups") or ()
                counts = [f"{group.get('CurrentCount', '?')} × {group['InstanceType']}" for group in groups]
                orchestrator = "EKS" if (details.get("Orchestrator") or {}).get("Eks") else "Slurm"
                yield Listed(
                    "hyperpod",
                    summary["ClusterName"],
                    client.meta.region_name,
                    summary["ClusterStatus"],
                    version=orchestrator,
                    instances=", ".join(counts) or None,
                )


def find_eks(name: str, region: str | None) -> EksCluster:
    """An EKS cluster by its name, or by the name of the HyperPod cluster that uses it."""
    client = aws.client("eks", region)
    with aws.asking(f"looking for the cluster {name}"):
        try:
            cluster = client.describe_cluster(name=name)["cluster"]
        except client.exceptions.ResourceNotFoundException:
            below = _eks_below_hyperpod(name, region)
            if below is None:
                raise _no_such_cluster(client, name) from None
            cluster = client.describe_cluster(name=below)["cluster"]
    if not cluster.get("endpoint"):
        raise UserError(
            f"the cluster {name} has no endpoint yet",
            evidence=f"its status is {cluster['status']}",
            fix=f"windlass cluster use {name}    again in some minutes",
        )
    return EksCluster(
        name=cluster["name"],
        arn=cluster["arn"],
        region=client.meta.region_name,
        endpoint=cluster["endpoint"],
        certificate=(cluster.get("certificateAuthority") or {}).get("data", ""),
    )


def _eks_below_hyperpod(name: str, region: str | None) -> str | None:
    client = aws.client("sagemaker", region)
    try:
        details = client.describe_cluster(ClusterName=name)
    except client.exceptions.ClientError as error:
        # who may not ask SageMaker has no HyperPod cluster to name
        if aws.error_code(error) in ("ResourceNotFound", "ValidationException", "AccessDeniedException"):
            return None
        raise
    arn = ((details.get("Orchestrator") or {}).get("Eks") or {}).get("ClusterArn")
    if not arn:
        raise UserError(
            f"the HyperPod cluster {name} is run by Slurm, not by EKS",
            fix="target.kind=slurm target.host=LOGIN-NODE",
        )
    return str(arn).rpartition("/")[2]


def _no_such_cluster(client: Any, name: str) -> UserError:
    import difflib

    names = [cluster for page in client.get_paginator("list_clusters").paginate() for cluster in page["clusters"]]
    near = difflib.get_close_matches(name, names, 1) or names[:1]
    return UserError(
        f"there is no EKS or HyperPod cluster {name!r} in {client.meta.region_name}",
        evidence=f"EKS clusters there: {', '.join(names) or 'none'}",
        fix=f"windlass cluster use {near[0]}" if near else "--region REGION",
        error_code="no-such-cluster",
    )
