"""S3 and what speaks its protocol: parts in parallel, checksums on every part, conditional puts, bounded retries.

boto3 and not s3fs: beside boto3 and datasets pip resolves s3fs to the old 0.4.2, and what is needed here (a checksum
with every part, finding and aborting the uploads that a killed process left) is S3's own API, which boto3 is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from windlass.common.retrying import retried, within
from windlass.errors import UserError
from windlass.store.folder import FolderStore
from windlass.store.interface import Entry, Sink, Store, StoreOptions, Upload

Value = TypeVar("Value")
MOST_PARTS = 10_000
PARTS_IN_FLIGHT = 4  # of a file that is written while it is made
SHA256_KEY = "windlass-sha256"
DELETED_AT_ONCE = 1000
OBJECTS_MARK = {"NextContinuationToken": "ContinuationToken"}
UPLOADS_MARK = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
LONGEST_PAUSE_S = 20.0
NEVER = threading.Event()
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
MISSING = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}  # the file or upload, and not the bucket
ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}


def open_s3(bucket: str, prefix: str, options: StoreOptions) -> S3Store:
    try:
        import boto3
        import botocore.exceptions
        from botocore.config import Config
    except ImportError:
        raise UserError("s3:// needs boto3", fix="pip install 'windlass[aws]'") from None
    config = Config(
        retries={"total_max_attempts": 1},  # tried again here, where short bodies count too and the time is bounded
        connect_timeout=min(options.timeout_s, 10.0),
        read_timeout=options.timeout_s,
        max_pool_connections=max(10, 2 * options.parallel),
    )
    url = f"s3://{bucket}/{prefix}".rstrip("/")
    try:
        client = boto3.session.Session().client(
            "s3", endpoint_url=options.endpoint, region_name=options.region, config=config
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        known = in_words(error, url, options.endpoint or "S3")
        raise known or UserError(f"{url} cannot be opened", evidence=str(error)) from None
    return S3Store(bucket, prefix, options, client)


@dataclass(frozen=True)
class S3Store:
    bucket: str
    prefix: str
    options: StoreOptions
    client: Any = field(repr=False)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        for page in self._pages("list_objects_v2", OBJECTS_MARK, Prefix=self._key(prefix)):
            for item in page.get("Contents", ()):
                name = item["Key"][len(self._key("")) :]
                yield Entry(name, item["Size"], item["LastModified"].timestamp(), item["ETag"])

    def folders(self, prefix: str = "") -> list[str]:
        key = self._key(prefix)
        pages = self._pages("list_objects_v2", OBJECTS_MARK, Prefix=key, Delimiter="/")
        return [folder["Prefix"][len(key) : -1] for page in pages for folder in page.get("CommonPrefixes", ())]

    def stat(self, name: str) -> Entry | None:
        try:
            answer = self._request("head_object", Key=self._key(name))
        except FileNotFoundError:
            return None
        sha256 = answer.get("Metadata", {}).get(SHA256_KEY)
        return Entry(name, answer["ContentLength"], answer["LastModified"].timestamp(), answer["ETag"], sha256)

    def read(self, name: str, start: int = 0, size: int | None = None, *, version: str | None = None) -> bytes:
        if size == 0:
            return b""
        until = "" if size is None else str(start + size - 1)
        request: dict[str, Any] = {"Key": self._key(name)}
        if start or size is not None:
            request["Range"] = f"bytes={start}-{until}"
        if version is not None:
            request["IfMatch"] = version

        def body() -> bytes:
            answer = self.client.get_object(Bucket=self.bucket, **request)
            data: bytes = answer["Body"].read()
            if len(data) != answer["ContentLength"]:
                raise ShortBodyError(f"{len(data):,} of {answer['ContentLength']:,} bytes of {name} arrived")
            return data

        try:
            return self._retried(body)
        except _Refused as refusal:
            if refusal.status == 416:  # from the end on there is nothing
                return b""
            if refusal.status == 412:
                raise OSError(f"{self.url}/{name} changed while it was read") from None
            raise refusal.error from None

    def get(self, name: str, path: Path) -> Entry:
        entry = self.stat(name)
        if entry is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        step = self.options.part_bytes
        with FolderStore(path.parent).create(path.name, size=entry.size) as file:

            def fetch(start: int) -> None:
                data = self.read(name, start, min(step, entry.size - start), version=entry.version)
                if len(data) != min(step, entry.size - start):
                    raise OSError(f"{self.url}/{name} changed while it was read")
                os.pwrite(file.fileno(), data, start)

            self._in_parallel(fetch, range(0, entry.size, step))
        return entry

    def put(self, path: Path, name: str, *, sha256: str | None = None) -> Entry:
        size = path.stat().st_size
        metadata = {SHA256_KEY: sha256} if sha256 else {}
        step = max(self.options.part_bytes, -(-size // MOST_PARTS))
        if size <= step:
            data = path.read_bytes()
            answer = self._request(
                "put_object", Key=self._key(name), Body=data, ChecksumSHA256=_digest(data), Metadata=metadata
            )
        else:
            answer = self._put_in_parts(path, name, size, step, metadata)
        return Entry(name, size, time.time(), answer["ETag"], sha256)

    @contextlib.contextmanager
    def create(self, name: str, *, size: int) -> Iterator[Sink]:
        part_bytes = max(self.options.part_bytes, -(-size // MOST_PARTS * 2))  # `size` may be short of the truth
        sink = _PartSink(self, name, part_bytes)
        try:
            yield sink
            sink.finish()
        finally:
            sink.close()

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        condition = {"IfNoneMatch": "*"} if only_new else {}
        try:
            self._request("put_object", Key=self._key(name), Body=data, ChecksumSHA256=_digest(data), **condition)
        except FileExistsError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._key(name)} for name in names]
        for first in range(0, len(keys), DELETED_AT_ONCE):
            some = keys[first : first + DELETED_AT_ONCE]
            answer = self._request("delete_objects", Delete={"Objects": some, "Quiet": True})
            for problem in answer.get("Errors", ()):
                raise UserError(
                    f"{problem['Key']} of {self.url} cannot be deleted",
                    evidence=f"{problem.get('Code')}: {problem.get('Message')}",
                )

    def unfinished(self) -> list[Upload]:
        prefix = self._key("")
        pages = self._pages("list_multipart_uploads", UPLOADS_MARK, Prefix=prefix)
        return [
            Upload(item["Key"][len(prefix) :], item["UploadId"], item["Initiated"].timestamp())
            for page in pages
            for item in page.get("Uploads", ())
        ]

    def abort(self, upload: Upload) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request("abort_multipart_upload", Key=self._key(upload.name), UploadId=upload.key)

    def below(self, prefix: str) -> Store:
        return S3Store(self.bucket, self._key(prefix).strip("/"), self.options, self.client)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _pages(self, verb: str, marks: dict[str, str], **request: Any) -> Iterator[dict[str, Any]]:
        """Every page of a listing; `marks` are what asks for the next one, by the fields of an answer."""
        following: dict[str, str] = {}
        while True:
            page = self._request(verb, **request, **following)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page[field] for field, name in marks.items()}

    def _put_in_parts(self, path: Path, name: str, size: int, step: int, metadata: dict[str, str]) -> dict[str, Any]:
        upload = self._begin(name, metadata)
        try:
            with path.open("rb") as file:
                handle = file.fileno()

                def send(start: int) -> dict[str, Any]:
                    data = os.pread(handle, min(step, size - start), start)
                    return self._put_part(upload, start // step + 1, data)

                parts = self._in_parallel(send, range(0, size, step))
            return self._complete(upload, parts)
        except BaseException:
            self._abort_quietly(upload)
            raise

    def _begin(self, name: str, metadata: dict[str, str]) -> Upload:
        options = {"ChecksumAlgorithm": "SHA256", "Metadata": metadata}
        begun = self._request("create_multipart_upload", Key=self._key(name), **options)
        return Upload(name, begun["UploadId"], time.time())

    def _put_part(self, upload: Upload, number: int, data: bytes) -> dict[str, Any]:
        where = {"Key": self._key(upload.name), "UploadId": upload.key, "PartNumber": number}
        checksum = _digest(data)
        part = self._request("upload_part", **where, Body=data, ChecksumSHA256=checksum)
        return {"PartNumber": number, "ETag": part["ETag"], "ChecksumSHA256": checksum}

    def _complete(self, upload: Upload, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """A completion that was done but whose answer was lost is refused when it is asked for again: then what lies
        there must have the checksum of our parts. Another file may have as many of them.
        """
        where = {"Key": self._key(upload.name)}
        try:
            return self._request(
                "complete_multipart_upload", **where, UploadId=upload.key, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError:
            stored: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):
                stored = self._request("head_object", **where, ChecksumMode="ENABLED")
            digests = b"".join(base64.b64decode(part["ChecksumSHA256"]) for part in parts)
            if stored.get("ChecksumSHA256", "").partition("-")[0] != _digest(digests):  # "-N": of N parts
                raise
            return stored

    def _abort_quietly(self, upload: Upload) -> None:
        with contextlib.suppress(Exception):  # the first failure is the one to show; `unfinished` finds it again
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=self._key(upload.name), UploadId=upload.key)

    def _in_parallel(self, action: Callable[[int], Value], starts: range) -> list[Value]:
        if len(starts) <= 1:
            return [action(start) for start in starts]
        with ThreadPoolExecutor(min(self.options.parallel, len(starts)), thread_name_prefix="store") as threads:
            waiting = [threads.submit(action, start) for start in starts]
            try:
                return [part.result() for part in waiting]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _request(self, verb: str, **request: Any) -> dict[str, Any]:
        call = getattr(self.client, verb)
        try:
            answer: dict[str, Any] = self._retried(lambda: call(Bucket=self.bucket, **request))
        except _Refused as refusal:
            if refusal.status in (412, 409) and "IfNoneMatch" in request:
                raise FileExistsError(request["Key"]) from None
            raise refusal.error from None
        return answer

    def _retried(self, action: Callable[[], Value]) -> Value:
        give_up = self.options.give_up or NEVER

        def attempt() -> Value:
            if give_up.is_set():
                raise GivenUpError(f"{self.url} is not waited for any longer")
            return action()

        try:
            return retried(
                attempt,
                pause_after=within(
                    self.options.patience_s,
                    first_s=self.options.first_delay_s,
                    longest_s=LONGEST_PAUSE_S,
                    worth_retrying=lambda error: passes_by_itself(error) and not give_up.is_set(),
                ),
                sleep=give_up.wait,
            )
        except Exception as error:
            if code_of(error) in MISSING:
                raise FileNotFoundError(f"{self.url}: {error}") from None
            known = in_words(error, self.url, self.client.meta.endpoint_url)
            if known is None:
                raise
            if status_of(error) in (409, 412, 416):
                raise _Refused(status_of(error), known) from None
            raise known from error


class GivenUpError(OSError):
    """The caller has no more time for this store."""


class _PartSink:
    """A multipart upload that is fed while it runs: PARTS_IN_FLIGHT parts are in memory, and one that is being filled.

    What fits in one part is put in one request.
    """

    def __init__(self, store: S3Store, name: str, part_bytes: int) -> None:
        self.store, self.name, self.part_bytes = store, name, part_bytes
        self._filling = bytearray()
        self._upload: Upload | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._threads = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="store")

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            if len(self._filling) == self.part_bytes:  # only now: what ends with it may fit in one request
                self._send()
            part = view[: self.part_bytes - len(self._filling)]
            self._filling += part
            view = view[len(part) :]
        return size

    def finish(self) -> None:
        if self._upload is None:
            self.store.write(self.name, bytes(self._filling))
            return
        if self._filling:
            self._send()
        self.store._complete(self._upload, [part.result() for part in self._parts])
        self._upload = None

    def close(self) -> None:
        """Give up what is not finished: its parts take room that no listing shows."""
        self._threads.shutdown(cancel_futures=True)
        if self._upload is not None:
            self.store._abort_quietly(self._upload)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self.store._begin(self.name, {})
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()
        data, self._filling = bytes(self._filling), bytearray()
        self._parts.append(self._threads.submit(self.store._put_part, self._upload, len(self._parts) + 1, data))


class ShortBodyError(OSError):
    """Fewer bytes arrived than were announced."""


class _Refused(Exception):  # noqa: N818  (an answer, not a failure: the caller knows what it means)
    """The store said no to a condition of a request."""

    def __init__(self, status: int, error: UserError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


def _digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


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
