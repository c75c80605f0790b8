"""Files that text is read from: on this machine, or in an object store, where they are read range by range."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from windlass.errors import UserError
from windlass.store import Entry, Store, is_store_url, open_store

READ_AHEAD = 8 << 20
FINGERPRINT_BYTES = 1 << 16  # of a file's beginning and end


@dataclass(frozen=True)
class StoreFile:
    """A file in an object store, as it was when it was listed."""

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return self.url


InputFile = Path | StoreFile


def size_of(file: InputFile) -> int:
    return file.size if isinstance(file, StoreFile) else file.stat().st_size


def version_of(file: InputFile) -> str | None:
    return file.version if isinstance(file, StoreFile) else None


def file_fingerprint(path: InputFile) -> list[str | int]:
    """What tells a file's content apart without reading all of it."""
    if isinstance(path, StoreFile):
        return [path.url, path.size, path.version]
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, status.st_size - FINGERPRINT_BYTES))
            digest.update(file.read(FINGERPRINT_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read", evidence=str(error)) from None
    return [path.name, status.st_size, status.st_mtime_ns, digest.hexdigest()]


def open_input(path: str, version: str | None = None) -> BinaryIO:
    """A file by its path or URL, to read and seek in."""
    if not is_store_url(path):
        return open(path, "rb")
    store, name = store_and_name(path)
    entry = store.stat(name)
    if entry is None:
        raise FileNotFoundError(f"there is no {path}")
    return cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", _StoreReader(store, entry, version)), READ_AHEAD))


class _StoreReader(io.RawIOBase):
    """Ranges of a file in a store; what is asked for at once comes in one request."""

    def __init__(self, store: Store, entry: Entry, version: str | None) -> None:
        self._store, self._entry = store, entry
        self._version = version or entry.version
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._entry.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._entry.size - self._place)
        if size <= 0:
            return 0
        data = self._store.read(self._entry.name, self._place, size, version=self._version)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def store_and_name(url: str) -> tuple[Store, str]:
    bucket, _, name = url.removeprefix("s3://").partition("/")
    return bucket_store(bucket, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")), name


@lru_cache(maxsize=8)
def bucket_store(bucket: str, endpoint: str | None) -> Store:
    """Opening one takes a moment, and processes open it for every piece."""
    return open_store(f"s3://{bucket}")


def listed(url: str) -> list[StoreFile]:
    """The files that a URL names: one, those that match its pattern, or all below it."""
    store, name = store_and_name(url)
    bucket = url[: len(url) - len(name)].rstrip("/")
    if glob.has_magic(name):
        fixed = name[: min(name.index(mark) for mark in "*?[" if mark in name)]
        entries = [entry for entry in store.entries(fixed) if fnmatch.fnmatchcase(entry.name, name)]
    else:
        entry = store.stat(name) if name and not name.endswith("/") else None
        entries = [entry] if entry else list(store.entries(name.rstrip("/") + "/" if name.strip("/") else ""))
    return [StoreFile(f"{bucket}/{entry.name}", entry.size, entry.version) for entry in entries]


def nothing_at(url: str) -> UserError:
    store, name = store_and_name(url)
    parent = name.rstrip("/").rpartition("/")[0]
    near = [folder for folder, _ in zip(store.folders(f"{parent}/" if parent else ""), range(8), strict=False)]
    where = f"s3://{url.removeprefix('s3://').partition('/')[0]}/{parent}".rstrip("/")
    return UserError(
        f"there is nothing at {url}",
        evidence=f"folders in {where}: {', '.join(near)}" if near else f"there are no folders in {where}",
        fix=f"aws s3 ls {where}/",
    )
