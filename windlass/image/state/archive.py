"""What apt-get installs: the archive of a Debian or Ubuntu release, read once from its own lists and kept."""

from __future__ import annotations

import functools
import lzma
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

from windlass.image.state.fetch import get_bytes
from windlass.image.state.resolver import DAY, Index

ARCHIVES = {  # where the lists are, by suite; and the components
    "debian": (
        {
            "{}": "http://deb.debian.org/debian",
            "{}-updates": "http://deb.debian.org/debian",
            "{}-security": "http://deb.debian.org/debian-security",
        },
        ("main",),
    ),
    "ubuntu": (
        dict.fromkeys(("{}", "{}-updates", "{}-security"), "http://archive.ubuntu.com/ubuntu"),
        ("main", "universe", "restricted", "multiverse"),
    ),
}
FIELD = re.compile(r"(?m)^(Package|Version|Depends|Pre-Depends|Recommends|Provides): (.+)$")


def installed_by(
    index: Index, system: str, codename: str, names: Collection[str], *, recommends: bool
) -> dict[str, list[str]] | None:
    """`lacking`: what apt-get cannot install, as it was asked for; `brings`: what comes with the rest. None: not known.

    Everything is lacking where the archive is gone.
    """
    asked = sorted(names)
    family = re.sub(r"[\d.]", "", system)
    known: dict[str, list[str]] | None = index.kept(
        "apt-closure",
        [system, asked, recommends],
        lambda: _installed(index, family, codename, asked, recommends),
        7 * DAY,
    )
    return known


def _installed(index: Index, family: str, codename: str, asked: list[str], recommends: bool) -> dict[str, Any] | None:
    archive = index.kept("archive-lists", [family, codename], functools.partial(_lists, family, codename), 7 * DAY)
    if archive is None:
        return None
    packages, provided = archive["packages"], archive["provided"]
    lacking, waiting = [], []
    for text in asked:
        name, _, version = text.partition("=")
        providers = provided.get(name, ())
        real = name if name in packages else providers[0] if len(providers) == 1 else None  # of several, apt takes none
        if real is None or (version and not any(fnmatchcase(known, version) for known in packages[real]["versions"])):
            lacking.append(text)
        else:
            waiting.append(real)
    brought: set[str] = set()
    while waiting:
        package = waiting.pop()
        if package in brought or package not in packages:
            continue
        brought.add(package)
        needs = packages[package]["needs"] + (packages[package]["recommends"] if recommends else [])
        for alternatives in needs:
            if brought.isdisjoint(alternatives):
                there = (name for name in alternatives if name in packages or name in provided)
                first = next(there, "")
                waiting.append(first if first in packages else next(iter(provided.get(first, ())), ""))
    return {"lacking": lacking, "brings": sorted(brought)}


def _lists(family: str, codename: str) -> dict[str, Any] | None:
    """Every package with its versions and needs, and who provides the names that are no packages."""
    suites, components = ARCHIVES[family]
    packages: dict[str, dict[str, Any]] = {}
    provided: dict[str, list[str]] = {}
    for suite, address in suites.items():
        for component in components:
            data = get_bytes(f"{address}/dists/{suite.format(codename)}/{component}/binary-amd64/Packages.xz")
            if data is None:
                return None
            entry: dict[str, Any] = {}
            name = ""
            for key, value in FIELD.findall(lzma.decompress(data).decode() if data else ""):
                if key == "Package":
                    name = value
                    entry = packages.setdefault(name, {"versions": [], "needs": [], "recommends": []})
                    entry["needs"], entry["recommends"] = [], []
                elif key == "Version":
                    entry["versions"].append(value)
                elif key == "Provides":
                    for alternatives in _alternatives(value):
                        if name not in provided.setdefault(alternatives[0], []):
                            provided[alternatives[0]].append(name)
                else:
                    entry["recommends" if key == "Recommends" else "needs"] += list(_alternatives(value))
    return {"packages": packages, "provided": provided}


def _alternatives(value: str) -> Iterator[list[str]]:
    """[[a, b], [c]] of `a (>= 1) | b, c:any`."""
    for part in value.split(", "):
        yield [re.split(r"[\s(:]", name.strip(), maxsplit=1)[0] for name in part.split("|")]
