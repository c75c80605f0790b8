"""What CodeBuild needs in an AWS account, as a CloudFormation template. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from windlass.image.aws.codebuild import ENVIRONMENTS
from windlass.image.aws.ecr import lifecycle_policy

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
            {"Effect": "Allow", "Action": list(PUSH), "Resource": [of.arn("ecr", f"repository/{of.repository}")]},
        ],
    }


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
