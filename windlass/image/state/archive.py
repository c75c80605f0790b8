"""What the archive of a Debian or Ubuntu release has: its own lists of packages, read once and kept."""

from __future__ import annotations

import functools
import lzma
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from windlass.image.state.fetch import get_bytes
from windlass.image.state.resolver import DAY, Index

ARCHIVES = {
    "debian": ("http://deb.debian.org/debian/dists/{}/{}/binary-amd64/Packages.xz", ("{}",), ("main",)),
    "ubuntu": (
        "http://archive.ubuntu.com/ubuntu/dists/{}/{}/binary-amd64/Packages.xz",
        ("{}", "{}-updates"),
        ("main", "universe", "restricted", "multiverse"),
    ),
}


def lacking(index: Index, system: str, codename: str, names: Collection[str]) -> list[str] | None:
    """Those of some packages that apt cannot install; all of them where the archive is gone; None: out of reach."""
    asked = sorted(names)
    known: dict[str, Any] | None = index.kept(
        "apt", [system, asked], lambda: _lacking(index, re.sub(r"[\d.]", "", system), codename, asked), 7 * DAY
    )
    return known["lacking"] if known else None


def _lacking(index: Index, family: str, codename: str, asked: list[str]) -> dict[str, Any] | None:
    names = index.kept("archive", [family, codename], functools.partial(_names, family, codename), 7 * DAY)
    return None if names is None else {"lacking": sorted(set(asked) - set(names))}


def _names(family: str, codename: str) -> list[str] | None:
    """Packages, and the names that exactly one package provides: of several, apt takes none."""
    address, suites, components = ARCHIVES[family]
    packages: set[str] = set()
    provided: set[tuple[str, str]] = set()
    for suite in suites:
        for component in components:
            data = get_bytes(address.format(suite.format(codename), component))
            if data is None:
                return None
            text = lzma.decompress(data).decode() if data else ""
            package = ""
            for key, value in re.findall(r"(?m)^(Package|Provides): (.+)$", text):
                if key == "Package":
                    package = value
                    packages.add(package)
                else:
                    provided |= {(package, name.split()[0]) for name in value.split(", ")}
    alone = Counter(name for _, name in provided)
    return sorted(packages | {name for name, count in alone.items() if count == 1})
