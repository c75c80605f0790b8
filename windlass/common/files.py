"""Files that survive crashes: replaced whole, appended line by line, read though others write them; and the cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from windlass.errors import UserError

MOST_RECORD_BYTES = 16 * 1024 * 1024
CACHE_VARIABLE = "WINDLASS_CACHE"


def cache_root() -> Path:
    """The folder that all runs of this machine share: $WINDLASS_CACHE, else below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "windlass"


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that a user named: whole, or as it was. A pipe or a device is written to, a link is followed."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # before links are followed: /dev/stdout leads to a pipe without a path
        path.write_bytes(data)
        return
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise UserError(f"there is no folder {place.parent}", fix=f"mkdir -p {place.parent}")
    try:
        write_atomically(place, data, mode=place.stat().st_mode & 0o777 if place.exists() else 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENAMETOOLONG):
            raise
        path.write_bytes(data)  # no other file fits beside it, or it cannot be replaced: it is a mount of its own, say


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace `path` by `content` so that a reader sees the old or the new content, also after a crash.

    `mode` is that of the new file, less the umask: from its first byte on.
    """
    # containers that share a volume often share process numbers too
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk, say: it must not fill up with attempts
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames, new files and deletions in a folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_digest(text: str) -> str:
    """A short file name for something with a long name."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON has it, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record, whole or not at all, starting on a new line even after a torn one."""
    append_lines(path, [json.dumps(record, allow_nan=False, separators=(",", ":"), default=str)])


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines in one write. Where the disk has no room for all of them, OSError, and none is there."""
    data = "".join(f"{line}\n" for line in lines).encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        _append_all(handle, data)
    finally:
        os.close(handle)


def _append_all(handle: int, data: bytes) -> None:
    rest = data
    try:
        while rest:  # a disk that becomes full takes a part, and refuses the rest
            rest = rest[os.write(handle, rest) :]
    except OSError:
        taken, end = len(data) - len(rest), os.lseek(handle, 0, os.SEEK_CUR)
        if taken and os.fstat(handle).st_size == end:  # nobody has appended since
            os.ftruncate(handle, end - taken)
        raise


def parse_record(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object of a line; None for a line torn by a crash, and for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file; a line torn by a crash is skipped."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in bounded_lines(file):
            record = parse_record(line)
            if record is not None:
                yield record


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. One that is longer than any record comes in pieces: memory stays bounded."""
    return iter(lambda: file.readline(MOST_RECORD_BYTES), b"")


# Values of records: written by other versions, cut off, or somebody else's. None stands for a value of a wrong type.


def whole(value: Any) -> int | None:
    """An integer of a record."""
    number = real(value)
    return int(value) if number is not None and abs(number) < 2**63 else None


def real(value: Any) -> float | None:
    """A finite number of a record."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def finite(value: Any) -> Any:
    """A value of JSON in which null stands for every number that is not finite, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def words(value: Any) -> str | None:
    """A text of a record that is not empty."""
    return value if isinstance(value, str) and value else None
