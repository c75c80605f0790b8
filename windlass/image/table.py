"""Which torch goes with which CUDA, NCCL, driver, Python and GPU: two data files, and lookup.

`releases.json` is read from the package index by tools/make_image_table.py; `facts.json` holds what no index says, with
where each fact comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

PYPI = "https://pypi.org/simple"


@dataclass(frozen=True)
class Build:
    """A torch release built with one CUDA."""

    torch: str
    cuda: str  # 13.0
    status: str  # stable, legacy, experimental
    index: str | None  # None: PyPI's own build
    nccl_package: str
    nccl: str | None  # None: pinned by the wheel, and not published elsewhere
    cudnn: str | None
    source: str

    @property
    def tag(self) -> str:
        return "cu" + self.cuda.replace(".", "")

    @property
    def cuda_major(self) -> int:
        return int(self.cuda.split(".")[0])

    @property
    def minimum_driver(self) -> str:
        return minimum_driver(self.cuda)

    def architectures(self, platform: str) -> tuple[str, ...] | None:
        """Compute capabilities with code in this build; None where nobody says."""
        machine = platform.split("/")[1]
        for entry in facts()["architectures"]:
            if entry["cuda"] == self.cuda and Version(self.torch) >= Version(entry["since"]):
                return tuple(entry[machine]) if entry[machine] else None
        return None

    def runs_on(self, capability: str, platform: str) -> bool:
        """Code for one compute capability runs on the same major version's later minors, and nowhere else."""
        known = self.architectures(platform)
        if known is None:
            return True
        major, minor = map(int, capability.split("."))
        return any(int(one.split(".")[0]) == major and int(one.split(".")[1]) <= minor for one in known)


@dataclass(frozen=True)
class Release:
    """A release of torch."""

    version: str
    python: tuple[str, ...]
    platforms: tuple[str, ...]
    builds: tuple[Build, ...]  # PyPI's first
    triton: str | None
    source: str

    @property
    def minor(self) -> str:
        return minor(self.version)

    @property
    def pypi(self) -> Build:
        return self.builds[0]

    def build(self, cuda: str) -> Build | None:
        return next((one for one in self.builds if one.cuda == cuda), None)


@cache
def facts() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(resources.files(__package__).joinpath("facts.json").read_text())
    return value


@cache
def _releases() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(resources.files(__package__).joinpath("releases.json").read_text())
    return value


@cache
def releases() -> tuple[Release, ...]:
    """Every release of torch in the table, newest first."""
    return tuple(_release(entry) for entry in _releases()["torch"])


def release(version: str) -> Release | None:
    """A release by its version; `2.14` is the newest 2.14, and `2.14.1+cu130` is 2.14.1."""
    plain = version.split("+")[0]
    exact = next((one for one in releases() if one.version == plain), None)
    if exact or plain.count(".") > 1:
        return exact
    return next((one for one in releases() if one.minor == plain), None)


def _release(entry: dict[str, Any]) -> Release:
    version = entry["version"]
    pypi = Build(
        torch=version,
        cuda=entry["cuda"],
        status="stable",
        index=None,
        nccl_package=entry["nccl_package"],
        nccl=entry["nccl"],
        cudnn=entry["cudnn"],
        source=entry["source"],
    )
    others = [
        Build(
            torch=version,
            cuda=one["cuda"],
            status=one["status"],
            index=f"{facts()['torch_index']['url']}cu{one['cuda'].replace('.', '')}",
            nccl_package=f"nvidia-nccl-cu{one['cuda'].split('.')[0]}",
            nccl=one.get("nccl"),
            cudnn=one.get("cudnn"),
            source=one["source"],
        )
        for one in facts()["cuda_builds"]
        if minor(version) in one["torch"] and one["cuda"] != entry["cuda"]
    ]
    return Release(
        version=version,
        python=tuple(entry["python"]),
        platforms=tuple(entry["platforms"]),
        builds=(pypi, *sorted(others, key=lambda one: Version(one.cuda), reverse=True)),
        triton=entry["triton"],
        source=entry["source"],
    )


def minor(version: str) -> str:
    """2.14 of 2.14.1+cu130."""
    return ".".join(version.split("+")[0].split(".")[:2])


def minimum_driver(cuda: str) -> str:
    """The oldest driver that runs a CUDA release: that of its major version, by minor-version compatibility."""
    major = int(cuda.split(".")[0])
    entries = {entry["cuda_major"]: entry["minimum"] for entry in facts()["drivers"]}
    return str(entries[major] if major in entries else entries[max(entries)])


def capability(gpu_name: str) -> str | None:
    value: str | None = facts()["compute_capability"]["values"].get(gpu_name)
    return value


def companion(name: str, torch: str) -> str | None:
    """The newest torchvision or torchaudio made for a torch; None where there is none."""
    return next((version for version, needs in _companions(name) if needs and _contains(needs, torch)), None)


def companion_needs(name: str, version: str) -> str | None:
    """What a release of torchvision or torchaudio requires of torch; None where it says nothing or is unknown."""
    plain = version.split("+")[0]
    return next((needs for known, needs in _companions(name) if known == plain and needs), None)


def torch_for_companion(name: str, version: str) -> str | None:
    """The newest torch that a release of torchvision or torchaudio accepts."""
    needs = companion_needs(name, version)
    return next((one.version for one in releases() if needs and _contains(needs, one.version)), None)


def _companions(name: str) -> Iterator[tuple[str, str]]:
    yield from _releases()["companions"][name].items()


def package(name: str) -> dict[str, Any]:
    """What the index says of a package that goes with torch: its newest version and what that requires."""
    value: dict[str, Any] = _releases()["packages"][name]
    return value


def accepts(specifier: str, version: str) -> bool:
    return _contains(specifier, version)


def _contains(specifier: str, version: str) -> bool:
    return SpecifierSet(specifier).contains(Version(version.split("+")[0]), prereleases=True)


def version_of(text: str) -> Version:
    """A version that users type: a driver such as 570.86 or 580.65.06, too."""
    try:
        return Version(text)
    except InvalidVersion:
        from windlass.errors import UserError

        raise UserError(f"{text!r} is no version", fix="for example 570.86.15") from None
