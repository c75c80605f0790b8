"""Make and delete clusters: what would be asked of eksctl and of AWS, its price, and the asking itself.

The requests are plain values, made by pure functions, so that a dry run prints exactly what a real one sends.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from windlass.catalog.instances import instances
from windlass.clusters.aws_facts import node_groups
from windlass.common import aws
from windlass.errors import ExitCode, UserError

CONTROL_PLANE_USD = 0.10  # an hour of one EKS cluster in standard support, aws.amazon.com/eks/pricing, 2026-08
KUBERNETES = "1.33"
SERVICE_ACCOUNT = "windlass-train"


@dataclass(frozen=True)
class ClusterRequest:
    """A cluster as a user asks for it."""

    name: str
    region: str
    instance: str
    num_nodes: int
    zone: str | None = None  # EFA does not cross zones: GPU nodes go into one
    spot: bool = False
    bucket: str | None = None  # for checkpoints
    namespace: str = "default"
    kubernetes: str = KUBERNETES

    @property
    def zones(self) -> list[str]:
        """Two are the least that EKS takes; the nodes are in the first."""
        first = self.zone or f"{self.region}a"
        return [first, f"{self.region}{'b' if not first.endswith('b') else 'c'}"]


@dataclass(frozen=True)
class Price:
    usd_per_hour: float | None  # None: a part has no published price
    parts: Sequence[str]


def price(request: ClusterRequest, *, hyperpod: bool = False) -> Price:
    if hyperpod:
        return Price(None, [f"{request.num_nodes} × {request.instance}: SageMaker's price, which is not EC2's"])
    known = instances().get(request.instance)
    each = known and (known.spot if request.spot else known.on_demand)
    plane = f"control plane {CONTROL_PLANE_USD:.2f} USD"
    if not each:
        return Price(None, [plane, f"{request.num_nodes} × {request.instance}: no published price"])
    nodes = (
        f"{request.num_nodes} × {request.instance} {each.usd_per_hour:.2f} USD ({each.region}, {each.date or 'spot'})"
    )
    others = "2 × m6i.large, disks and a NAT gateway are not counted"
    return Price(CONTROL_PLANE_USD + request.num_nodes * each.usd_per_hour, [plane, nodes, others])


def cluster_config(request: ClusterRequest) -> dict[str, Any]:
    """eksctl's ClusterConfig: one group of nodes for training, in one zone, and a small one for operators."""
    known = instances().get(request.instance)
    training: dict[str, Any] = {
        "name": "train",
        "desiredCapacity": request.num_nodes,
        "minSize": 0,
        "maxSize": request.num_nodes,
        "availabilityZones": request.zones[:1],
        "privateNetworking": True,
        "volumeSize": 500,
        "iam": {"withAddonPolicies": {"ebs": True, "fsx": True, "efs": True}},
    }
    if request.spot:
        training |= {"instanceTypes": [request.instance], "spot": True}
    else:
        training["instanceType"] = request.instance
    if known and known.efa:
        training["efaEnabled"] = True  # eksctl makes the security group and installs the device plugin
    elif known:  # that plugin tolerates no taint for GPUs
        training["taints"] = [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]
    config: dict[str, Any] = {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {"name": request.name, "region": request.region, "version": request.kubernetes},
        "availabilityZones": request.zones,
        "iam": {"withOIDC": True},
        "managedNodeGroups": [
            {"name": "system", "instanceType": "m6i.large", "desiredCapacity": 2, "privateNetworking": True},
            training,
        ],
        "addons": [{"name": name} for name in ("vpc-cni", "coredns", "kube-proxy", "aws-ebs-csi-driver")],
    }
    if request.bucket:
        account = {
            "metadata": {"name": SERVICE_ACCOUNT, "namespace": request.namespace},
            "attachPolicy": bucket_policy(request.bucket, request.region),
        }
        config["iam"]["serviceAccounts"] = [account]
    return config


