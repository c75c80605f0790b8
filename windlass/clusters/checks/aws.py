"""EKS: addresses for the pods, the rule that EFA needs, the account's quota, and the role of the service account."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.catalog.instances import instances
from windlass.clusters.aws_facts import HYPERPOD_QUOTA, VCPU_QUOTAS, AwsFacts
from windlass.clusters.needs import EFA, Needs
from windlass.clusters.result import Result, failed, named, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.targets.kubernetes.manifests.resources import INSTANCE_LABEL


def check_aws(facts: AwsFacts, snapshot: Snapshot, needs: Needs) -> list[Result]:
    return [
        *named("subnets", _addresses(facts, needs)),
        *named("security-group", _self_rule(facts, needs)),
        *named("ec2-quota", _vcpus(facts, snapshot, needs)),
        *named("hyperpod-quota", _hyperpod_instances(facts, needs)),
        *named("pod-identity", _identity(facts, needs)),
    ]


def _addresses(facts: AwsFacts, needs: Needs) -> Iterator[Result]:
    """Every pod takes an address of its node's subnet (VPC CNI)."""
    if isinstance(facts.subnets, Refusal):
        yield skipped("free addresses were not counted", str(facts.subnets))
        return
    free = sum(subnet.num_free_ips for subnet in facts.subnets)
    listed = ", ".join(f"{subnet.name} ({subnet.zone}): {subnet.num_free_ips}" for subnet in facts.subnets)
    if free < max(needs.num_pods, 1):
        yield failed(
            f"{free} addresses are free in the subnets, and the run has {needs.num_pods} pods",
            evidence=listed,
            fix="a further subnet for the node group, or prefix delegation in the VPC CNI",
        )
    else:
        yield passed(f"{free} addresses are free in {len(facts.subnets)} subnets", listed)


def _self_rule(facts: AwsFacts, needs: Needs) -> Iterator[Result]:
    needs_efa = needs.asks(EFA)
    is_allowed = facts.allows_efa if needs_efa else facts.allows_itself
    if isinstance(is_allowed, Refusal):
        yield skipped("its rules were not looked at", str(is_allowed))
    elif is_allowed:
        yield passed(f"{facts.security_group} lets its members talk to each other")
    else:
        group = facts.security_group
        rule = f"--group-id {group} --protocol all --source-group {group}"
        yield (failed if needs_efa or needs.num_pods > 1 else warning)(
            f"{group} does not let its members talk to each other, as EFA needs",
            evidence=f"no rule of {group} allows all traffic from and to itself; for EFA 0.0.0.0/0 is not enough",
            fix=f"aws ec2 authorize-security-group-ingress {rule}    and the same for egress",
        )


def _vcpus(facts: AwsFacts, snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """Nodes that an autoscaler would make count against the account's quota of running vCPUs."""
    entry = instances().get(instance_of(needs) or "")
    family = entry.type[0] if entry else ""
    if entry is None or family not in VCPU_QUOTAS:
        return
    limit, wanted = facts.vcpu_limits[family], entry.vcpus * needs.num_pods
    if isinstance(limit, Refusal):
        yield skipped("the quota of vCPUs was not looked at", str(limit))
    elif wanted > limit:
        yield (warning if not isinstance(snapshot.nodes, Refusal) and snapshot.nodes else failed)(
            f"the account may run {limit:g} vCPUs of {family.upper()} instances, and the run's nodes have {wanted}",
            evidence=f"EC2 quota {VCPU_QUOTAS[family]} in {facts.region}; {needs.num_pods} × {entry.type}",
            fix=f"aws service-quotas request-service-quota-increase --service-code ec2 "
            f"--quota-code {VCPU_QUOTAS[family]} --desired-value {wanted}    (capacity blocks are not counted)",
        )
    else:
        yield passed(f"the account may run {limit:g} vCPUs of {family.upper()} instances")


def _hyperpod_instances(facts: AwsFacts, needs: Needs) -> Iterator[Result]:
    limit, wanted = facts.hyperpod_limit, needs.num_pods
    instance = instance_of(needs)
    if isinstance(limit, Refusal):
        yield skipped(f"the quota of {instance} was not looked at", str(limit))
    elif limit is not None and wanted > limit:
        yield failed(
            f"the account may have {limit:g} {instance} in HyperPod clusters, and the run has {wanted} pods",
            evidence=f"SageMaker quota {HYPERPOD_QUOTA.format(instance)!r} in {facts.region}",
            fix="https://console.aws.amazon.com/servicequotas/home/services/sagemaker/quotas    request an increase; "
            f"or resources.nodes={limit:g}",
        )
    elif limit is not None:
        yield passed(f"the account may have {limit:g} {instance} in HyperPod clusters")


def instance_of(needs: Needs) -> str | None:
    """The type of the nodes that the run's pods go to, where they say so."""
    selector = (needs.pod or {}).get("spec", {}).get("nodeSelector") or {}
    return str(selector[INSTANCE_LABEL]) if INSTANCE_LABEL in selector else None


def _identity(facts: AwsFacts, needs: Needs) -> Iterator[Result]:
    if needs.service_account is None:
        return
    if isinstance(facts.pod_identities, Refusal):
        yield skipped("Pod Identity was not looked at", str(facts.pod_identities))
    elif needs.service_account in facts.pod_identities:
        yield passed(f"{needs.service_account} has a Pod Identity association")
