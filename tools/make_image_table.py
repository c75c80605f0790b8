"""Read what torch and its companions require, from the package index, into windlass/image/releases.json.

python tools/make_image_table.py [--index https://pypi.org/simple] [--since 2.4]
Only the metadata of each wheel is fetched: by its .metadata file, else the few kilobytes of the zip that hold it.
"""

from __future__ import annotations

import argparse
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

OUTPUT = Path(__file__).parents[1] / "windlass" / "image" / "releases.json"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
PACKAGES = ("hyperpod-elastic-agent", "flash-attn", "deepspeed")
FIRST_TORCHVISION = "0.19"  # belongs to torch 2.4
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12"}


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


def requirements(url: str) -> dict[str, Requirement]:
    """What a wheel needs on Linux, without extras."""
    needed = [Requirement(line) for line in metadata(url).get_all("Requires-Dist") or ()]
    return {one.name: one for one in needed if one.marker is None or one.marker.evaluate({**LINUX, "extra": ""})}


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
    tags = [name.removesuffix(".whl").split("-")[2:] for name in wheels]
    pythons = {f"3.{tag[1][3:]}" for tag in tags if re.fullmatch(r"cp3(8|9|1\d)", tag[1])}
    machines = {PLATFORMS[m] for m in PLATFORMS if any(tag[2].endswith(m) for tag in tags)}
    name = next(one for one in wheels if "-cp312-cp312-" in one and one.endswith("x86_64.whl"))
    needed = requirements(wheels[name])
    nccl = next(one for one in needed if re.fullmatch(r"nvidia-nccl-cu\d+", one))
    major = nccl.removeprefix("nvidia-nccl-cu")
    cuda = pin(needed, "cuda-toolkit") or pin(needed, f"nvidia-cuda-runtime-cu{major}")
    assert cuda is not None, name
    triton = next((one for one in needed if one in ("triton", "pytorch-triton")), None)
    return {
        "version": str(version),
        "python": sorted(pythons, key=Version),
        "platforms": sorted(machines),
        "cuda": ".".join(cuda.split(".")[:2]),
        "nccl_package": nccl,
        "nccl": pin(needed, nccl),
        "cudnn": pin(needed, f"nvidia-cudnn-cu{major}"),
        "triton": str(needed[triton].specifier) if triton else None,
        "source": f"Requires-Dist of {name}",
    }


def companions(index: Index, project: str, since: Version) -> dict[str, str]:
    """What every release of a companion requires of torch, newest first."""
    found = {}
    for version, wheels in versions(index.files(project)).items():
        suitable = [one for one in wheels if one.endswith(("x86_64.whl", "any.whl"))]
        if suitable and version >= since:
            needed = requirements(wheels[suitable[-1]])
            found[str(version)] = str(needed["torch"].specifier) if "torch" in needed else ""
    return dict(reversed(found.items()))


def newest(index: Index, project: str) -> dict[str, Any]:
    """The newest release of a package with what it requires of torch."""
    files = index.files(project)
    by_version: dict[Version, str] = {}
    for name in files:
        found = re.match(r"[A-Za-z0-9_.]+?-(\d[^-]*?)(?:\.tar\.gz|-.*\.whl)$", name)
        if found and not Version(found[1]).is_prerelease:
            best = by_version.get(Version(found[1]))
            by_version[Version(found[1])] = best if best and best.endswith(".whl") else name
    version = max(by_version)
    name = by_version[version]
    about = metadata(files[name])
    needed = [Requirement(line) for line in about.get_all("Requires-Dist") or ()]
    plain = {one.name: str(one.specifier) for one in needed if one.marker is None or "extra" not in str(one.marker)}
    return {
        "version": str(version),
        "only_source": not any(one.endswith(".whl") for one in files if f"-{version}-" in one),
        "requires": {key: plain[key] for key in ("torch", "pip", "numpy") if key in plain},
        "source": f"metadata of {name}",
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--since", default="2.4", type=Version)
    asked = parser.parse_args(arguments)
    index = Index(asked.index)
    wheels = {v: w for v, w in versions(index.files("torch")).items() if v >= asked.since}
    table = {
        "torch": [torch_release(version, files) for version, files in reversed(wheels.items())],
        "companions": {
            "torchvision": companions(index, "torchvision", Version(FIRST_TORCHVISION)),
            "torchaudio": companions(index, "torchaudio", asked.since),
        },
        "packages": {name: newest(index, name) for name in PACKAGES},
    }
    text = json.dumps(table, indent=1)
    OUTPUT.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