def hyperpod_request(
    request: ClusterRequest, *, eks_arn: str, role_arn: str, lifecycle_uri: str, tiered_percent: int | None = None
) -> dict[str, Any]:
    """The parameters of SageMaker's CreateCluster, on top of an EKS cluster that is there."""
    group = {
        "InstanceGroupName": "train",
        "InstanceType": f"ml.{request.instance.removeprefix('ml.')}",
        "InstanceCount": request.num_nodes,
        "LifeCycleConfig": {"SourceS3Uri": lifecycle_uri, "OnCreate": "on_create.sh"},
        "ExecutionRole": role_arn,
        "ThreadsPerCore": 1,
    }
    if request.instance.removeprefix("ml.") in instances():  # these are tests of GPUs
        group["OnStartDeepHealthChecks"] = ["InstanceStress", "InstanceConnectivity"]
    tiered = {"Mode": "Enable", "InstanceMemoryAllocationPercentage": tiered_percent}
    return {
        "ClusterName": request.name,
        "Orchestrator": {"Eks": {"ClusterArn": eks_arn}},
        "InstanceGroups": [group],
        "NodeRecovery": "Automatic",
        **({"TieredStorageConfig": tiered} if tiered_percent else {}),
    }


def bucket_policy(bucket: str, region: str) -> dict[str, Any]:
    """What a run does in its bucket, and nothing else: lists it, reads, writes and prunes checkpoints."""
    partition = {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(region.rsplit("-", 2)[0], "aws")
    arn = f"arn:{partition}:s3:::{bucket}"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads"], "Resource": [arn]},
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": [f"{arn}/*"],
            },
        ],
    }


def make_bucket(name: str, region: str) -> list[str]:
    """A private, encrypted, versioned bucket; one that is there and ours is brought to that. What was done."""
    s3 = aws.client("s3", region)
    done = []
    with aws.asking(f"making the bucket {name}"):
        try:
            place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            s3.create_bucket(Bucket=name, **place)
            done.append(f"made the bucket {name}")
        except s3.exceptions.BucketAlreadyOwnedByYou:
            done.append(f"the bucket {name} is there already")
        blocked = dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        )
        s3.put_public_access_block(Bucket=name, PublicAccessBlockConfiguration=blocked)
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        s3.put_bucket_encryption(Bucket=name, ServerSideEncryptionConfiguration={"Rules": [rule]})
        s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        old = {
            "ID": "windlass-old-versions",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 30},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
        }
        s3.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [old]})
    return [*done, "private, encrypted, versioned; old versions go after 30 days"]


def create_with_eksctl(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        _eksctl("create", "cluster", "-f", str(path))


def delete_with_eksctl(name: str, region: str) -> None:
    _eksctl("delete", "cluster", "--name", name, "--region", region, "--wait")


def create_hyperpod(parameters: dict[str, Any], region: str) -> str:
    client = aws.client("sagemaker", region)
    with aws.asking(f"making the HyperPod cluster {parameters['ClusterName']}"):
        return str(client.create_cluster(**parameters)["ClusterArn"])


def delete_hyperpod(name: str, region: str) -> None:
    client = aws.client("sagemaker", region)
    with aws.asking(f"deleting the HyperPod cluster {name}"):
        client.delete_cluster(ClusterName=name)


def exists(name: str, region: str) -> bool:
    eks = aws.client("eks", region)
    with aws.asking(f"looking for the cluster {name}"):
        try:
            eks.describe_cluster(name=name)
        except eks.exceptions.ResourceNotFoundException:
            return False
    return True


def what_goes(name: str, region: str) -> list[str]:
    """What deleting an EKS cluster takes with it, for a person to read before."""
    eks = aws.client("eks", region)
    with aws.asking(f"looking at the cluster {name}"):
        cluster = eks.describe_cluster(name=name)["cluster"]
        details = node_groups(eks, name)
    nodes = [
        f"node group {group['nodegroupName']}: {(group.get('scalingConfig') or {}).get('desiredSize', '?')} × "
        f"{', '.join(group.get('instanceTypes') or ['?'])}"
        for group in details
    ]
    return [f"EKS cluster {name} ({cluster['status']}, Kubernetes {cluster.get('version', '?')})", *nodes]


def must_have_eksctl() -> str:
    program = shutil.which("eksctl")
    if program is None:
        raise UserError(
            "eksctl is not installed",
            evidence="no program of that name is in $PATH",
            fix="https://eksctl.io/installation    or --dry-run > cluster.yaml and eksctl elsewhere",
        )
    return program


def _eksctl(*arguments: str) -> None:
    if subprocess.run([must_have_eksctl(), *arguments], stdout=sys.stderr.fileno()).returncode:
        raise UserError(f"eksctl {arguments[0]} failed", fix="its own lines above say why", exit_code=ExitCode.FAILED)


def as_text(value: dict[str, Any]) -> str:
    """A request for a person: YAML for eksctl's, JSON for AWS's."""
    if value.get("kind") == "ClusterConfig":
        return yaml.safe_dump(value, sort_keys=False)
    return json.dumps(value, indent=2) + "\n"
