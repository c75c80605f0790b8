"""AWS: clients, made late, and their errors as ours."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from windlass.errors import ExitCode, UserError


def client(service: str, region: str | None = None) -> Any:
    """A boto3 client. Credentials and endpoints come from where boto3 finds them."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise UserError("AWS needs boto3, which is not installed", fix="pip install 'windlass[aws]'") from None
    try:
        return boto3.client(service, region_name=region)
    except BotoCoreError as error:
        raise UserError(
            f"no client for {service}", evidence=str(error), fix="--region REGION    or AWS_REGION"
        ) from None


# Parts of error codes, what they mean, and what helps.
REASONS = (
    (("AccessDenied", "Unauthorized", "NotAuthorized"), "the role may not do that", "allow {operation} to the role"),
    (("Expired", "InvalidClientToken", "UnrecognizedClient"), "the credentials have expired", "aws sso login"),
    (
        ("Throttl", "TooManyRequests", "RequestLimitExceeded", "SlowDown"),
        "too many requests of this account at once; windlass has already waited and tried again",
        "again in a minute, or AWS_MAX_ATTEMPTS=10",
    ),
)
ACCOUNT = re.compile(r"(?<!\d)\d{12}(?!\d)")
ENDPOINT_REGION = re.compile(r"\.([a-z]{2}(?:-[a-z]+)+-\d+)\.")


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Errors of AWS inside become errors that a user can act on. Refusals name ARNs: account numbers are left out."""
    from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, NoCredentialsError

    try:
        yield
    except NoCredentialsError as error:
        raise UserError(
            f"{what}: AWS does not know who you are", evidence=str(error), fix="aws sso login    or aws configure"
        ) from None
    except ClientError as error:
        values = error.response.get("Error", {})
        code = values.get("Code", "")
        reasons = (reason for reason in REASONS if any(word in code for word in reason[0]))
        _, cause, fix = next(reasons, (None, None, ""))
        raise UserError(
            f"{what}: AWS answers {code}",
            evidence=ACCOUNT.sub("ACCOUNT", values.get("Message") or str(error)),
            cause=cause,
            fix=fix.format(operation=error.operation_name) or None,
            exit_code=ExitCode.FAILED,
        ) from None
    except EndpointConnectionError as error:
        region = ENDPOINT_REGION.search(str(error))
        raise UserError(
            f"{what}: AWS does not answer",
            evidence=str(error),
            cause=f"there is no network, or no such service in {region[1]}" if region else "there is no network",
            fix="--region REGION    or AWS_REGION" if region else None,
            exit_code=ExitCode.FAILED,
        ) from None
    except BotoCoreError as error:
        raise UserError(
            f"{what}: AWS does not answer", evidence=ACCOUNT.sub("ACCOUNT", str(error)), exit_code=ExitCode.FAILED
        ) from None


def error_code(error: Exception) -> str:
    """Of a ClientError of botocore."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def account_of(region: str | None) -> str:
    with asking("your AWS account"):
        return str(client("sts", region).get_caller_identity()["Account"])
