"""Which torch goes with which CUDA, NCCL, driver, Python and GPU: two data files, and lookup.

`releases.json` is read from the package index by tools/make_image_table.py; `facts.json` holds what no index says, with
where each fact comes from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    platforms: tuple[str, ...] = ("linux/amd64",)
    compiled_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by platform, from the wheel itself

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
        """What this build is compiled for, `sm_90` and `compute_90`; None where nobody says."""
        if self.compiled_for.get(platform):
            return self.compiled_for[platform]
        machine = platform.split("/")[1]
        for entry in facts()["architectures"]:
            if entry["cuda"] == self.cuda and Version(self.torch) >= Version(entry["since"]):
                return tuple(f"sm_{one.replace('.', '')}" for one in entry[machine]) if entry[machine] else None
        return None

    def runs_on(self, capability: str, platform: str) -> bool:
        """Machine code runs on later minors of its major version; PTX (`compute_90`) on everything later."""
        known = self.architectures(platform)
        if known is None:
            return True
        wanted = _capability(f"sm_{capability.replace('.', '')}")
        for one in known:
            own = _capability(one)
            if (own[0] == wanted[0] and own <= wanted) or (one.startswith("compute_") and own <= wanted):
                return not one.endswith("a") or own == wanted
        return False


@dataclass(frozen=True)
class Release:
    """A release of torch."""

    version: str
    python: tuple[str, ...]
    platforms: tuple[str, ...]
    builds: tuple[Build, ...]  # PyPI's first
    triton: str | None
    source: str
    released: str | None = None
    cpu_only: tuple[str, ...] = ()  # platforms whose PyPI wheel has no CUDA

    @property
    def minor(self) -> str:
        return minor(self.version)

    @property
    def pypi(self) -> Build | None:
        return next((build for build in self.builds if build.index is None), None)

    def build(self, cuda: str) -> Build | None:
        return next((build for build in self.builds if build.cuda == cuda), None)


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
    version, platforms = entry["version"], entry["platforms"]
    with_cuda = {name: part for name, part in platforms.items() if part["cuda"]}
    main = next(iter(with_cuda.values()), None)
    pypi = []
    if main:
        pypi.append(
            Build(
                torch=version,
                cuda=main["cuda"],
                status="stable",
                index=None,
                nccl_package=main["nccl_package"] or f"nvidia-nccl-cu{main['cuda'].split('.')[0]}",
                nccl=main["nccl"],
                cudnn=main["cudnn"],
                source=f"metadata and contents of {main['wheel']}",
                platforms=tuple(with_cuda),
                compiled_for={name: tuple(part["architectures"]) for name, part in with_cuda.items()},
            )
        )
    others = [
        Build(
            torch=version,
            cuda=build["cuda"],
            status=build["status"],
            index=f"{facts()['torch_index']['url']}cu{build['cuda'].replace('.', '')}",
            nccl_package=f"nvidia-nccl-cu{build['cuda'].split('.')[0]}",
            nccl=build.get("nccl"),
            cudnn=build.get("cudnn"),
            source=build["source"],
            platforms=_index_platforms(version, build["cuda"]),
        )
        for build in facts()["cuda_builds"]
        if minor(version) in build["torch"] and not (main and build["cuda"] == main["cuda"])
    ]
    pythons = {one for platform in platforms.values() for one in platform["python"]}
    return Release(
        version=version,
        python=tuple(sorted(pythons, key=Version)),
        platforms=tuple(platforms),
        builds=(*pypi, *sorted(others, key=lambda one: Version(one.cuda), reverse=True)),
        triton=entry["triton"],
        source=pypi[0].source if pypi else "",
        released=entry.get("released"),
        cpu_only=tuple(name for name, part in platforms.items() if not part["cuda"]),
    )


def _index_platforms(version: str, cuda: str) -> tuple[str, ...]:
    """The platforms for which torch's own index has a build."""
    since = facts()["torch_index"]["arm64_since"].get(cuda)
    both = since is not None and Version(version) >= Version(since)
    return ("linux/amd64", "linux/arm64") if both else ("linux/amd64",)


def table_stubs(tag: str, python: str, platform: str) -> list[dict[str, Any]]:
    """What torch's own index has under a tag (`cu121`, `cpu`, `all`), as the resolver wants it."""
    found = []
    for one in releases():
        served = {build.cuda: {*build.platforms, *_index_platforms(one.version, build.cuda)} for build in one.builds}
        cudas = [cuda for cuda, platforms in served.items() if platform in platforms]
        for local in ["cpu", *(f"cu{cuda.replace('.', '')}" for cuda in cudas)]:
            if tag not in (local, "all"):
                continue
            build = next((build for build in one.builds if build.tag == local), None)
            requires = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"]
            if build:
                requires += [f"{build.nccl_package}=={build.nccl}"] if build.nccl else []
                requires += [f"triton{one.triton}"] if one.triton and platform == "linux/amd64" else []
            short = (python if python in one.python else one.python[-1]).replace(".", "")
            machine = "x86_64" if platform == "linux/amd64" else "aarch64"
            tags = f"cp{short}-cp{short}-manylinux_2_17_{machine}"
            found.append({"name": "torch", "version": f"{one.version}+{local}", "requires": requires, "tags": tags})
            for name in ("torchvision", "torchaudio"):
                right = companion(name, one.version)
                if right:
                    more = ["numpy", "pillow"] if name == "torchvision" else []
                    found.append({"name": name, "version": f"{right}+{local}", "tags": tags,
                                  "requires": [f"torch=={one.version}", *more]})  # fmt: skip
    return found


