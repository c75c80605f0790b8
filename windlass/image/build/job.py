"""What is built and how: the source, what the image has to show, the settings; and one attempt at it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.image.build.context import Context
from windlass.image.build.records import content_digest
from windlass.image.read.texts import Fix, Texts


@dataclass(frozen=True)
class Source:
    """What is built: the texts that fixes may change, and the folder that they stand in."""

    title: str
    """Repository of the image: `localhost/train`, or one of a registry."""
    texts: Texts
    context: Context
    platform: str
    dockerfile: Path | None = None
    """The user's own. None: the Dockerfile was planned."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Further files that a plan adds to the context."""
    trees: Mapping[str, Context] = field(default_factory=dict)
    """Further folders that it adds, and where they are in the context."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None

    @property
    def recipe(self) -> str:
        return self.texts.dockerfile or ""

    @property
    def files(self) -> dict[str, str]:
        """Files of the context that are not as they are on disk."""
        on_disk = self.context.texts()
        changed = {name: text for name, text in self.texts.files.items() if on_disk.get(name) != text}
        return {**self.planned, **changed}

    @cached_property
    def content(self) -> str:
        """Digest of everything that decides what is built. Asked for several times, and reads every file."""
        trees = [f"{at}\0{tree.digest()}" for at, tree in sorted(self.trees.items())]
        parts = [self.context.digest(self.files), *trees]
        return content_digest(self.recipe, "\n".join(parts), self.platform, self.arguments, self.target)

    def stage(self, folder: Path) -> None:
        """The context as the builder sees it: links to the user's files, and what was changed or added."""
        self.context.stage(folder, self.files)
        for at, tree in self.trees.items():
            tree.stage(folder / at)

    def with_fix(self, fix: Fix) -> Source:
        return replace(self, texts=fix.apply(self.texts))


@dataclass(frozen=True)
class Proof:
    """What an image has to show."""

    level: str = "standard"
    imports: tuple[str, ...] = ()
    """Modules that must be there, beside torch."""
    expect: Mapping[str, str] = field(default_factory=dict)
    """Versions that must be loaded: torch, cuda, nccl, python …"""
    efa: bool = False
    smoke: str = ""
    """Command of the smoke run. Default: windlass's own trainer."""
    model: Mapping[str, Any] | None = None
    seconds: float = 900
    """For every group of checks."""

    def order(self, *, gpus: bool = False) -> str:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(values | {"gpus": gpus})


@dataclass(frozen=True)
class Surroundings:
    """How a command is run inside an image."""

    python: str | None = None
    """Interpreter in the image. Default: python, else python3."""
    mounts: Sequence[tuple[str, str]] = ()
    """Folders of this machine, read-only, and where they are seen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False


@dataclass(frozen=True)
class Settings:
    """How a build is done."""

    attempts: int = 3
    auto_fix: bool = False
    proof: Proof | None = None
    """None: the image is not proven."""
    around: Surroundings = field(default_factory=Surroundings)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files that a RUN may read by --mount=type=secret, and no layer keeps."""
    cache: str | None = None
    """Repository in a registry that keeps the layers of earlier builds. Default: those of this machine only."""
    fresh: bool = False
    """Without any cache."""


@dataclass(frozen=True)
class Job:
    """One attempt, as a workshop gets it."""

    source: Source
    image: str
    tag: str
    labels: Mapping[str, str]
    settings: Settings
    folder: Path
    number: int
