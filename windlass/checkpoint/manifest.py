"""The manifest: what a checkpoint holds and how to prove it. A checkpoint without one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from windlass.common.files import json_digest

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata"  # torch DCP's own description of the tensors: a pickle
SHA256 = re.compile(r"[0-9a-f]{64}")
LARGEST = 2**63 - 1
LONGEST_NAME = 255
BLOCK_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class FileRecord:
    size: int
    sha256: str
    blocks: tuple[str, ...] = ()  # SHA-256 of every BLOCK_BYTES, to prove a part alone; of older checkpoints: none

    def as_dict(self) -> dict[str, Any]:
        blocks = {"blocks": list(self.blocks)} if self.blocks else {}
        return {"size": self.size, "sha256": self.sha256, **blocks}


@dataclass(frozen=True)
class Manifest:
    step: int
    tokens: int  # trained on so far
    files: dict[str, FileRecord]
    model: dict[str, Any]  # fingerprint, num_parameters, config
    order: dict[str, Any]  # what the data order depends on; a resume must agree with it
    data_state: dict[str, Any] | None = None  # reading position of a stream
    world_size: int = 1
    created: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    layout: dict[str, Any] | None = None  # of checkpoints in pieces: how the state lay on the ranks
    validation: dict[str, Any] | None = None  # which validation was the best so far, and how many came since
    sequences: int | None = None  # read so far; None, from before this was recorded: step × order["global_batch"]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())

    def to_json(self) -> str:
        files = {name: record.as_dict() for name, record in self.files.items()}
        body = {"format": FORMAT_VERSION, **asdict(replace(self, files={})), "files": files}
        for key in ("layout", "validation", "sequences"):
            if body[key] is None:
                del body[key]
        return json.dumps({"checksum": json_digest(body), **body}, indent=1)

    @property
    def sequences_read(self) -> int:
        """Where the order of the data stands, in sequences: a run's global batch may have changed on the way."""
        return self.step * int(self.order.get("global_batch") or 0) if self.sequences is None else self.sequences

    @classmethod
    def parse(cls, text: str, *, step: int | None = None) -> Manifest:
        """From text that anybody may have written: a pod, a bucket, a folder. ValueError says what is wrong with it.

        The checksum finds damage, not intent: it has no key. So every value is checked, the names of files above all:
        each is joined to a folder on this machine. With `step`, the manifest must be of that step.
        """
        body = _parse_json(text)
        if not isinstance(body, dict) or body.pop("checksum", None) != json_digest(body):
            raise ValueError("its own checksum does not match: it was changed or damaged")
        if body.pop("format", None) != FORMAT_VERSION:
            raise ValueError("it was written by another version of windlass")
        known = {attribute.name for attribute in fields(cls)}
        if not body.keys() <= known:
            raise ValueError(f"it was written by another version of windlass: {min(body.keys() - known)!r} is unknown")
        for key, (expected, is_right) in VALUES.items():
            if (key in body or key in REQUIRED) and not is_right(body.get(key)):
                raise ValueError(f"its {key!r} is {str(body.get(key))[:60]!r}: not {expected}")
        manifest = cls(files=_parse_files(body.pop("files")), **body)
        if manifest.layout is not None:
            _check_pieces(manifest)
        if step is not None and manifest.step != step:
            raise ValueError(f"it is of step {manifest.step}: the checkpoint was renamed or copied")
        return manifest


def piece_name(rank: int) -> str:
    """The file of one rank in a checkpoint in pieces."""
    return f"rank-{rank:04d}.safetensors"


def is_plain_file_name(name: object) -> bool:
    """Whether a name, joined to a folder, is a file directly in that folder, on any system."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..", MANIFEST_NAME)
        and name.isprintable()
        and not any(mark in name for mark in "/\\")
        and len(name.encode()) <= LONGEST_NAME
    )


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply to be a manifest") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("it names something twice")
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _parse_files(records: dict[str, Any]) -> dict[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    for name, record in records.items():
        if not is_plain_file_name(name):
            raise ValueError(f"{name[:80]!r} is not a file name that a checkpoint can have")
        if not _is_record(record):
            raise ValueError(f"what it says of {name!r} is not a size and a SHA-256")
        files[name] = FileRecord(record["size"], record["sha256"], tuple(record.get("blocks", ())))
    if len({name.casefold() for name in files}) != len(files):
        raise ValueError("it names a file twice, in capitals and in small letters")
    return files


def _is_record(record: object) -> bool:
    if not isinstance(record, dict) or record.keys() - {"blocks"} != {"size", "sha256"}:
        return False
    blocks = record.get("blocks", [])
    return (
        _is_count(record["size"])
        and isinstance(blocks, list)
        and all(isinstance(digest, str) and SHA256.fullmatch(digest) for digest in (record["sha256"], *blocks))
        and (not blocks or len(blocks) == -(-record["size"] // BLOCK_BYTES))
    )


def _check_pieces(manifest: Manifest) -> None:
    """A checkpoint in pieces has one file for every rank and no other."""
    names = manifest.files.keys()
    if len(names) != manifest.world_size or names != {piece_name(rank) for rank in range(len(names))}:
        raise ValueError(f"it is of {manifest.world_size} ranks, but its files are not one piece for each")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_validation(value: object) -> bool:
    if not isinstance(value, dict):
        return value is None
    counts = ("best_step", "last_step", "without_best")
    return (
        value.keys() == {*counts, "best_loss"}
        and all(_is_count(value[key]) for key in counts)
        and _is_time(value["best_loss"])
    )


REQUIRED = ("step", "tokens", "files", "model", "order")
VALUES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "step": ("a count", _is_count),
    "tokens": ("a count", _is_count),
    "files": ("an object", _is_object),
    "model": ("an object", _is_object),
    "order": ("an object", _is_object),
    "data_state": ("an object", lambda value: value is None or _is_object(value)),
    "world_size": ("a count of ranks", lambda value: _is_count(value) and value != 0),
    "created": ("a time", _is_time),
    "versions": ("an object", _is_object),
    "layout": ("an object", lambda value: value is None or _is_object(value)),
    "validation": ("a validation", _is_validation),
    "sequences": ("a count", lambda value: value is None or _is_count(value)),
}


class Hashing:
    """The record of a file, made while it is written or read."""

    def __init__(self) -> None:
        self.size = 0
        self._whole, self._block = hashlib.sha256(), hashlib.sha256()
        self._blocks: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._whole.update(view)
        while view:
            part = view[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._block.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK_BYTES == 0:
                self._blocks.append(self._block.hexdigest())
                self._block = hashlib.sha256()

    def record(self) -> FileRecord:
        last = [self._block.hexdigest()] if self.size % BLOCK_BYTES else []
        return FileRecord(self.size, self._whole.hexdigest(), (*self._blocks, *last))


def hash_file(path: Path) -> FileRecord:
    """The record of a file, with the proofs of its blocks."""
    hashing = Hashing()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            hashing.update(data)
    return hashing.record()
