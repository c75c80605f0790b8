"""What a base image has, from its name and the tables. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
NEWEST_DEBIAN = "debian13"  # what python:3.12-slim is built on today
LEAN = frozenset({"bash"})
BUSYBOX = frozenset({"wget", "unzip", "patch", "xz"})
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
    plain, short = base.repository, base.repository.rsplit("/", 1)[-1]
    system = _system(tag)
    devel = True if "devel" in tag else False if re.search("runtime|base", tag) else None
    compilers = frozenset({"gcc", "g++", "make"}) if devel else LEAN
    if plain.endswith(("nvidia/cuda", "nvidia/cuda-dl-base")):
        deep = plain.endswith("cuda-dl-base")
        return replace(
            base,
            family="cuda",
            # -cudnn- without a number came with 12.4.1: NV_CUDNN_VERSION of 12.5.1 (9.3), 12.6.3 (9.5), 12.8.0 (9.7),
            # 12.8.1 (9.8), 12.9.2 and 13.0.1 (9.13) in copies of NVIDIA's Dockerfiles, read on 2026-11-16
            cudnn=(_search(r"cudnn(\d*)", tag) or "9") if "cudnn" in tag else "",
            cuda=_search(r"cuda(\d+\.\d+)" if deep else r"^(\d+\.\d+)", tag),
            system=system,
            has_nvcc=devel,
            has_compiler=devel,
            programs=compilers | (TOOLS if deep else LEAN),
        )
    if plain.endswith("pytorch/pytorch"):
        return _official(base, tag, devel, compilers)
    if plain.endswith("nvidia/pytorch"):
        known = facts()["ngc_pytorch"]["releases"].get(_search(r"^(\d+\.\d+)", tag) or "")
        described = replace(base, family="nvidia-torch", has_nvcc=True, has_compiler=True, programs=TOOLS)
        if not known:
            return described
        own = str(Version(f"{known['torch']}+nv{tag.split('-')[0]}"))
        return replace(
            described,
            torch=own,
            cuda=known["cuda"],
            python=known["python"],
            system=known["system"],
            packages=(("torch", own),),
        )
    if short.startswith(("pytorch-training", "pytorch-inference")):
        torch = _search(r"^(\d+\.\d+(?:\.\d+)?)", tag)
        cuda = _dotted(r"cu(\d\d)(\d)", tag)
        return replace(
            base,
            family="torch",
            torch=torch,
            python=_dotted(r"py(\d)(\d+)", tag),
            cuda=cuda or ("cpu" if "cpu" in tag else None),
            system=system,
            has_nvcc=bool(cuda),
            has_compiler=True,
            programs=TOOLS,
            packages=_with_companions(torch),
        )
    if plain in (images := facts()["application_images"]["images"]):
        known = images[plain]
        version = _search(r"^v?(\d+\.\d+[\w.]*)", tag)
        installs = f"{known['package']}=={version}" if version else None
        python = at_or_below(known["python"], version) if version else None
        return replace(base, family="python", python=python, has_compiler=True, programs=TOOLS | {"uv"},
                       installs=installs)  # fmt: skip
    if short == "python":
        slim, lean = "slim" in tag or "alpine" in tag, BUSYBOX if "alpine" in tag else LEAN
        python = _search(r"^(3\.\d+)", tag)
        if "alpine" not in tag:
            system = system or NEWEST_DEBIAN
        return replace(base, family="python", python=python, system=system, has_compiler=not slim, has_nvcc=False,
                       programs=lean | {"pip", "python3"} if slim else TOOLS)  # fmt: skip
    if plain.startswith(("continuumio/", "conda/", "condaforge/", "mambaorg/")):
        return replace(
            base,
            family="conda",
            system=system or "debian12",
            cuda=_search(r"cuda(\d+\.\d+)", tag),
            has_nvcc=devel or False,
            has_compiler=False,
            programs=frozenset({"pip", "conda", "wget", "git"}),
        )
    if short == "alpine":
        return replace(base, family="system", has_compiler=False, has_nvcc=False, programs=BUSYBOX)
    if found := re.fullmatch(r"gcr\.io/distroless/python3(?:-debian(\d+))?", plain):
        return replace(base, family="system", system=f"debian{found[1] or '12'}", has_compiler=False, has_nvcc=False)
    if short in ("amazonlinux", "centos", "rockylinux", "almalinux", "oraclelinux", "fedora") and tag[:1].isdigit():
        version = "" if short == "fedora" else tag.split("-")[0].split(".")[0]
        clone = short if short in ("amazonlinux", "centos") else "rockylinux"  # rebuilt from the same sources
        return replace(base, family="system", system=f"{clone}{version}", has_nvcc=False)
    if short in ("ubuntu", "debian"):
        return replace(base, family="system", system=system or _system(f"{short}{tag}"), has_compiler=False,
                       has_nvcc=False, programs=LEAN)  # fmt: skip
    if plain.startswith("ghcr.io/astral-sh/uv"):
        python = _search(r"python(3\.\d+)", tag)
        family, programs = "python" if python else None, (LEAN if "slim" in tag else TOOLS) | {"uv", "python3"}
        return replace(base, family=family, python=python, system=system, has_nvcc=False,
                       has_compiler="slim" not in tag, programs=programs)  # fmt: skip
    return replace(  # what any tag may say: cuda13.0.2-efa1.48.0-ofi1.19.0-nccl2.30.4
        base,
        cuda=_search(r"cuda(\d+\.\d+)", tag),
        efa=_search(r"efa(\d+\.\d+\.\d+)", tag),
        nccl=_search(r"nccl(\d+\.\d+\.\d+)", tag),
        system=system,
    )


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


def _official(base: Base, tag: str, devel: bool | None, compilers: frozenset[str]) -> Base:
    """pytorch/pytorch: torch, torchvision and torchaudio in a Python of their own."""
    torch, cuda = _search(r"^(\d+\.\d+\.\d+)", tag), _search(r"cuda(\d+\.\d+)", tag)
    known = facts()["pytorch_images"]
    series = minor(torch) if torch else ""
    return replace(
        base,
        family="torch",
        torch=torch,
        cuda=cuda,
        python=known["python"].get(series),
        system=known["system"].get(series, known["newest_system"]) if torch else None,
        has_nvcc=devel,
        has_compiler=devel,
        # gcc for triton, and what the build of /opt/conda needs; no stage that it is made of installs these three
        programs=compilers | TOOLS - {"git", "wget", "unzip"} | {"conda", "cmake", "ninja", "bash"},
        packages=_with_companions(torch),
        platforms=tuple(known["platforms"]),
    )


def _with_companions(torch: str | None) -> tuple[tuple[str, str], ...]:
    if torch is None:
        return ()
    found = [("torch", torch)]
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
