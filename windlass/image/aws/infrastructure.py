"""What CodeBuild needs in an AWS account, as CloudFormation, as Terraform and as plain requests. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from windlass.image.aws.codebuild import ENVIRONMENTS
from windlass.image.aws.ecr import lifecycle_policy, repository_request

FORMATS = ("cloudformation", "terraform", "requests")
KEPT_DAYS = 14
# A project must have a buildspec; every build of ours brings its own, and one without it shall fail.
NO_BUILDSPEC = "version: 0.2\nphases: {build: {commands: ['false']}}\n"
COMPUTE = ("SMALL", "MEDIUM", "LARGE", "XLARGE", "2XLARGE")
PUSH = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:CompleteLayerUpload",
    "ecr:DescribeImages",
    "ecr:GetDownloadUrlForLayer",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
)


@dataclass(frozen=True)
class Infrastructure:
    """A CodeBuild project with its role, a bucket for what goes in, and the repository for what comes out."""

    name: str
    repository: str
    bucket: str
    region: str
    account: str
    platform: str = "linux/amd64"
    compute: str = "LARGE"
    minutes: int = 120
    partition: str = "aws"

    @property
    def source(self) -> str:
        """A project must name one; every build brings its own."""
        return f"{self.bucket}/windlass/context.zip"

    def arn(self, service: str, rest: str) -> str:
        """Buckets are named in the whole world, roles in an account, everything else in a region."""
        where = {"s3": ":", "iam": f":{self.account}"}.get(service, f"{self.region}:{self.account}")
        return f"arn:{self.partition}:{service}:{where}:{rest}"


def trust() -> dict[str, Any]:
    statement = {"Effect": "Allow", "Principal": {"Service": "codebuild.amazonaws.com"}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def permissions(of: Infrastructure) -> dict[str, Any]:
    """No more than one build needs."""
    log_group = of.arn("logs", f"log-group:/aws/codebuild/{of.name}")
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"],
                "Resource": [log_group, f"{log_group}:*"],
            },
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:GetObjectVersion", "s3:PutObject"],
                "Resource": [of.arn("s3", f"{of.bucket}/windlass/*")],
            },
            # Tokens are for a whole account: AWS knows no narrower resource.
            {"Effect": "Allow", "Action": ["ecr:GetAuthorizationToken"], "Resource": ["*"]},
            {
                "Effect": "Allow",
                "Action": list(PUSH),
                "Resource": [of.arn("ecr", f"repository/{of.repository}")],
            },
        ],
    }


def requests(of: Infrastructure) -> list[dict[str, Any]]:
    """The calls that `--apply` makes, in order: what is printed is what is sent."""
    kind, image = ENVIRONMENTS[of.platform]
    location = {} if of.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": of.region}}
    expire = {"ID": "old-contexts", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": KEPT_DAYS}}
    closed = dict.fromkeys(("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True)
    return [
        _call("ecr", "create_repository", repository_request(of.repository)),
        _call(
            "ecr",
            "put_lifecycle_policy",
            {"repositoryName": of.repository, "lifecyclePolicyText": json.dumps(lifecycle_policy())},
        ),
        _call("s3", "create_bucket", {"Bucket": of.bucket, **location}),
        _call("s3", "put_public_access_block", {"Bucket": of.bucket, "PublicAccessBlockConfiguration": closed}),
        _call(
            "s3",
            "put_bucket_lifecycle_configuration",
            {"Bucket": of.bucket, "LifecycleConfiguration": {"Rules": [expire]}},
        ),
        _call("iam", "create_role", {"RoleName": of.name, "AssumeRolePolicyDocument": json.dumps(trust())}),
        _call(
            "iam",
            "put_role_policy",
            {"RoleName": of.name, "PolicyName": "build", "PolicyDocument": json.dumps(permissions(of))},
        ),
        _call(
            "codebuild",
            "create_project",
            {
                "name": of.name,
                "source": {"type": "S3", "location": of.source, "buildspec": NO_BUILDSPEC},
                "artifacts": {"type": "NO_ARTIFACTS"},
                "cache": {"type": "LOCAL", "modes": ["LOCAL_DOCKER_LAYER_CACHE"]},
                "environment": {
                    "type": kind,
                    "image": image,
                    "computeType": f"BUILD_GENERAL1_{of.compute}",
                    "privilegedMode": True,
                },
                "serviceRole": of.arn("iam", f"role/{of.name}"),
                "timeoutInMinutes": of.minutes,
                "tags": [{"key": "made-by", "value": "windlass"}],
            },
        ),
    ]


def cloudformation(of: Infrastructure) -> dict[str, Any]:
    kind, image = ENVIRONMENTS[of.platform]
    closed = dict.fromkeys(("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True)
    rule = {"Id": "old-contexts", "Status": "Enabled", "ExpirationInDays": KEPT_DAYS}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "CodeBuild project that builds and proves training images for windlass",
        "Resources": {
            "Repository": {
                "Type": "AWS::ECR::Repository",
                "DeletionPolicy": "Retain",
                "UpdateReplacePolicy": "Retain",
                "Properties": {
                    "RepositoryName": of.repository,
                    "ImageTagMutability": "IMMUTABLE",
                    "ImageScanningConfiguration": {"ScanOnPush": True},
                    "LifecyclePolicy": {"LifecyclePolicyText": json.dumps(lifecycle_policy())},
                },
            },
            "Contexts": {
                "Type": "AWS::S3::Bucket",
                "Properties": {
                    "BucketName": of.bucket,
                    "PublicAccessBlockConfiguration": closed,
                    "LifecycleConfiguration": {"Rules": [rule]},
                },
            },
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "RoleName": of.name,
                    "AssumeRolePolicyDocument": trust(),
                    "Policies": [{"PolicyName": "build", "PolicyDocument": permissions(of)}],
                },
            },
            "Project": {
                "Type": "AWS::CodeBuild::Project",
                "Properties": {
                    "Name": of.name,
                    "ServiceRole": {"Fn::GetAtt": ["Role", "Arn"]},
                    "Source": {"Type": "S3", "Location": of.source, "BuildSpec": NO_BUILDSPEC},
                    "Artifacts": {"Type": "NO_ARTIFACTS"},
                    "Cache": {"Type": "LOCAL", "Modes": ["LOCAL_DOCKER_LAYER_CACHE"]},
                    "Environment": {
                        "Type": kind,
                        "Image": image,
                        "ComputeType": f"BUILD_GENERAL1_{of.compute}",
                        "PrivilegedMode": True,
                    },
                    "TimeoutInMinutes": of.minutes,
                },
            },
        },
        "Outputs": {
            "RepositoryUri": {"Value": {"Fn::GetAtt": ["Repository", "RepositoryUri"]}},
            "Bucket": {"Value": {"Ref": "Contexts"}},
            "Project": {"Value": {"Ref": "Project"}},
        },
    }


def terraform(of: Infrastructure) -> dict[str, Any]:
    """In Terraform's JSON syntax: write it to windlass-image.tf.json."""
    kind, image = ENVIRONMENTS[of.platform]
    repository, bucket = "${aws_ecr_repository.images.name}", "${aws_s3_bucket.contexts.id}"
    closed = dict.fromkeys(
        ("block_public_acls", "ignore_public_acls", "block_public_policy", "restrict_public_buckets"), True
    )
    return {
        "terraform": {"required_providers": {"aws": {"source": "hashicorp/aws", "version": ">= 5.0"}}},
        "provider": {"aws": {"region": of.region}},
        "resource": {
            "aws_ecr_repository": {
                "images": {
                    "name": of.repository,
                    "image_tag_mutability": "IMMUTABLE",
                    "image_scanning_configuration": {"scan_on_push": True},
                }
            },
            "aws_ecr_lifecycle_policy": {
                "images": {"repository": repository, "policy": json.dumps(lifecycle_policy())}
            },
            "aws_s3_bucket": {"contexts": {"bucket": of.bucket}},
            "aws_s3_bucket_public_access_block": {"contexts": {"bucket": bucket, **closed}},
            "aws_s3_bucket_lifecycle_configuration": {
                "contexts": {
                    "bucket": bucket,
                    "rule": {
                        "id": "old-contexts",
                        "status": "Enabled",
                        "filter": {},
                        "expiration": {"days": KEPT_DAYS},
                    },
                }
            },
            "aws_iam_role": {"build": {"name": of.name, "assume_role_policy": json.dumps(trust())}},
            "aws_iam_role_policy": {
                "build": {"name": "build", "role": "${aws_iam_role.build.id}", "policy": json.dumps(permissions(of))}
            },
            "aws_codebuild_project": {
                "images": {
                    "name": of.name,
                    "service_role": "${aws_iam_role.build.arn}",
                    "build_timeout": of.minutes,
                    "artifacts": {"type": "NO_ARTIFACTS"},
                    "cache": {"type": "LOCAL", "modes": ["LOCAL_DOCKER_LAYER_CACHE"]},
                    "environment": {
                        "type": kind,
                        "image": image,
                        "compute_type": f"BUILD_GENERAL1_{of.compute}",
                        "privileged_mode": True,
                    },
                    "source": {"type": "S3", "location": of.source, "buildspec": NO_BUILDSPEC},
                }
            },
        },
        "output": {
            "repository": {"value": "${aws_ecr_repository.images.repository_url}"},
            "bucket": {"value": bucket},
            "project": {"value": "${aws_codebuild_project.images.name}"},
        },
    }


def _call(service: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"service": service, "operation": operation, "parameters": parameters}
