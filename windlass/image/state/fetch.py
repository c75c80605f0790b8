"""Fetch what indexes hold: whole files, parts of them, and single files of a wheel without the rest."""

from __future__ import annotations

import io
import re
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error)  # of an archive that is cut off, too
BLOCK = 1 << 20
SMALL = 8 << 20  # a wheel that is fetched whole: one request costs more than its bytes
LARGEST = 40_000_000  # bytes of an answer


def get_bytes(url: str, first: int = 0, last: int = 0, *, size: bool = False) -> bytes | None:
    """A part of it where `last` is given; its size as a number. None: out of reach; nothing: it is not there."""
    asked = urllib.request.Request(
        url, headers={"Range": f"bytes={first}-{last}"} if last else {}, method="HEAD" if size else "GET"
    )
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(answer.headers["Content-Length"]).encode() if size else bytes(answer.read(LARGEST))
    except urllib.error.HTTPError:
        return b""
    except OSError:
        return None


def get(url: str) -> str | None:
    data = get_bytes(url)
    return None if data is None else data.decode(errors="replace")


class Ranges(io.RawIOBase):
    """A file on a server, of which only the parts are fetched that are read."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.at = url, size, 0
        self.block = max(size, 1) if size <= SMALL else BLOCK
        self.blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.size if size < 0 else min(self.size, self.at + size)
        parts = []
        while self.at < end:
            number = self.at // self.block
            if number not in self.blocks:
                first = number * self.block
                data = get_bytes(self.url, first=first, last=min(self.size, first + self.block) - 1)
                if not data:
                    raise OSError(f"{self.url} is out of reach")
                self.blocks[number] = data
            part = self.blocks[number][self.at % self.block :][: end - self.at]
            if not part:
                raise OSError(f"{self.url} is shorter than it says")
            parts.append(part)
            self.at += len(part)
        return b"".join(parts)


@dataclass(frozen=True)
class Wheel:
    """The files of a wheel, fetched one by one."""

    archive: zipfile.ZipFile

    @cached_property
    def modules(self) -> dict[str, str]:
        """File by dotted name."""
        return {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
            for name in self.archive.namelist()
            if name.endswith(".py")
        }

    @cached_property
    def packages(self) -> frozenset[str]:
        return frozenset(re.split(r"[/.]", name)[0] for name in self.archive.namelist())

    @property
    def requires(self) -> list[str]:
        """Requires-Dist of its METADATA."""
        name = next((name for name in self.archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        return re.findall(r"(?m)^Requires-Dist: (.+?)\r?$", self.archive.read(name).decode()) if name else []

    def text(self, module: str) -> str | None:
        name = self.modules.get(module)
        return self.archive.read(name).decode(errors="replace") if name else None


@lru_cache(32)
def open_wheel(url: str | None) -> Wheel | None:
    """Its source distribution where the address is of one. None: out of reach."""
    if url and url.endswith(".tar.gz"):
        data = get_bytes(url)
        return _source(data) if data else None
    size = get_bytes(url, size=True) if url else None
    if not url or not size or not size.isdigit():
        return None
    try:
        return Wheel(zipfile.ZipFile(Ranges(url, int(size))))
    except (OSError, zipfile.BadZipFile):
        return None


def _source(data: bytes) -> Wheel | None:
    """The Python files of a source distribution, where a wheel would have them."""
    archive = zipfile.ZipFile(io.BytesIO(), "w")
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as files:
            for member in files:
                name = re.sub(r"^[^/]+/(?:src/|lib/|python/)?", "", member.name)
                if name.endswith(".py") and name != "setup.py" and (file := files.extractfile(member)):
                    archive.writestr(name, file.read())
    except BROKEN:
        return None
    return Wheel(archive)


def written_requires(archive: bytes) -> list[str]:
    """What a source distribution says that it requires: in its PKG-INFO, or where setuptools wrote it before."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            texts = {
                name.split("/", 1)[1]: file.read().decode(errors="replace")
                for name in files.getnames()
                if re.fullmatch(r"[^/]+/(?:[^/]+\.egg-info/requires\.txt|PKG-INFO)", name)
                and (file := files.extractfile(name))
            }
    except BROKEN:
        return []
    said = re.findall(r"(?m)^Requires-Dist: (.+)$", texts.pop("PKG-INFO", ""))
    return said or [line for text in texts.values() for line in text.split("[")[0].split("\n") if line.strip()]
