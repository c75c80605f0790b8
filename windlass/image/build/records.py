"""What is kept of an image that was built: `images/<tag>/` with logs, Dockerfile and proof."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.errors import UserError

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

    def save(self, record: ImageRecord) -> Path:
        file = self.place(record.tag) / "image.json"
        write_json(file, asdict(record))
        return file

    def load(self, tag: str) -> ImageRecord | None:
        file = self.folder / tag / "image.json"
        try:
            return ImageRecord(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged", evidence=str(error), fix=f"rm {file}    and build again") from None

    def find(self, wanted: str | None, title: str | None = None) -> ImageRecord | None:
        """By tag, name or pinned name; without one, the newest of a title."""
        files = sorted(self.folder.glob("*/image.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in files:
            record = self.load(file.parent.name)
            if record is None:
                continue
            if wanted in (record.tag, record.image, record.pushed) or (wanted is None and title == record.title):
                return record
        return None

    def add_proof(self, record: ImageRecord, report: dict[str, Any]) -> ImageRecord:
        write_json(self.place(record.tag) / "test.json", report)
        changed = replace(record, proof={key: report[key] for key in ("level", "passed", "loaded")})
        self.save(changed)
        return changed


def write_json(file: Path, value: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(file)
