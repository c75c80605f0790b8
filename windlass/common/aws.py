"""AWS: clients, made late, and their errors as ours."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Errors of AWS inside become errors that a user can act on."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except NoCredentialsError as error:
        raise UserError(
            f"{what}: AWS does not know who you are", evidence=str(error), fix="aws sso login    or aws configure"
        ) from None
    except ClientError as error:
        values = error.response.get("Error", {})
        code = values.get("Code", "")
        refused = any(word in code for word in ("AccessDenied", "Unauthorized", "NotAuthorized"))
        expired = any(word in code for word in ("Expired", "InvalidClientToken", "UnrecognizedClient"))
        raise UserError(
            f"{what}: AWS answers {code}",
            evidence=values.get("Message") or str(error),
            cause="the role may not do that" if refused else "the credentials have expired" if expired else None,
            fix=f"allow {error.operation_name} to the role" if refused else "aws sso login" if expired else None,
            exit_code=ExitCode.FAILED,
        ) from None
    except BotoCoreError as error:
        raise UserError(f"{what}: AWS does not answer", evidence=str(error), exit_code=ExitCode.FAILED) from None


def error_code(error: Exception) -> str:
    """Of a ClientError of botocore."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def account_of(region: str | None) -> str:
    with asking("your AWS account"):
        return str(client("sts", region).get_caller_identity()["Account"])
