"""Read what torch and its companions are, from the wheels of the index, into windlass/image/facts/releases.json.

python tools/make_image_table.py [--index https://pypi.org/simple] [--since 1.13]
python tools/make_image_table.py --check      exit code 1 where the index has a newer torch than the table; 0 offline
Of each wheel only the metadata is fetched, and of torch the one library that names the GPUs it is compiled for.
"""

from __future__ import annotations

import argparse
import datetime
import html
import io
import json
import re
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

OUTPUT = Path(__file__).parents[1] / "windlass" / "image" / "facts" / "releases.json"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
PACKAGES = ("hyperpod-elastic-agent", "flash-attn", "deepspeed")
COMPANIONS = {"torchvision": "0.14", "torchaudio": "0.13", "xformers": "0.0.20"}  # the first that are read
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.11", "python_full_version": "3.11.9",
         "implementation_name": "cpython", "platform_python_implementation": "CPython"}  # fmt: skip


class Index:
    """A simple package index (PEP 503)."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def files(self, project: str) -> dict[str, str]:
        """File name to address."""
        page = _get(f"{self.url}/{project}/").decode()
        found = re.findall(r'<a[^>]*href="([^"]+)"([^>]*)>\s*([^<]+?)\s*</a>', page)
        return {
            name: urljoin(f"{self.url}/{project}/", html.unescape(link)).split("#")[0]
            for link, rest, name in found
            if "data-yanked" not in rest
        }


def released(index: Index, project: str) -> dict[str, str]:
    """The day of the first file of every version, which the index says in its JSON form."""
    releases = json.loads(_get(f"{index.url.removesuffix('/simple')}/pypi/{project}/json"))["releases"]
    return {version: min(one["upload_time"][:10] for one in files) for version, files in releases.items() if files}


def _get(url: str, span: tuple[int, int] | None = None) -> bytes:
    """A file, or a part of it; a server that gives no parts gives all of it, and the part is cut out here."""
    headers = {"Range": f"bytes={span[0]}-{span[1]}"} if span else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as answer:
        body: bytes = answer.read()
        return body[span[0] : span[1] + 1] if span and answer.status != 206 else body


class RemoteFile(io.RawIOBase):
    """A file behind HTTP that is read in parts, enough of a file for zipfile."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=120) as answer:
            self.length = int(answer.headers["Content-Length"])
        self.url, self.place = url, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = (0, self.place, self.length)[whence] + offset
        return self.place

    def readinto(self, buffer: Any) -> int:
        end = min(self.place + len(buffer), self.length)
        if end <= self.place:
            return 0
        part = _get(self.url, (self.place, end - 1))
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)


def metadata(url: str) -> Any:
    """The METADATA of a wheel, or the PKG-INFO of a source archive."""
    if url.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(_get(url))) as archive:
            name = min((m.name for m in archive if m.name.endswith("PKG-INFO")), key=len)
            member = archive.extractfile(name)
            assert member is not None
            return Parser().parsestr(member.read().decode())
    try:
        return Parser().parsestr(_get(url + ".metadata").decode())
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 16)) as wheel:
        name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


def requirements(url: str, machine: str = "x86_64") -> dict[str, Requirement]:
    """What a wheel needs on Linux, without extras."""
    needed = [Requirement(line) for line in metadata(url).get_all("Requires-Dist") or ()]
    return {
        one.name: one
        for one in needed
        if one.marker is None or one.marker.evaluate({**LINUX, "platform_machine": machine, "extra": ""})
    }


def versions(files: dict[str, str]) -> dict[Version, dict[str, str]]:
    """The Linux wheels of every final release."""
    found: dict[Version, dict[str, str]] = {}
    for name, url in files.items():
        parts = name.removesuffix(".whl").split("-")
        if not name.endswith(".whl") or not ("linux" in parts[-1] or parts[-1] == "any"):
            continue
        try:
            version = Version(parts[1])
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            found.setdefault(version, {})[name] = url
    return dict(sorted(found.items()))


def pin(needed: dict[str, Requirement], name: str) -> str | None:
    """The one version that is required."""
    if name not in needed:
        return None
    exact = re.fullmatch(r"==([^*,]+)", str(needed[name].specifier))
    return exact[1] if exact else None


