"""Files in folders and object stores, through one small interface. Used by checkpoints and data alike."""

from __future__ import annotations

import re
from pathlib import Path

from windlass.errors import UserError
from windlass.store.folder import FolderStore
from windlass.store.interface import Entry, Sink, Store, StoreOptions, Upload
from windlass.store.s3 import open_s3

__all__ = [
    "Entry",
    "FolderStore",
    "Sink",
    "Store",
    "StoreOptions",
    "Upload",
    "bucket_and_prefix",
    "is_store_url",
    "open_store",
]
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


def is_store_url(text: str) -> bool:
    """Whether `text` names an object store rather than a path here."""
    match = SCHEME.match(text)
    return match is not None and match[1] == "s3"


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """The store at `url`: `s3://BUCKET/PREFIX`, or the path of a folder. Finding credentials may send something."""
    match = SCHEME.match(url)
    if match is None or match[1] == "file":
        return FolderStore(Path(url.removeprefix("file://")))
    if match[1] != "s3":
        raise UserError(
            f"{url} is not a store that windlass can use",
            evidence=f"the scheme is {match[1]!r}",
            fix="s3://BUCKET/PREFIX (any S3-compatible service, by $AWS_ENDPOINT_URL), or the path of a folder",
        )
    bucket, prefix = bucket_and_prefix(url)
    return open_s3(bucket, prefix, options or StoreOptions())


def bucket_and_prefix(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not BUCKET.fullmatch(bucket):
        raise UserError(
            f"{url} names no bucket",
            evidence=f"{bucket!r} cannot be the name of one: 3 to 63 lower-case letters, digits, dots and hyphens",
            fix="s3://BUCKET/PREFIX",
        )
    return bucket, prefix.strip("/")
