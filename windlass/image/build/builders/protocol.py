"""What every builder can do, as commands to print or to run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class BuildRequest:
    """One build: everything that is on its command line."""

    context: Path
    dockerfile: Path
    tag: str
    platform: str
    labels: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    cache: str | None = None
    """Repository in a registry that keeps the layers of earlier builds. Default: those of this machine only."""
    fresh: bool = False
    """Without any cache."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files that steps may mount by name; they are in no layer."""


@dataclass(frozen=True)
class RunRequest:
    """A command inside an image."""

    image: str
    command: Sequence[str]
    mounts: Sequence[tuple[str, str]] = ()
    """Folders of this machine, read-only, and where they are seen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False
    shared_memory: str = "1g"
    """The default of 64 MB ends data loaders and collectives with a bus error."""


@dataclass(frozen=True)
class PushRequest:
    """An image of this machine, and the name that it gets in a registry."""

    image: str
    destination: str
    plain_http: bool = False
    digest_file: Path | None = None


class Answer(NamedTuple):
    """Of a command inside an image."""

    exit_code: int
    stdout: str
    stderr: str


class Builder(Protocol):
    """A tool on this machine that builds, runs and pushes images."""

    name: str

    def why_not(self) -> str | None:
        """Why it cannot be used here; None where it can."""

    def build(self, request: BuildRequest) -> list[str]: ...

    def run(self, request: RunRequest, text_in: str | None = None, timeout: float | None = None) -> Answer:
        """Run a command inside an image, with `text_in` on its stdin."""

    def push(self, request: PushRequest, authentication: str | None) -> list[list[str]]:
        """The commands, one after the other.

        `authentication`: a file (docker: a folder) with the credentials. None: those that the tool has itself.
        """

    def push_environment(self, authentication: str | None) -> dict[str, str]: ...

    def pull(self, image: str, *, plain_http: bool) -> list[str]: ...

    def image_id(self, image: str) -> list[str]:
        """The command that prints the id of a local image, and fails where there is none."""


def secret_options(request: BuildRequest) -> list[str]:
    return [part for name, file in sorted(request.secrets.items()) for part in ("--secret", f"id={name},src={file}")]


def option_each(flag: str, values: Mapping[str, str]) -> list[str]:
    """--label a=b --label c=d, in the order of their names."""
    return [part for name, value in sorted(values.items()) for part in (flag, f"{name}={value}")]
