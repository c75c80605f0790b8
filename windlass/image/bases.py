"""What the name of a base image says: its CUDA, torch, Python and system. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

SYSTEM_PYTHON = {
    "ubuntu22.04": "3.10",
    "ubuntu24.04": "3.12",
    "debian11": "3.9",
    "debian12": "3.11",
    "debian13": "3.13",
}
CODENAMES = {
    "jammy": "ubuntu22.04",
    "noble": "ubuntu24.04",
    "focal": "ubuntu20.04",
    "bullseye": "debian11",
    "bookworm": "debian12",
    "trixie": "debian13",
}


@dataclass(frozen=True)
class Base:
    """An image by its name. None: the name does not say."""

    image: str
    repository: str
    tag: str | None
    digest: str | None
    family: str | None = None  # cuda, torch, python, system; None: another
    cuda: str | None = None
    torch: str | None = None
    python: str | None = None
    system: str | None = None
    efa: str | None = None
    nccl: str | None = None
    has_nvcc: bool | None = None
    has_compiler: bool | None = None

    @property
    def pinned(self) -> bool:
        return self.digest is not None or (self.tag is not None and self.tag != "latest")


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
    if plain.endswith("nvidia/cuda"):
        return replace(
            base,
            family="cuda",
            cuda=_search(r"^(\d+\.\d+)", tag),
            system=system,
            python=SYSTEM_PYTHON.get(system or ""),
            has_nvcc=devel,
            has_compiler=devel,
        )
    if plain.endswith("pytorch/pytorch"):
        torch, cuda = _search(r"^(\d+\.\d+\.\d+)", tag), _search(r"cuda(\d+\.\d+)", tag)
        return replace(base, family="torch", torch=torch, cuda=cuda, has_nvcc=devel, has_compiler=devel)
    if plain.endswith("nvidia/pytorch"):
        return replace(base, family="nvidia-torch", has_nvcc=True, has_compiler=True)
    if short.startswith(("pytorch-training", "pytorch-inference")):
        return replace(
            base,
            family="torch",
            torch=_search(r"^(\d+\.\d+(?:\.\d+)?)", tag),
            python=_dotted(r"py(\d)(\d+)", tag),
            cuda=_dotted(r"cu(\d\d)(\d)", tag),
            system=system,
            has_compiler=True,
        )
    if short == "python":
        slim = "slim" in tag or "alpine" in tag
        python = _search(r"^(3\.\d+)", tag)
        return replace(base, family="python", python=python, system=system, has_compiler=not slim, has_nvcc=False)
    if short in ("ubuntu", "debian"):
        system = system or _system(f"{short}{tag}")
        python = SYSTEM_PYTHON.get(system or "")
        return replace(base, family="system", system=system, python=python, has_compiler=False, has_nvcc=False)
    return replace(  # what any tag may say: cuda13.0.2-efa1.48.0-ofi1.19.0-nccl2.30.4
        base,
        cuda=_search(r"cuda(\d+\.\d+)", tag),
        efa=_search(r"efa(\d+\.\d+\.\d+)", tag),
        nccl=_search(r"nccl(\d+\.\d+\.\d+)", tag),
        system=system,
    )


def _system(text: str) -> str | None:
    found = re.search(r"(ubuntu|debian)-?(\d+(?:\.\d+)?)", text)
    if found:
        return found[1] + (found[2] if found[1] == "ubuntu" else found[2].split(".")[0])
    return next((system for name, system in CODENAMES.items() if name in text), None)


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _dotted(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return f"{found[1]}.{found[2]}" if found else None
