"""How far a build is, read from what the builder prints. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

BUILDAH_STEP = re.compile(
    r"^(?:\[(?P<stage>\d+)/(?P<stages>\d+)\] )?STEP (?P<step>\d+)(?:/(?P<steps>\d+))?: (?P<text>.*)"
)
BUILDKIT_STEP = re.compile(r"^#\d+ \[(?:(?P<name>[\w.-]+) )?\s*(?P<step>\d+)/(?P<steps>\d+)\] (?P<text>.*)")


@dataclass(frozen=True)
class Step:
    """One instruction of the Dockerfile that is being worked on."""

    number: int
    total: int | None
    text: str

    def __str__(self) -> str:
        of = f"/{self.total}" if self.total else ""
        return f"step {self.number}{of}: {self.text}"


def step_of(line: str) -> Step | None:
    """The step that begins with this line of a log, of buildah, podman or BuildKit (--progress=plain)."""
    found = BUILDAH_STEP.match(line) or BUILDKIT_STEP.match(line)
    if not found:
        return None
    total = found["steps"]
    return Step(int(found["step"]), int(total) if total else None, found["text"].strip())
