"""The `image` section of the run file: the container image a run is trained in."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from windlass.spec.section import Section, SettingError

VERSION = re.compile(r"\d+(\.\d+){1,2}")


class ImageSection(Section):
    """The container image of the run. `windlass image plan` says what it would be made of."""

    name: str | None = None
    """Image of the run, `registry/repository:tag`. `windlass image push` writes the digest of what it pushed here."""
    dockerfile: str | None = None
    """Your own Dockerfile, beside the run file. Default: windlass writes one."""
    context: str = "."
    """Folder that the build may copy from, relative to the run file."""
    base: str | None = None
    """Image to build on. Default: chosen for the GPU, the driver and the network of the nodes."""
    requirements: str | None = None
    """File of Python requirements to install, relative to the run file."""
    python: str | None = None
    """Python of the image, `"3.12"` say. Default: the one that the base image has."""
    torch: str | None = None
    """Version of torch, `2.14.1` or `"2.14"`. Default: the newest that the GPU and the driver can run."""
    cuda: str | None = None
    """CUDA that torch is built with, `"12.6"` say, or `cpu`. Default: what the GPU and the driver can run."""
    platform: Literal["linux/amd64", "linux/arm64"] | None = None
    """Platform of the nodes. Default: the instance's; `linux/amd64` where no instance is named."""
    efa: bool | None = None
    """Install AWS's EFA libraries and NCCL plugin. Default: where the instance has EFA."""
    hyperpod_agent: bool = False
    """Install the elastic agent that HyperPod's training operator needs."""
    apt: tuple[str, ...] = ()
    """Further Debian or Ubuntu packages."""
    pip: tuple[str, ...] = ()
    """Further Python requirements, such as `wandb>=0.19`."""

    @field_validator("python", "torch", "cuda", mode="before")
    @classmethod
    def versions_are_text(cls, value: Any, info: Any) -> Any:
        """YAML reads 2.14 as a number; 2.1 may have been 2.10, which nobody can tell any more."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if info.field_name != "cuda" and str(value).endswith((".1", ".2")):
                raise ValueError(f"image.{info.field_name} needs quotes: '\"{value}\"' or '\"{value}0\"'")
            return str(value)
        return value

    @model_validator(mode="after")
    def versions_are_versions(self) -> Self:
        for name in ("python", "torch", "cuda"):
            value = getattr(self, name)
            if value is not None and not VERSION.fullmatch(value) and (name, value) != ("cuda", "cpu"):
                raise ValueError(f"image.{name} {value!r} is no version; for example {_EXAMPLES[name]}")
        return self

    @model_validator(mode="after")
    def one_way_to_make_it(self) -> Self:
        if self.dockerfile:
            planned = ("base", "python", "torch", "cuda", "apt", "pip", "requirements")
            also = [name for name in planned if getattr(self, name)]
            if also:
                raise SettingError(
                    f"image.dockerfile says everything itself; image.{also[0]} belongs into that file",
                    "image.dockerfile",
                    None,
                    f"    lets windlass write one; or leave image.{also[0]} out",
                )
        for name in ("apt", "pip"):
            for package in getattr(self, name):
                if not package.strip() or any(ord(letter) < 32 for letter in package):
                    raise ValueError(f"image.{name} holds {package!r}, which is no package")
        for package in self.apt:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.:=~-]*", package):
                raise ValueError(f"image.apt holds {package!r}, which is no package name")
        return self


_EXAMPLES = {"python": '"3.12"', "torch": "2.14.1", "cuda": '"12.6" or cpu'}
