"""`windlass cluster create` and `delete`: what is asked of eksctl and AWS, and its price; moto plays AWS."""

import json
import os
import sys

import pytest
import yaml

from tests.clusters.conftest import REGION
from tests.clusters.test_listing import make_eks
from tests.clusters.test_odd import snapshot
from windlass.agent import manage_eks_cluster
from windlass.clusters.aws_facts import AwsFacts, Subnet, ask, region_of
from windlass.clusters.checks.aws import check_aws, instance_of
from windlass.clusters.creating import ClusterRequest, cluster_config, hyperpod_request, make_bucket
from windlass.clusters.needs import EFA, Needs
from windlass.clusters.snapshot import Refusal
from windlass.common import aws as common_aws
from windlass.errors import UserError

ARN = "arn:aws:eks:us-west-2:123456789012:cluster/below"
ROLE = "arn:aws:iam::123456789012:role/hyperpod"


def test_a_gpu_cluster_has_efa_one_zone_and_a_price(windlass):
    options = (
        "--region",
        REGION,
        "--instance",
        "p5.48xlarge",
        "--nodes",
        "4",
        "--bucket",
        "ckpt",
        "--dry-run",
        "--json",
    )
    answer = json.loads(windlass("cluster", "create", "big", *options).out)
    _system, train = answer["request"]["managedNodeGroups"]
    assert (train["efaEnabled"], train["availabilityZones"], train["desiredCapacity"]) == (True, ["us-west-2a"], 4)
    assert answer["request"]["iam"]["withOIDC"]
    policy = answer["request"]["iam"]["serviceAccounts"][0]["attachPolicy"]
    resources = [resource for statement in policy["Statement"] for resource in statement["Resource"]]
    assert set(resources) == {"arn:aws:s3:::ckpt", "arn:aws:s3:::ckpt/*"}
    assert all("*" not in action for statement in policy["Statement"] for action in statement["Action"])
    assert 200 < answer["usd_per_hour"] < 600
    assert answer["created"] is False


def test_a_cpu_cluster_has_no_efa_and_says_what_it_cannot_price(windlass):
    answer = windlass("cluster", "create", "small", "--region", REGION, "--dry-run")
    config = yaml.safe_load(answer.out)
    assert "efaEnabled" not in config["managedNodeGroups"][1]
    assert "price not known" in answer.out


def test_eksctl_gets_exactly_what_was_shown(windlass, tmp_path, monkeypatch):
    program = tmp_path / "eksctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncp "$4" {tmp_path}/config\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    answer = windlass("cluster", "create", "small", "--region", REGION, "--yes")
    assert answer.code == 0, answer.err
    assert (tmp_path / "arguments").read_text().startswith("create cluster -f ")
    assert yaml.safe_load((tmp_path / "config").read_text()) == cluster_config(
        ClusterRequest("small", REGION, "m6i.2xlarge", 2)
    )


