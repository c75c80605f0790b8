"""What an image is called, and what is kept of it: tags, `images/<tag>/`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from windlass.common.files import json_digest, write_atomically
from windlass.errors import UserError
from windlass.image.build.process import capture

SHORT = 12


@dataclass(frozen=True)
class Commit:
    """Where a folder stands in its git repository."""

    revision: str
    changed: bool
    """Whether files differ from the commit."""
    source: str | None
    """The remote, without user and password."""


def commit_of(folder: Path) -> Commit | None:
    """None where the folder is in no git repository, or git is not installed."""
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if not revision:
        return None
    return Commit(
        revision=revision,
        changed=bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")),
        source=_without_secrets(_git(folder, "remote", "get-url", "origin")),
    )


def content_digest(dockerfile: str, files: str, platform: str, arguments: Mapping[str, str], target: str | None) -> str:
    """Of everything that decides what is built; the builder and the machine do not."""
    parts = {"dockerfile": dockerfile, "files": files, "platform": platform, "target": target or ""}
    return json_digest(parts | {"arguments": dict(arguments)})


def tag_for(commit: Commit | None, content: str) -> str:
    """`git-1a2b3c4d5e6f-0123456789ab`: the same files give the same tag; other files, another."""
    where = f"git-{commit.revision[:SHORT]}-" if commit else "files-"
    return f"{where}{content[:SHORT]}"


def _git(folder: Path, *arguments: str) -> str:
    if not shutil.which("git"):
        return ""
    answer = capture(["git", "-C", str(folder), *arguments], timeout=60)
    return answer.stdout.strip() if answer.succeeded else ""


def _without_secrets(url: str) -> str | None:
    if not url:
        return None
    if "://" not in url:
        return re.sub(r"^[^@/]*@", "", url)  # git@host:path
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


FOLDER = "images"


@dataclass(frozen=True)
class ImageRecord:
    """image.json of a built image."""

    title: str
    tag: str
    image: str
    """Its name on the machine that built it."""
    id: str
    platform: str
    content: str
    builder: str
    revision: str | None = None
    attempts: int = 1
    fixes: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] | None = None
    """The last report of the tests inside the image."""
    pushed: str | None = None
    """Name in a registry, by digest."""

    @property
    def proven(self) -> bool:
        return bool(self.proof and self.proof["passed"])


class Records:
    """The folder of all images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, tag: str) -> Path:
        place = self.folder / tag
        place.mkdir(parents=True, exist_ok=True)
        return place

    def save(self, record: ImageRecord) -> None:
        _write_json(self.place(record.tag) / "image.json", asdict(record))

    def newest_first(self) -> Iterator[ImageRecord]:
        for file in sorted(self.folder.glob("*/image.json"), key=lambda file: -file.stat().st_mtime_ns):
            try:
                yield ImageRecord(**json.loads(file.read_text()))
            except (ValueError, TypeError) as error:
                fix = f"rm {file}    and build again"
                raise UserError(f"{file} is damaged", evidence=str(error), fix=fix) from None

    def find(self, wanted: str | None, title: str | None = None) -> ImageRecord | None:
        """By tag, name or pinned name; without one, the newest of a title."""
        for record in self.newest_first():
            names = (record.tag, record.image, record.pushed) if wanted else (record.title,)
            if (wanted or title) in names:
                return record
        return None

    def add_proof(self, record: ImageRecord, report: dict[str, Any]) -> ImageRecord:
        _write_json(self.place(record.tag) / "test.json", report)
        changed = replace(record, proof={key: report[key] for key in ("level", "passed", "loaded")})
        self.save(changed)
        return changed


def _write_json(file: Path, value: Any) -> None:
    write_atomically(file, json.dumps(value, indent=2) + "\n")
