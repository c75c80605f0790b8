"""Follow files that grow: whole lines only, from where the last look ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOOK_BACK_BYTES = 64 * 1024


def newest_records(path: Path) -> list[dict[str, Any]]:
    """The last JSON objects of a file that may be long: what its last 64 KiB hold, oldest first."""
    size = path.stat().st_size if path.exists() else 0
    return Tail(path, offset=max(0, size - LOOK_BACK_BYTES)).records()


class Tail:
    """New lines of one file; it may not exist yet."""

    def __init__(self, path: Path, *, offset: int = 0, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else offset

    def lines(self, *, rest: bool = False) -> list[str]:
        """Lines completed since the last call; with `rest`, an unfinished last one too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        if not rest:
            data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data.decode(errors="replace").splitlines()

    def records(self) -> list[dict[str, Any]]:
        """New JSON objects; a line torn by a crash is passed over."""
        found = []
        for line in self.lines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found
