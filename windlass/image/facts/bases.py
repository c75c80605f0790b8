"""What a base image has, from its name and the tables. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import Version

from windlass.image.facts.table import at_or_below, companion, facts, minor, release

CODENAMES = {
    "bionic": "ubuntu18.04",
    "focal": "ubuntu20.04",
    "jammy": "ubuntu22.04",
    "noble": "ubuntu24.04",
    "buster": "debian10",
    "bullseye": "debian11",
    "bookworm": "debian12",
    "trixie": "debian13",
}
TOOLS = frozenset({"bash", "git", "curl", "wget", "gcc", "g++", "make", "pip", "python3", "gpg", "ssh", "ssh-keyscan",
                   "unzip", "file", "patch", "xz", "autoconf"})  # fmt: skip


@dataclass(frozen=True)
class Base:
    """An image by its name. None: the name does not say."""

    image: str
    repository: str
    tag: str | None
    digest: str | None
    family: str | None = (
        None  # cuda, torch, nvidia-torch, python, system, conda; None: another, of which nothing is known
    )
    cuda: str | None = None
    torch: str | None = None
    python: str | None = None
    system: str | None = None
    efa: str | None = None
    nccl: str | None = None
    cudnn: str | None = None  # its major version; "": none
    installs: str | None = None  # a package of PyPI that the image is made of
    has_nvcc: bool | None = None
    has_compiler: bool | None = None
    programs: frozenset[str] | None = None  # of those that builds call; None: not known
    packages: tuple[tuple[str, str], ...] = ()  # Python packages that it brings, torch among them
    platforms: tuple[str, ...] | None = None

    @property
    def pinned(self) -> bool:
        return self.digest is not None or (self.tag is not None and self.tag != "latest")

    @property
    def alpine(self) -> bool:
        return "alpine" in f"{self.repository}:{self.tag}"

    @property
    def own_python(self) -> bool:
        """Whether pip installs into a Python that is not the system's."""
        return self.family in ("python", "torch", "conda")


def base_of(image: str) -> Base:
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # a port, not a tag
        repository, tag = name, ""
    plain = re.sub(r"^(docker\.io/)?(library/)?", "", repository)
    return _described(Base(image, plain, tag or None, digest or None), tag)


def _described(base: Base, tag: str) -> Base:
    """What the table of images says of a name; what it leaves to the tag is read from it."""
    plain, short = base.repository, base.repository.rsplit("/", 1)[-1]
    row: dict[str, Any] = next((row for row in facts()["images"]["rows"] if re.search(row["repository"], plain)
                and re.search(row.get("tag", ""), tag)), {})  # fmt: skip
    devel = True if "devel" in tag else False if re.search("runtime|base", tag) else None
    said: dict[str, Any] = {name: _search(pattern, tag) for name, pattern in row.get("read", {}).items()}
    if "dots" in row:
        said |= {name: _dotted(pattern, tag) for name, pattern in row["dots"].items()}
    said |= {name: devel if value == "devel" else value for name, value in row.get("is", {}).items()}
    said["system"] = said.get("system") or _system(tag) or _system(f"{short}{tag}") or row.get("system")
    if "programs" in row:
        devel_tools = {"gcc", "g++", "make"} if devel else set()
        said["programs"] = frozenset(
            {*(TOOLS if "tools" in row["programs"] else ()), *row["programs"], *devel_tools} - {"tools"}
        )
    described = replace(base, **said)
    special = SPECIAL.get(row.get("kind", ""))
    return special(described, tag) if special else described


def _cuda(base: Base, tag: str) -> Base:
    # -cudnn- without a number came with 12.4.1: NV_CUDNN_VERSION of 12.5.1 (9.3), 12.6.3 (9.5), 12.8.0 (9.7),
    # 12.8.1 (9.8), 12.9.2 and 13.0.1 (9.13) in copies of NVIDIA's Dockerfiles, read on 2026-11-16
    return replace(base, cudnn=(_search(r"cudnn(\d*)", tag) or "9") if "cudnn" in tag else "")


def _nvidia(base: Base, tag: str) -> Base:
    known = facts()["ngc_pytorch"]["releases"].get(_search(r"^(\d+\.\d+)", tag) or "")
    own = str(Version(f"{known['torch']}+nv{tag.split('-')[0]}")) if known else ""
    return replace(base, **{**known, "torch": own}, packages=(("torch", own), *_numpy(own))) if known else base


