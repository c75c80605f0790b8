"""Amazon ECR: the repository, made as it should be where it is missing, and a token to push with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from windlass.common.aws import asking, client
from windlass.image.registry.credentials import Credentials

HOST = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|on\.aws|amazonaws\.\w+)"
)


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


def template() -> dict[str, Any]:
    """CloudFormation's, of everything that CodeBuild needs in an account."""
    values: dict[str, Any] = json.loads(resources.files(__package__).joinpath("codebuild.json").read_text())
    return values


def ensure_repository(host: EcrHost, name: str) -> EcrRepository:
    """The repository; created where it is missing: tags that cannot move, and a scan of every push.

    One that is there is not changed, but its gaps are named.
    """
    ecr = client("ecr", host.region)
    with asking(f"the ECR repository {name}"):
        try:
            present = ecr.describe_repositories(registryId=host.account, repositoryNames=[name])["repositories"][0]
            return EcrRepository(name, False, tuple(_gaps(ecr, host, present)))
        except ecr.exceptions.RepositoryNotFoundException:
            pass
        ecr.create_repository(
            registryId=host.account,
            repositoryName=name,
            imageTagMutability="IMMUTABLE",
            imageScanningConfiguration={"scanOnPush": True},
            encryptionConfiguration={"encryptionType": "AES256"},
            tags=[{"Key": "made-by", "Value": "windlass"}],
        )
        policy = template()["Resources"]["Images"]["Properties"]["LifecyclePolicy"]["LifecyclePolicyText"]
        ecr.put_lifecycle_policy(registryId=host.account, repositoryName=name, lifecyclePolicyText=policy)
    return EcrRepository(name, True)


def push_token(host: EcrHost) -> Credentials:
    """Good for twelve hours. It stays in this process, and in the memory of the builder."""
    with asking("a token for ECR"):
        answer = client("ecr", host.region).get_authorization_token(registryIds=[host.account])
    return Credentials.from_basic(answer["authorizationData"][0]["authorizationToken"])


def _gaps(ecr: Any, host: EcrHost, repository: dict[str, Any]) -> Iterator[str]:
    name = repository["repositoryName"]
    if repository.get("imageTagMutability") != "IMMUTABLE":
        command = f"aws ecr put-image-tag-mutability --repository-name {name} --image-tag-mutability IMMUTABLE"
        yield f"tags of {name} can move: {command}"
    if not repository.get("imageScanningConfiguration", {}).get("scanOnPush"):
        setting = "--image-scanning-configuration scanOnPush=true"
        yield f"{name} scans nothing: aws ecr put-image-scanning-configuration --repository-name {name} {setting}"
    try:
        ecr.get_lifecycle_policy(registryId=host.account, repositoryName=name)
    except ecr.exceptions.LifecyclePolicyNotFoundException:
        yield f"{name} has no lifecycle policy: its untagged images stay, and cost, for ever"
