"""What a store is: named files below one place, read and written whole or in ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MiB = 2**20


@dataclass(frozen=True)
class Entry:
    """One file of a store."""

    name: str  # relative to the store, with `/` between folders
    size: int
    modified: float  # seconds since the epoch
    version: str  # changes when the contents do: the ETag of an object store
    sha256: str | None = None  # of the contents, where the store was told it (`stat` only)


@dataclass(frozen=True)
class Upload:
    """An upload that was begun and neither completed nor given up; its parts take room that no listing shows."""

    name: str
    key: str
    begun: float


@dataclass(frozen=True)
class StoreOptions:
    """How a store is talked to. The defaults are right for S3 from inside its region."""

    endpoint: str | None = None  # None: $AWS_ENDPOINT_URL_S3, $AWS_ENDPOINT_URL, or the real S3
    region: str | None = None  # None: as boto3 finds it
    patience_s: float = 300.0  # longest that one request is tried again; then the error is shown
    first_delay_s: float = 0.2  # of the pause after a first failure; it doubles, with jitter
    part_bytes: int = 16 * MiB  # larger files go up and down in parts of this size
    parallel: int = 8  # parts of one file on their way at once
    timeout_s: float = 60.0  # without a byte from the store
    give_up: threading.Event | None = None  # while it is set, no request is begun or tried again


class Sink(Protocol):
    """Where a file's contents go as they are made."""

    def write(self, data: bytes | memoryview, /) -> int: ...


class Store(Protocol):
    """Names are relative, with `/`. A name that is not there is FileNotFoundError; what a user can act on is UserError.

    Every call is safe to use from several threads, and is tried again by itself when the store is busy or unreachable.
    """

    @property
    def url(self) -> str: ...

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """All files whose name begins with `prefix`, by name."""
        ...

    def folders(self, prefix: str = "") -> list[str]:
        """The folders directly below the folder `prefix` ("" or ending in "/"), each without its slash."""
        ...

    def stat(self, name: str) -> Entry | None:
        """What is known of a file; None if it is not there."""
        ...

    def read(self, name: str, start: int = 0, size: int | None = None, *, version: str | None = None) -> bytes:
        """`size` bytes from `start` on (to the end if None), never fewer unless the file ends.

        With a `version` (of an Entry), OSError if the file is another one by now.
        """
        ...

    def get(self, name: str, path: Path) -> Entry:
        """Copy a file to `path`, which then holds all of it or is not there."""
        ...

    def put(self, path: Path, name: str, *, sha256: str | None = None) -> Entry:
        """Copy a file to the store: there whole or not at all, checked by checksums. `sha256` is kept for `stat`."""
        ...

    def create(self, name: str, *, size: int) -> AbstractContextManager[Sink]:
        """Write a file while it is made, `size` bytes or a little more, with the memory of a few parts.

        It is there whole when the block is left, and not at all if that is by an error.
        """
        ...

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        """Put a small file in place at once. With `only_new`, False and nothing done if one of this name is there."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error."""
        ...

    def unfinished(self) -> list[Upload]:
        """Uploads that were begun and never ended."""
        ...

    def abort(self, upload: Upload) -> None:
        """Give back the room of an unfinished upload."""
        ...

    def below(self, prefix: str) -> Store:
        """The same store, its names taken below `prefix`."""
        ...
