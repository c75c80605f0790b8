"""Make what CodeBuild needs, by the requests that `infrastructure` prints; what is there already stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from windlass.image.aws.client import asking, client, error_code
from windlass.image.aws.infrastructure import Infrastructure, requests

ALREADY_THERE = frozenset(
    (
        "RepositoryAlreadyExistsException",
        "BucketAlreadyOwnedByYou",
        "EntityAlreadyExists",
        "ResourceAlreadyExistsException",
    )
)
ROLE_SECONDS = 60  # a new role is not known everywhere at once


def account_of(region: str | None) -> str:
    with asking("your AWS account"):
        return str(client("sts", region).get_caller_identity()["Account"])


def provision(
    of: Infrastructure, tell: Callable[[str], None], *, wait: Callable[[float], None] = time.sleep
) -> list[dict[str, Any]]:
    """One line for every request, and whether it made something."""
    done = []
    for one in requests(of):
        made = _send(one, of.region, wait)
        service, operation = one["service"], one["operation"]
        tell(f"{'made' if made else 'there already':<14} {service} {operation}")
        done.append({"service": service, "operation": operation, "made": made})
    return done


def _send(one: dict[str, Any], region: str, wait: Callable[[float], None]) -> bool:
    from botocore.exceptions import ClientError

    api = client(one["service"], region)
    waited = 0.0
    with asking(f"{one['service']} {one['operation']}"):
        while True:
            try:
                getattr(api, one["operation"])(**one["parameters"])
            except ClientError as error:
                if error_code(error) in ALREADY_THERE:
                    return False
                role_is_new = one["service"] == "codebuild" and "assume" in str(error).lower()
                if not role_is_new or waited >= ROLE_SECONDS:
                    raise
                waited += 5
                wait(5)
            else:
                return True
