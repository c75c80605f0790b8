"""The manifest: what a checkpoint holds and how to prove it. A checkpoint without one is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    size: int
    sha256: str


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

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())

    def to_json(self) -> str:
        body = {"format": FORMAT_VERSION, **asdict(self)}
        if self.layout is None:
            del body["layout"]
        return json.dumps({"checksum": _checksum(body), **body}, indent=1)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a checkpoint folder; ValueError says what is wrong with it."""
        return cls.parse((path / MANIFEST_NAME).read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> Manifest:
        body = json.loads(text)
        if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
            raise ValueError("its own checksum does not match: it was changed or damaged")
        if body.pop("format") != FORMAT_VERSION:
            raise ValueError("it was written by another version of windlass")
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        return cls(files=files, **body)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size=file.tell(), sha256=digest)


def damage(path: Path, record: FileRecord, *, contents: bool = True) -> str | None:
    """What is wrong with one file of a checkpoint, in words; None if it is as it was written."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"it has {size:,} bytes, {record.size:,} were written"
        if contents and hash_file(path).sha256 != record.sha256:
            return "its contents changed: the SHA-256 does not match the manifest"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None
