"""Amazon ECR: the repository, made as it should be where it is missing, and a token to push with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from windlass.common.aws import asking, client, error_code
from windlass.image.registry.credentials import Credentials

HOST = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|on\.aws|amazonaws\.\w+)"
)
UNTAGGED_DAYS = 14


@dataclass(frozen=True)
class EcrHost:
    """A private registry of ECR."""

    account: str
    region: str

    @classmethod
    def of(cls, registry: str | None) -> EcrHost | None:
        match = HOST.fullmatch(registry or "")
        return cls(match["account"], match["region"]) if match else None


@dataclass(frozen=True)
class EcrRepository:
    """How a repository stands."""

    name: str
    created: bool
    warnings: tuple[str, ...] = ()


def lifecycle_policy() -> dict[str, Any]:
    """Untagged images go after two weeks."""
    return {
        "rules": [
            {
                "rulePriority": 1,
                "description": "images that no tag names",
                "selection": {
                    "tagStatus": "untagged",
                    "countType": "sinceImagePushed",
                    "countUnit": "days",
                    "countNumber": UNTAGGED_DAYS,
                },
                "action": {"type": "expire"},
            },
        ]
    }


def ensure_repository(host: EcrHost, name: str) -> EcrRepository:
    """The repository; created where it is missing: tags that cannot move, and a scan of every push.

    One that is there is not changed, but its gaps are named.
    """
    ecr = client("ecr", host.region)
    with asking(f"the ECR repository {name}"):
        present = _describe(ecr, host, name)
        if present is not None:
            return EcrRepository(name, False, _gaps(ecr, host, present))
        ecr.create_repository(
            registryId=host.account,
            repositoryName=name,
            imageTagMutability="IMMUTABLE",
            imageScanningConfiguration={"scanOnPush": True},
            encryptionConfiguration={"encryptionType": "AES256"},
            tags=[{"Key": "made-by", "Value": "windlass"}],
        )
        ecr.put_lifecycle_policy(
            registryId=host.account, repositoryName=name, lifecyclePolicyText=json.dumps(lifecycle_policy())
        )
    return EcrRepository(name, True)


def push_token(host: EcrHost) -> Credentials:
    """Good for twelve hours. It stays in this process, and in the memory of the builder."""
    with asking("a token for ECR"):
        answer = client("ecr", host.region).get_authorization_token(registryIds=[host.account])
    return Credentials.from_basic(answer["authorizationData"][0]["authorizationToken"])


def _describe(ecr: Any, host: EcrHost, name: str) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    try:
        answer = ecr.describe_repositories(registryId=host.account, repositoryNames=[name])
    except ClientError as error:
        if error_code(error) == "RepositoryNotFoundException":
            return None
        raise
    repository: dict[str, Any] = answer["repositories"][0]
    return repository


def _gaps(ecr: Any, host: EcrHost, repository: dict[str, Any]) -> tuple[str, ...]:
    from botocore.exceptions import ClientError

    name = repository["repositoryName"]
    gaps = []
    if repository.get("imageTagMutability") != "IMMUTABLE":
        command = f"aws ecr put-image-tag-mutability --repository-name {name} --image-tag-mutability IMMUTABLE"
        gaps.append(f"tags of {name} can move: {command}")
    if not repository.get("imageScanningConfiguration", {}).get("scanOnPush"):
        setting = "--image-scanning-configuration scanOnPush=true"
        gaps.append(
            f"{name} scans nothing: aws ecr put-image-scanning-configuration --repository-name {name} {setting}"
        )
    try:
        ecr.get_lifecycle_policy(registryId=host.account, repositoryName=name)
    except ClientError as error:
        if error_code(error) != "LifecyclePolicyNotFoundException":
            raise
        gaps.append(f"{name} has no lifecycle policy: its untagged images stay, and cost, for ever")
    return tuple(gaps)
