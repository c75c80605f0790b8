"""What `windlass image` prints."""

from __future__ import annotations

from typing import Any, Literal

from windlass.api.schemas import Printed


class Conflict(Printed):
    """Something in a Dockerfile or in requirements that will fail or hurt."""

    id: str
    severity: Literal["error", "warning"]
    sentence: str
    place: str | None
    """The line of the Dockerfile."""
    cause: str | None
    """The line of a requirements file that asks for it; else the same."""
    evidence: list[str]


class CheckedImage(Printed):
    """What the resolved state of a Dockerfile shows."""

    conflicts: list[Conflict]
    patch: str
    """A diff that heals what can be healed: the patched file was resolved and judged again."""
    changes: list[str]
    """What the patch does."""
    left: list[Conflict]
    """After the patch."""
    unchecked: list[str]
    """What was not understood or could not be asked."""
    assumed: list[str]
    """What was taken for granted: of the nodes, of an index out of reach."""


class ImageNode(Printed):
    gpu: str | None
    driver: str | None
    platform: str
    efa: bool
    cpu_only: bool
    origin: str


class ImageChoice(Printed):
    what: str
    value: str
    why: str
    source: str


class ImagePlan(CheckedImage):
    """What an image should be made of."""

    node: ImageNode
    choices: list[ImageChoice]
    warnings: list[str]
    dockerfile: str
    files: dict[str, str]


class ImageCheck(Printed):
    name: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    evidence: str | None
    seconds: float | None


class ImageReport(Printed):
    """What an image shows when it is run."""

    image: str
    level: Literal["quick", "standard", "full"]
    passed: bool
    machine: str
    loaded: dict[str, str | None]
    """Versions as loaded."""
    seconds: float
    checks: list[ImageCheck]


class ImageFix(Printed):
    id: str
    sentence: str


class BuiltImage(Printed):
    """An image that was built and tested."""

    image: str
    id: str
    tag: str
    platform: str
    builder: str
    attempts: int
    fixes: list[ImageFix]
    written: list[str]
    """Files that were changed."""
    records: str
    pushed: str | None
    proof: ImageReport | None


class BuildRequest(Printed):
    """What would be built, and by which command or request to CodeBuild."""

    dockerfile: str
    builder: str
    tag: str
    command: str | None = None
    request: dict[str, Any] | None = None


class PushedImage(Printed):
    """An image in a registry."""

    image: str
    pinned: str
    """By digest."""
    digest: str
    bytes: int
    already_there: bool
    run_file: str | None
    """The run file that names it now."""


class PushRequest(Printed):
    """What would be pushed where."""

    image: str
    destination: str
