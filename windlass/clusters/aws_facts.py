"""What AWS knows of an EKS cluster and the cluster does not: subnets, security group, quotas, Pod Identity."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.clusters.snapshot import Refusal
from windlass.common import aws
from windlass.errors import UserError

# docs.aws.amazon.com/eks/latest/userguide/cluster-endpoint.html: IPv6 clusters have the second kind of name
ENDPOINT = re.compile(
    r"https://[^/]+\.(?P<region>[a-z]+(?:-[a-z]+)+-\d+)\."
    r"(?:eks\.amazonaws\.com(?:\.cn)?|api\.aws|(?:api\.)?amazonwebservices\.com\.cn)/?$"
)
# EC2's quotas on running on-demand vCPUs, by the first letter of the instance family.
VCPU_QUOTAS = {"p": "L-417A185B", "g": "L-DB2E81BA"}
HYPERPOD_QUOTA = "{} for cluster usage"


@dataclass(frozen=True)
class Subnet:
    name: str
    zone: str
    num_free_ips: int


@dataclass(frozen=True)
class AwsFacts:
    """One EKS cluster. A part that AWS did not answer holds the refusal."""

    cluster: str
    region: str
    subnets: Sequence[Subnet] | Refusal
    security_group: str
    allows_itself: bool | Refusal  # all traffic in and out, between members of the group
    allows_efa: bool | Refusal  # the same by rules that name the group: addresses do not count for EFA
    vcpu_limits: Mapping[str, float | Refusal]  # by the first letter of the family
    pod_identities: Mapping[str, str] | Refusal  # service account of the namespace → role
    hyperpod_limit: float | Refusal | None = None  # instances of the run's `ml.` type; None: it names none


def region_of(server: str) -> str | None:
    """The region of an EKS endpoint; None for an API server that is none of EKS's."""
    match = ENDPOINT.match(server)
    return match["region"] if match else None


def ask(server: str, region: str, namespace: str, instance: str | None = None) -> AwsFacts | None:
    """Facts of the EKS cluster behind an address; None where the account has no such cluster. Raises UserError.

    `instance`: the type of the run's nodes, as they are labelled; HyperPod's begin with `ml.` and have quotas each.
    """
    eks, ec2, quotas = (aws.client(service, region) for service in ("eks", "ec2", "service-quotas"))
    cluster = _cluster_at(eks, server)
    if cluster is None:
        return None
    name, network = cluster["name"], cluster["resourcesVpcConfig"]
    group = network.get("clusterSecurityGroupId") or next(iter(network.get("securityGroupIds") or ()), "")
    return AwsFacts(
        cluster=name,
        region=region,
        subnets=_or_refusal("subnets", lambda: _subnets(ec2, _node_subnets(eks, name) or network.get("subnetIds"))),
        security_group=group,
        allows_itself=_or_refusal("security groups", lambda: _allows_itself(ec2, group, everywhere=True)),
        allows_efa=_or_refusal("security groups", lambda: _allows_itself(ec2, group, everywhere=False)),
        vcpu_limits={
            family: _or_refusal("service quotas", lambda code=code: _limit(quotas, code))
            for family, code in VCPU_QUOTAS.items()
        },
        pod_identities=_or_refusal("Pod Identity associations", lambda: _pod_identities(eks, name, namespace)),
        hyperpod_limit=_or_refusal("service quotas", lambda: _hyperpod_limit(quotas, instance))
        if instance and instance.startswith("ml.")
        else None,
    )


def _cluster_at(eks: Any, server: str) -> Any:
    with aws.asking("looking for the EKS cluster of the context"):
        for page in eks.get_paginator("list_clusters").paginate():
            for name in page["clusters"]:
                cluster = eks.describe_cluster(name=name)["cluster"]
                if str(cluster.get("endpoint", "")).rstrip("/").lower() == server.rstrip("/").lower():
                    return cluster
    return None


def node_groups(eks: Any, cluster: str) -> list[Any]:
    pages = eks.get_paginator("list_nodegroups").paginate(clusterName=cluster)
    names = [name for page in pages for name in page["nodegroups"]]
    return [eks.describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"] for name in names]


def _node_subnets(eks: Any, cluster: str) -> list[str]:
    """Where the nodes are; the control plane often has small subnets of its own."""
    return sorted({subnet for group in node_groups(eks, cluster) for subnet in group.get("subnets") or ()})


def _subnets(ec2: Any, names: list[str]) -> list[Subnet]:
    found = ec2.describe_subnets(SubnetIds=names)["Subnets"]
    return [Subnet(entry["SubnetId"], entry["AvailabilityZone"], entry["AvailableIpAddressCount"]) for entry in found]


def _allows_itself(ec2: Any, group: str, *, everywhere: bool) -> bool:
    """Whether members of a group may talk to each other; `everywhere`: a rule for every address is enough."""
    found = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    return all(
        any(
            rule["IpProtocol"] == "-1"
            and (
                any(pair.get("GroupId") == group for pair in rule.get("UserIdGroupPairs") or ())
                or (everywhere and any(block.get("CidrIp") == "0.0.0.0/0" for block in rule.get("IpRanges") or ()))
            )
            for rule in found[direction]
        )
        for direction in ("IpPermissions", "IpPermissionsEgress")
    )


def _limit(quotas: Any, code: str) -> float:
    return float(quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


def _hyperpod_limit(quotas: Any, instance: str) -> float:
    """SageMaker has one quota for each type, found by its name alone; one that was never raised may not be listed."""
    for operation in ("list_service_quotas", "list_aws_default_service_quotas"):
        for page in quotas.get_paginator(operation).paginate(ServiceCode="sagemaker"):
            for quota in page["Quotas"]:
                if quota["QuotaName"] == HYPERPOD_QUOTA.format(instance):
                    return float(quota["Value"])
    raise UserError(f"SageMaker lists no quota for {instance}", evidence=HYPERPOD_QUOTA.format(instance))


def _pod_identities(eks: Any, cluster: str, namespace: str) -> dict[str, str]:
    pages = eks.get_paginator("list_pod_identity_associations").paginate(clusterName=cluster, namespace=namespace)
    return {entry["serviceAccount"]: entry["associationId"] for page in pages for entry in page["associations"]}


def _or_refusal(what: str, question: Any) -> Any:
    try:
        with aws.asking(f"asking for {what}"):
            return question()
    except UserError as error:
        return Refusal(0, f"{error.what}: {error.evidence}")
