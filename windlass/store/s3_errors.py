"""Which failures of S3 pass by themselves, and what the others mean to a user."""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.store.retrying import ShortBodyError

BUSY = {
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "OperationAborted",
    "BadDigest",  # the body was damaged on its way
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
}
CREDENTIALS = {
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AllAccessDisabled",
    "403",
}
ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}


def code_of(error: BaseException) -> str:
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)


def passes_by_itself(error: BaseException) -> bool:
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if isinstance(error, boto.ClientError):
        return code_of(error) in BUSY or status_of(error) >= 500 or status_of(error) == 429
    return isinstance(
        error,
        ShortBodyError
        | boto.HTTPClientError  # connections reset, timed out; bodies cut off
        | boto.ConnectionError  # refused, or no way there
        | boto.IncompleteReadError
        | ResponseParserError
        | boto.FlexibleChecksumError
        | ConnectionError
        | TimeoutError,
    )


def is_missing(error: BaseException) -> bool:
    """The file is not there (and not: the bucket is not there)."""
    return code_of(error) in ("NoSuchKey", "404", "NotFound") and code_of(error) != "NoSuchBucket"


def in_words(error: BaseException, url: str, endpoint: str) -> UserError | None:
    """What a user can do about a failure of S3; None if nothing is known."""
    from botocore import exceptions as boto

    bucket = url.removeprefix("s3://").partition("/")[0]
    code, evidence = code_of(error), f"{endpoint}: {error}"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return UserError(
            f"no credentials for {url}",
            evidence=str(error),
            fix="aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
        )
    if isinstance(error, boto.ProfileNotFound):
        return UserError(f"no credentials for {url}", evidence=str(error), fix="aws configure list-profiles")
    if code == "NoSuchBucket":
        return UserError(f"there is no bucket {bucket}", evidence=evidence, fix=f"aws s3 mb s3://{bucket}")
    if code in ELSEWHERE or status_of(error) == 301:
        return UserError(
            f"the bucket {bucket} is in another region",
            evidence=evidence,
            fix=f"set AWS_REGION to what    aws s3api get-bucket-location --bucket {bucket}    says",
        )
    if code in CREDENTIALS or status_of(error) == 403:
        return UserError(
            f"access to {url} is denied",
            evidence=evidence,
            cause="the credentials in use may not get, put, delete and list there, or are expired",
            fix="aws sts get-caller-identity    says whose credentials are in use",
        )
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return UserError(
            f"{url} cannot be reached",
            evidence=evidence,
            cause="the endpoint is down or wrong, or there is no way to it from here",
            fix="AWS_ENDPOINT_URL names the endpoint of an S3-compatible service",
        )
    if isinstance(error, boto.ClientError) and (status_of(error) >= 500 or code in BUSY):
        return UserError(
            f"{url} does not answer properly",
            evidence=evidence,
            cause="the store failed again and again",
            fix="try later",
        )
    if isinstance(error, boto.ClientError | boto.BotoCoreError):
        return UserError(f"{url} refused a request", evidence=evidence)
    return None
