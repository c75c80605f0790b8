"""Which files of a folder belong to a build: the rules of .dockerignore. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Without a .dockerignore: what no image wants, and what must not leave the machine.
USUALLY_IGNORED = (
    ".git",
    "**/__pycache__",
    "**/*.pyc",
    ".venv",
    "venv",
    "runs",
    "images",
    "**/.mypy_cache",
    "**/.pytest_cache",
    "**/.ruff_cache",
    "**/*.egg-info",
    "node_modules",
    "**/.env",
    "**/.env.*",
    "**/*.pem",
    ".aws",
    ".ssh",
)
# Ours: written by builds, and no part of them.
ALWAYS_IGNORED = ("**/*.windlass",)


@dataclass(frozen=True)
class Ignore:
    """The patterns in order; the last that matches a path decides, and `!` takes one back."""

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, dockerignore: str | None) -> Ignore:
        if dockerignore is None:
            return cls((*USUALLY_IGNORED, *ALWAYS_IGNORED))
        lines = [line.strip() for line in dockerignore.splitlines()]
        return cls((*(line for line in lines if line and not line.startswith("#")), *ALWAYS_IGNORED))

    def ignores(self, path: str) -> bool:
        """Whether a file (its path relative to the folder, with /) is left out."""
        ignored = False
        for pattern in self.patterns:
            taken_back = pattern.startswith("!")
            if _expression(pattern.removeprefix("!")).fullmatch(path):
                ignored = not taken_back
        return ignored

    def may_skip(self, folder: str) -> bool:
        """Whether nothing below a folder can be wanted, so that it need not be read."""
        return self.ignores(folder) and not any(pattern.startswith("!") for pattern in self.patterns)


def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern matches a path, and everything below it."""
    parts: Sequence[str] = [part for part in pattern.strip().strip("/").split("/") if part not in ("", ".")]
    text = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += ".*" if last else "(?:.*/)?"
            continue
        text += _one_part(part) + ("" if last else "/")
    return re.compile(f"{text}(?:/.*)?", re.DOTALL)


def _one_part(part: str) -> str:
    text, position = "", 0
    while position < len(part):
        letter = part[position]
        end = part.find("]", position + 2) if letter == "[" else -1
        if letter == "*":
            while part[position + 1 : position + 2] == "*":
                position += 1
            text += "[^/]*"
        elif letter == "?":
            text += "[^/]"
        elif end > 0:
            text += part[position : end + 1]
            position = end
        elif letter == "\\" and position + 1 < len(part):
            position += 1
            text += re.escape(part[position])
        else:
            text += re.escape(letter)
        position += 1
    return text