def _aws(base: Base, tag: str) -> Base:
    return replace(base, cuda=base.cuda or ("cpu" if "cpu" in tag else None), has_nvcc=bool(base.cuda),
                   packages=_with_companions(base.torch))  # fmt: skip


def _application(base: Base, tag: str) -> Base:
    known, version = facts()["application_images"]["images"][base.repository], _search(r"^v?(\d+\.\d+[\w.]*)", tag)
    if not version:
        return base
    return replace(base, installs=f"{known['package']}=={version}", python=at_or_below(known["python"], version))


def _clone(base: Base, tag: str) -> Base:
    short = base.repository.rsplit("/", 1)[-1]  # the others are rebuilt from the same sources
    version = "" if short == "fedora" else tag.split("-")[0].split(".")[0]
    return replace(base, system=f"{short if short in ('amazonlinux', 'centos') else 'rockylinux'}{version}")


def no_such_image(base: Base) -> str | None:
    """Why a registry answers `manifest unknown`, for names that tell it.

    nvidia/cuda: NVIDIA/nvidia-docker issues 1454 (latest), 1735 (two numbers), 1768 (CUDA 10); pytorch/pytorch#125632
    (cudnn has no number from 12.4 on, and one before). pytorch/pytorch: the builds of each release.
    """
    tag = base.tag or "latest"
    if base.digest:
        return None
    if base.repository in ("nvidia/cuda", "nvcr.io/nvidia/cuda") and "$" not in tag:
        version = re.match(r"(\d+\.\d+\.\d+)-", tag)
        if version is None or not re.search(r"-(ubuntu|ubi|rocky|centos|opensuse)", tag):
            return "its tags name a CUDA release by three numbers, and the system: 12.4.1-devel-ubuntu22.04"
        if Version(version[1]).major < 11:
            return "NVIDIA has deleted the images of CUDA 10 and older"
        numbered = re.search(r"-cudnn(\d*)-", tag)
        if numbered and bool(numbered[1]) == (Version(version[1]) >= Version("12.4")):
            return "its tags say -cudnn- from 12.4.1 on, and -cudnn8- or -cudnn9- before"
    known = release(base.torch) if base.repository == "pytorch/pytorch" and base.torch and base.cuda else None
    if known and base.cuda and known.build(base.cuda) is None:
        return f"torch {known.version} is built with CUDA {', '.join(build.cuda for build in known.builds)}"
    return None


def _official(base: Base, tag: str) -> Base:
    """pytorch/pytorch: torch, torchvision and torchaudio in a Python of their own."""
    known, series = facts()["pytorch_images"], minor(base.torch) if base.torch else ""
    system = known["system"].get(series, known["newest_system"]) if base.torch else None
    programs, bare = base.programs or frozenset(), known["runtime_without_gcc"]
    if base.torch and "runtime" in tag and Version(bare["since"]) <= Version(base.torch) < Version(bare["before"]):
        programs -= {"gcc", "g++", "make"}
    return replace(base, python=known["python"].get(series), system=system, packages=_with_companions(base.torch),
                   programs=programs, platforms=tuple(known["platforms"]))  # fmt: skip


SPECIAL = {
    "cuda": _cuda, "nvidia": _nvidia, "aws": _aws, "official": _official, "application": _application, "clone": _clone,
}  # fmt: skip


def _numpy(torch: str) -> list[tuple[str, str]]:
    """Images with torch have numpy: that of their time, which pip leaves where it is."""
    since = facts()["numpy2"]["torch_since"]
    return [("numpy", facts()["numpy2"]["of_older_images"])] if Version(torch.split("a")[0]) < Version(since) else []


def _with_companions(torch: str | None) -> tuple[tuple[str, str], ...]:
    if torch is None:
        return ()
    found = [("torch", torch), *_numpy(torch)]
    found += [(name, version) for name in ("torchvision", "torchaudio") if (version := companion(name, torch))]
    return tuple(found)


def _system(text: str) -> str | None:
    found = re.search(r"(ubuntu|debian|rockylinux|ubi)-?(\d+(?:\.\d+)?)", text)
    if found:
        return found[1] + (found[2] if found[1] == "ubuntu" else found[2].split(".")[0])
    return next((system for name, system in CODENAMES.items() if name in text), None)


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _dotted(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return f"{found[1]}.{found[2]}" if found else None