def test_without_eksctl(windlass, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = windlass("cluster", "create", "small", "--region", REGION, "--yes")
    assert answer.code == 2
    assert "eksctl is not installed" in answer.err


@pytest.mark.slow
def test_a_hyperpod_cluster_is_made_and_deleted(windlass, aws):
    options = ("--region", REGION, "--on-eks", ARN, "--role", ROLE, "--lifecycle", "s3://sagemaker-scripts/x", "--yes")
    answer = windlass("cluster", "create", "pod", "--instance", "p5.48xlarge", "--nodes", "2", *options)
    assert answer.code == 0, answer.err
    made = aws("sagemaker").describe_cluster(ClusterName="pod")
    assert made["InstanceGroups"][0]["InstanceType"] == "ml.p5.48xlarge"
    listed = json.loads(windlass("cluster", "ls", "--json").out)["clusters"]
    assert [(row["kind"], row["name"]) for row in listed if row["kind"] == "hyperpod"] == [("hyperpod", "pod")]
    assert windlass("cluster", "delete", "pod", "--region", REGION, "--hyperpod", "--yes").code == 0
    assert aws("sagemaker").list_clusters()["ClusterSummaries"] == []


def test_the_bucket_is_private_encrypted_and_versioned(aws):
    for _ in range(2):
        make_bucket("windlass-ckpt", REGION)
    s3 = aws("s3")
    assert all(s3.get_public_access_block(Bucket="windlass-ckpt")["PublicAccessBlockConfiguration"].values())
    assert s3.get_bucket_versioning(Bucket="windlass-ckpt")["Status"] == "Enabled"
    assert s3.get_bucket_encryption(Bucket="windlass-ckpt")["ServerSideEncryptionConfiguration"]["Rules"]


def test_delete_shows_what_goes_and_asks(windlass, aws):
    make_eks(aws, "old")
    answer = windlass("cluster", "delete", "old", "--region", REGION)
    assert "EKS cluster old (ACTIVE" in answer.out
    assert answer.code == 2
    assert "error: without a terminal, windlass cluster delete needs --yes; nothing was done" in answer.err
    assert aws("eks").list_clusters()["clusters"] == ["old"]


def test_create_makes_nothing_where_nobody_can_be_asked(windlass, aws, tmp_path, monkeypatch):
    program = tmp_path / "eksctl"
    program.write_text("#!/bin/sh\ntouch called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answer = windlass("cluster", "create", "new", "--region", REGION, "--bucket", "windlass-new")
    assert answer.code == 2
    assert "error: without a terminal, windlass cluster create needs --yes; nothing was done" in answer.err
    assert aws("s3").list_buckets()["Buckets"] == []
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("server", "region"),
    [
        ("https://ABC.gr7.eu-west-1.eks.amazonaws.com", "eu-west-1"),
        ("https://ABC.yl4.us-west-2.eks.amazonaws.com/", "us-west-2"),
        ("https://ABC.gr7.us-gov-west-1.eks.amazonaws.com", "us-gov-west-1"),
        ("https://ABC.gr7.cn-north-1.eks.amazonaws.com.cn", "cn-north-1"),
        ("https://ABC.gr7.us-west-2.api.aws", "us-west-2"),  # IPv6 clusters since October 2024
        ("https://ABC.gr7.cn-north-1.api.amazonwebservices.com.cn", "cn-north-1"),
        ("https://10.0.0.1:6443", None),
        ("https://api.aws", None),
        ("https://eks.amazonaws.com.evil.example", None),
    ],
)
def test_only_endpoints_of_eks_have_a_region(server, region):
    assert region_of(server) == region


@pytest.mark.slow
def test_aws_is_asked_about_the_cluster_behind_an_address(aws):
    vpc = aws("ec2").create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = aws("ec2").create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/28")["Subnet"]["SubnetId"]
    group = aws("ec2").create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
    network = {"subnetIds": [subnet], "securityGroupIds": [group]}
    made = aws("eks").create_cluster(name="net", roleArn=ROLE, resourcesVpcConfig=network)["cluster"]
    facts = ask(made["endpoint"], REGION, "team")
    assert facts.subnets[0].num_free_ips == 11
    assert facts.allows_itself is False
    rule = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    aws("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=rule)
    facts = ask(made["endpoint"], REGION, "team")
    assert facts.allows_itself is True  # egress to everywhere is EC2's default
    assert facts.allows_efa is False  # which is not enough for EFA: its packets have no address
    aws("ec2").authorize_security_group_egress(GroupId=group, IpPermissions=rule)
    assert ask(made["endpoint"], REGION, "team").allows_efa is True
    assert ask("https://other.gr7.us-west-2.eks.amazonaws.com", REGION, "team") is None


def pod(**requests):
    container = {"name": "c", "resources": {"requests": requests}}
    return {"spec": {"nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"}, "containers": [container]}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["pass", "pass", "pass", "pass"]),
        ({"subnets": [Subnet("s", "a", 1)]}, ["fail", "pass", "pass", "pass"]),
        ({"allows_efa": False}, ["pass", "fail", "pass", "pass"]),
        ({"vcpu_limits": {"p": 192.0, "g": 0.0}}, ["pass", "pass", "fail", "pass"]),
        ({"pod_identities": Refusal(0, "denied")}, ["pass", "pass", "pass", "skip"]),
        (
            {"subnets": Refusal(0, "denied"), "vcpu_limits": {"p": Refusal(0, "no"), "g": 0.0}},
            ["skip", "pass", "skip", "pass"],
        ),
    ],
)
def test_what_aws_says_is_judged(changes, expected):
    sound = {
        "cluster": "c",
        "region": REGION,
        "subnets": [Subnet("s", "us-west-2a", 100)],
        "security_group": "sg-1",
        "allows_itself": True,
        "allows_efa": True,
        "vcpu_limits": {"p": 1000.0, "g": 0.0},
        "pod_identities": {"trainer": "a-1"},
    }

    class NoNodes:
        nodes = ()

    needs = Needs(pod=pod(**{EFA: "32"}), num_pods=4, service_account="trainer")
    results = list(check_aws(AwsFacts(**{**sound, **changes}), NoNodes(), needs))
    assert [result.status for result in results] == expected
    assert all(result.fix and result.evidence for result in results if result.status == "fail")