def torch_release(version: Version, wheels: dict[str, str]) -> dict[str, Any]:
    """A release: of every platform its Pythons, CUDA, NCCL, cuDNN and GPUs; `cuda: null` is a build for CPUs alone."""
    platforms = {}
    triton = None
    for machine, platform in PLATFORMS.items():
        own = {name: url for name, url in wheels.items() if name.endswith(f"{machine}.whl")}
        pythons = {f"3.{found[1]}" for name in own if (found := re.search(r"-cp3(\d+)-", name))}
        if not own:
            continue
        name = next((one for one in own if "-cp311-cp311-" in one), sorted(own)[0])
        needed = requirements(own[name], machine)
        triton = triton or next(
            (str(needed[one].specifier) for one in ("triton", "pytorch-triton") if one in needed), None
        )
        platforms[platform] = {"python": sorted(pythons, key=Version), **cuda_of(needed, own[name]), "wheel": name}
    return {"version": str(version), "triton": triton, "platforms": platforms}


def cuda_of(needed: dict[str, Requirement], url: str) -> dict[str, Any]:
    nccl = next((one for one in needed if re.fullmatch(r"nvidia-nccl-cu\d+", one)), None)
    runtime = next(
        (pin(needed, one) for one in needed if re.fullmatch(r"cuda-toolkit|nvidia-cuda-runtime(-cu\d+)?", one)), None
    )
    if runtime is None:
        return {"cuda": None}
    cudnn = next((one for one in needed if one.startswith("nvidia-cudnn-")), "")
    return {
        "cuda": ".".join(runtime.split(".")[:2]),
        "nccl_package": nccl,
        "nccl": pin(needed, nccl or ""),
        "cudnn": pin(needed, cudnn),
        "architectures": architectures(url),
    }


def architectures(url: str) -> list[str]:
    """The compute capabilities that torch.cuda.get_arch_list() gives: a text in the library that answers it."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), 1 << 20)) as wheel:
        for name in ("torch/lib/libtorch_python.so", "torch/lib/libtorch_cuda.so"):
            if name not in wheel.namelist():
                continue
            found = re.search(rb"(?:sm|compute)_\d+a?(?: (?:sm|compute)_\d+a?)*\x00", wheel.read(name))
            if found:
                return re.findall(r"(?:sm|compute)_\d+a?", found[0].decode())
    return []


def companions(index: Index, project: str, since: Version) -> dict[str, str]:
    """What every release of a companion requires of torch, newest first."""
    found = {}
    for version, wheels in versions(index.files(project)).items():
        suitable = [one for one in wheels if one.endswith(("x86_64.whl", "any.whl"))]
        if suitable and version >= since:
            needed = requirements(wheels[suitable[-1]])
            found[str(version)] = str(needed["torch"].specifier) if "torch" in needed else ""
    return dict(reversed(found.items()))


def package(index: Index, project: str) -> dict[str, Any]:
    """What every release of a package that goes with torch requires of it, newest first."""
    files = index.files(project)
    by_version: dict[Version, str] = {}
    for name in files:
        found = re.match(r"[A-Za-z0-9_.]+?-(\d[^-]*?)(?:\.tar\.gz|-.*\.whl)$", name)
        if found and not Version(found[1]).is_prerelease:
            best = by_version.get(Version(found[1]))
            by_version[Version(found[1])] = best if best and best.endswith(".whl") else name
    releases = {}
    for version in sorted(by_version, reverse=True)[:12]:
        name = by_version[version]
        needed = [Requirement(line) for line in metadata(files[name]).get_all("Requires-Dist") or ()]
        plain = {one.name: str(one.specifier) for one in needed if one.marker is None or "extra" not in str(one.marker)}
        releases[str(version)] = {
            "only_source": name.endswith(".tar.gz"),
            "requires": {key: plain[key] for key in ("torch", "pip", "numpy", "einops") if key in plain},
        }
    return releases


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--since", default="1.13", type=Version)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    index = Index(asked.index)
    try:
        wheels = {v: w for v, w in versions(index.files("torch")).items() if v >= asked.since}
    except OSError as error:
        if not asked.check:
            raise
        print(f"{asked.index} cannot be reached, so the age of the table is not checked: {error}")
        return 0
    if asked.check:
        known = json.loads(OUTPUT.read_text(encoding="utf-8"))
        newest, ours = max(wheels), Version(known["torch"][0]["version"])
        print(f"the table of {known['made']} ends with torch {ours}; the index has {newest}")
        return int(newest > ours)
    days = released(index, "torch")
    table = {
        "made": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "source": f"wheels of {asked.index}: Requires-Dist, file names, and the architectures in libtorch_python.so",
        "torch": [
            {**torch_release(version, files), "released": days.get(str(version))}
            for version, files in reversed(wheels.items())
        ],
        "companions": {name: companions(index, name, Version(first)) for name, first in COMPANIONS.items()},
        "packages": {name: package(index, name) for name in PACKAGES},
    }
    text = json.dumps(table, indent=1)
    # A list of versions stands on one line, so that a release is a screen and not three.
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    OUTPUT.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