def minor(version: str) -> str:
    """2.14 of 2.14.1+cu130."""
    return ".".join(version.split("+")[0].split(".")[:2])


def minimum_driver(cuda: str) -> str:
    """The oldest driver that runs a CUDA release: that of its major version, by minor-version compatibility."""
    major = int(cuda.split(".")[0])
    entries = {entry["cuda_major"]: entry["minimum"] for entry in facts()["drivers"]}
    return str(entries[max((known for known in entries if known <= major), default=min(entries))])


def runs(driver: str, needed: str) -> bool:
    """Whether a driver is new enough, as far as it is told: 580.65 may be 580.65.06."""
    told = version_of(driver).release
    return told >= Version(needed).release[: len(told)]


def assumed_of_driver(driver: str, needed: str) -> str | None:
    """What `runs` takes for granted, where a driver that is told by its branch may be older than the one needed."""
    if not runs(driver, needed) or version_of(driver) >= Version(needed):
        return None
    return f"driver {driver} is {needed} or newer (--driver names it whole)"


def unknown_to_driver(capability: str, driver: str) -> str | None:
    """Why no driver of that version runs a GPU, whatever is in the image; None where it does, or nobody says."""
    entry = next((one for one in facts()["gpu_drivers"] if capability in one["capability"]), None)
    if entry and not runs(driver, entry["oldest"]):
        return f"{entry['oldest']} is the first driver that runs it"
    if entry and "newest" in entry and version_of(driver).major > int(entry["newest"]):
        return f"{entry['newest']} is the last driver branch that runs it"
    return None


def driver_cuda(driver: str) -> str | None:
    """The CUDA that a driver has itself: 12.4 of 550.54."""
    known = facts()["driver_branches"]["cuda"]
    branch = version_of(driver).major
    older = [int(one) for one in known if int(one) <= branch]
    return str(known[str(max(older))]) if older else None


def gpu_in_table(text: str) -> str | None:
    """The name of a GPU in the table: `rtx5090`, `NVIDIA-H100-80GB-HBM3` and `a100` are understood."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower().replace("nvidia", "").replace("tesla", "").replace("geforce", ""))
    names = {re.sub(r"[^a-z0-9]", "", value.lower()): value for value in facts()["compute_capability"]["values"]}
    if plain in names:
        return str(names[plain])
    fitting = [name for name in names if plain.startswith(name)]
    return str(names[max(fitting, key=len)]) if fitting else None


def capability(gpu_name: str) -> str | None:
    value: str | None = facts()["compute_capability"]["values"].get(gpu_name)
    return value


def host_platform(gpu_name: str) -> str | None:
    """The platform of every node that has a GPU: linux/arm64 of GB200; None where its hosts differ."""
    value: str | None = facts()["gpu_hosts"]["platforms"].get(gpu_in_table(gpu_name) or gpu_name)
    return value


def _capability(architecture: str) -> tuple[int, int]:
    """(9, 0) of sm_90a."""
    digits = re.sub(r"\D", "", architecture.split("_")[1])
    return int(digits[:-1]), int(digits[-1])


def companion(name: str, torch: str) -> str | None:
    """The newest torchvision or torchaudio made for a torch; None where there is none."""
    return next((version for version, needs in _companions(name) if needs and _contains(needs, torch)), None)


def companion_needs(name: str, version: str) -> str | None:
    """What a release of torchvision or torchaudio requires of torch; None where it says nothing or is unknown."""
    plain = version.split("+")[0]
    return next((needs for known, needs in _companions(name) if known == plain and needs), None)


def _companions(name: str) -> Iterator[tuple[str, str]]:
    unsaid = facts()["companions_unsaid"].get(name, {})  # what a wheel's own metadata leaves out
    for version, needs in {**dict.fromkeys(unsaid, ""), **_releases()["companions"].get(name, {})}.items():
        yield version, needs or unsaid.get(version, "")


def removed_modules(python: str) -> frozenset[str]:
    """Modules and names of the standard library, `collections.Mapping`, that a Python has no more."""
    removed = facts()["standard_library"]["removed"]
    return frozenset(name for version in removed if Version(version) <= Version(python) for name in removed[version])


def package(name: str) -> dict[str, Any]:
    """The newest release of a package that goes with torch, and what it requires."""
    version, value = next(iter(_releases()["packages"][name].items()))
    return {**value, "version": version, "source": f"metadata of {name} {version} on PyPI"}


def made() -> str:
    """The day on which the table was read from the index."""
    return str(_releases()["made"])


def at_or_below(table: Mapping[str, str], version: str) -> str | None:
    """The value of the newest entry of a table that is not newer than a version."""
    try:
        older = [one for one in table if Version(one) <= Version(version)]
    except InvalidVersion:
        return None
    return table[max(older, key=Version)] if older else None


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