def test_addresses_are_counted_where_the_nodes_are(aws):
    """The control plane often has small subnets of its own."""
    vpc = aws("ec2").create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    own, nodes = (
        aws("ec2").create_subnet(VpcId=vpc, CidrBlock=block)["Subnet"]["SubnetId"]
        for block in ("10.0.1.0/28", "10.0.2.0/24")
    )
    made = aws("eks").create_cluster(name="net", roleArn=ROLE, resourcesVpcConfig={"subnetIds": [own]})["cluster"]
    aws("eks").create_nodegroup(clusterName="net", nodegroupName="train", subnets=[nodes], nodeRole=ROLE)
    assert [subnet.name for subnet in ask(made["endpoint"], REGION, "team").subnets] == [nodes]


def test_json_does_not_say_that_what_was_not_made_was(windlass):
    answer = windlass("cluster", "create", "small", "--region", REGION, "--json")
    assert answer.code == 2
    assert "created" not in answer.out


def test_what_eksctl_prints_is_not_among_the_json(windlass, tmp_path, monkeypatch):
    program = tmp_path / "eksctl"
    program.write_text("#!/bin/sh\necho creating\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    answer = windlass("cluster", "create", "small", "--region", REGION, "--json", "--yes")
    assert json.loads(answer.out)["created"] is True
    assert "creating" not in answer.out


def test_no_bucket_is_made_for_a_cluster_that_cannot_be(windlass, aws, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = windlass("cluster", "create", "small", "--region", REGION, "--bucket", "windlass-new", "--yes")
    assert "eksctl is not installed" in answer.err
    assert aws("s3").list_buckets()["Buckets"] == []


@pytest.mark.parametrize(
    ("region", "partition"), [("us-west-2", "aws"), ("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")]
)
def test_policies_are_of_the_partition(region, partition):
    config = cluster_config(ClusterRequest("c", region, "m6i.large", 2, bucket="ckpt"))
    text = json.dumps(config["iam"]["serviceAccounts"])
    assert f"arn:{partition}:s3:::ckpt" in text


def test_eksctl_efa_plugin_is_not_kept_off_by_a_taint():
    """The plugin that eksctl installs tolerates aws.amazon.com/efa alone."""
    groups = {name: cluster_config(ClusterRequest("c", REGION, name, 2)) for name in ("p5.48xlarge", "g5.xlarge")}
    assert "taints" not in groups["p5.48xlarge"]["managedNodeGroups"][1]
    assert groups["g5.xlarge"]["managedNodeGroups"][1]["taints"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize(("instance", "is_checked"), [("p5.48xlarge", True), ("m6i.2xlarge", False)])
def test_hyperpod_requests_are_valid_and_cpu_nodes_get_no_gpu_checks(instance, is_checked):
    from botocore.session import Session
    from botocore.validate import ParamValidator

    request = ClusterRequest("pod", REGION, instance, 2)
    parameters = hyperpod_request(request, eks_arn=ARN, role_arn=ROLE, lifecycle_uri="s3://sagemaker-x/y")
    shape = Session().get_service_model("sagemaker").operation_model("CreateCluster").input_shape
    assert not ParamValidator().validate(parameters, shape).has_errors()
    assert ("OnStartDeepHealthChecks" in parameters["InstanceGroups"][0]) is is_checked


def test_the_price_of_hyperpod_is_not_that_of_ec2(windlass):
    options = ("--on-eks", ARN, "--role", ROLE, "--lifecycle", "s3://sagemaker-x/y", "--dry-run", "--json")
    answer = windlass("cluster", "create", "pod", "--region", REGION, "--instance", "p5.48xlarge", *options)
    cost = json.loads(answer.out)
    assert cost["usd_per_hour"] is None
    assert "SageMaker" in cost["parts"][0]


def test_a_cluster_that_is_there_is_not_made_again(windlass, aws, monkeypatch, tmp_path):
    make_eks(aws, "old")
    monkeypatch.setenv("PATH", str(tmp_path))  # without eksctl
    answer = windlass("cluster", "create", "old", "--region", REGION, "--if-missing", "--yes")
    assert answer.code == 0, answer.err
    assert "windlass cluster use old" in answer.err
    assert "eksctl is not installed" in windlass("cluster", "create", "new", "--region", REGION, "--if-missing").err


def test_managed_tiered_checkpointing_is_enabled_by_name(windlass):
    options = ("--on-eks", ARN, "--role", ROLE, "--lifecycle", "s3://sagemaker-scripts/x", "--dry-run", "--json")
    answer = windlass(
        "cluster", "create", "pod", "--region", REGION, "--instance", "p5.48xlarge", "--tiered-storage", "20", *options
    )
    asked = json.loads(answer.out)["request"]
    assert asked["TieredStorageConfig"] == {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 20}
    import botocore.session
    from botocore.validate import validate_parameters

    model = botocore.session.get_session().get_service_model("sagemaker")
    validate_parameters(asked, model.operation_model("CreateCluster").input_shape)


@pytest.mark.parametrize(("limit", "status"), [(4.0, "pass"), (1.0, "fail"), (None, "skip")])
def test_hyperpods_quota_is_found_by_name(aws, monkeypatch, limit, status):
    """By botocore's stubber: moto knows no quotas of SageMaker."""
    from botocore.stub import Stubber

    made = make_eks(aws, "train")
    client, real = aws("service-quotas"), common_aws.client
    stubber = Stubber(client)
    for code in ("L-417A185B", "L-DB2E81BA"):
        asked = {"ServiceCode": "ec2", "QuotaCode": code}
        stubber.add_response("get_service_quota", {"Quota": {"Value": 1000.0}}, asked)
    quotas = [{"QuotaName": "ml.g5.xlarge for cluster usage", "Value": 9.0}]
    stubber.add_response("list_service_quotas", {"Quotas": quotas}, {"ServiceCode": "sagemaker"})
    if limit is not None:
        quotas = [{"QuotaName": "ml.p5.48xlarge for cluster usage", "Value": limit}]
    stubber.add_response("list_aws_default_service_quotas", {"Quotas": quotas}, {"ServiceCode": "sagemaker"})
    stubber.activate()
    monkeypatch.setattr(
        common_aws, "client", lambda service, region=None: client if "quotas" in service else real(service, region)
    )
    selector = {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    needs = Needs(pod={"spec": {"nodeSelector": selector, "containers": []}}, num_pods=2)
    facts = ask(made["endpoint"], REGION, "team", instance_of(needs))
    stubber.assert_no_pending_responses()
    (result,) = [one for one in check_aws(facts, snapshot(), needs) if one.check == "hyperpod-quota"]
    assert result.status == status
    assert "ml.p5.48xlarge" in result.summary


EKSCTL = """\
#!{python}
import boto3, sys, yaml
config = yaml.safe_load(open(sys.argv[4]))
network = {{"subnetIds": ["subnet-1", "subnet-2"], "securityGroupIds": ["sg-1"]}}
role = "arn:aws:iam::123456789012:role/eks"
eks = boto3.client("eks", region_name=config["metadata"]["region"])
eks.create_cluster(name=config["metadata"]["name"], version="1.33", roleArn=role, resourcesVpcConfig=network)
"""


@pytest.mark.slow
def test_the_seeds_make_a_cluster_that_is_missing_and_use_it(aws, tmp_path, monkeypatch):
    """eksctl's part is to make the cluster; here it does so at moto's EKS."""
    program = tmp_path / "eksctl"
    program.write_text(EKSCTL.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    options = {"region": REGION, "validate_components": False, "infrastructure_type": "cloudformation"}
    with pytest.raises(UserError) as caught:
        manage_eks_cluster("absent", **options)
    assert caught.value.error_code == "no-such-cluster"
    made = manage_eks_cluster("absent", **options, create_if_missing=True, verbose=False)
    assert made.created is not None
    assert made.context.endswith(f"{REGION}:123456789012:cluster/absent")
    again = manage_eks_cluster("absent", **options, create_if_missing=True)
    assert (again.created, again.context) == (None, made.context)
