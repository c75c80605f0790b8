"""A tiny package index in a folder: wheels with real names and metadata, and a line of code where torch has 5 GB."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Wheel:
    """One wheel. `code` becomes the package's __init__.py."""

    name: str
    version: str
    requires: Sequence[str] = ()
    code: str = ""
    requires_python: str = ">=3.8"
    tag: str = "py3-none-any"
    files: dict[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    def write(self, folder: Path) -> Path:
        """Below a folder, as pip --find-links or a simple index serves it."""
        information = f"{self.package}-{self.version}.dist-info"
        metadata = [
            "Metadata-Version: 2.1",
            f"Name: {self.name}",
            f"Version: {self.version}",
            f"Requires-Python: {self.requires_python}",
            *(f"Requires-Dist: {one}" for one in self.requires),
        ]
        contents = {
            f"{self.package}/__init__.py": self.code or f"__version__ = {self.version!r}\n",
            **self.files,
            f"{information}/METADATA": "\n".join(metadata) + "\n",
            f"{information}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {self.tag}\n",
        }
        record = [f"{name},{_hash(text)},{len(text.encode())}" for name, text in contents.items()]
        contents[f"{information}/RECORD"] = "\n".join([*record, f"{information}/RECORD,,"]) + "\n"
        path = folder / f"{self.package}-{self.version}-{self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in contents.items():
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
        return path


def make_index(folder: Path, wheels: Iterable[Wheel]) -> Path:
    """The folder, for pip's --find-links."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        wheel.write(folder)
    return folder


def _hash(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
