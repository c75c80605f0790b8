"""Read requirement and constraint files, and the requirements of a command, with their places."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

LARGEST_FILE = 1_000_000  # bytes; a requirement file is never that long


@dataclass(frozen=True)
class Place:
    """Where something stands."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Wanted:
    """One requirement, as a user wrote it."""

    name: str  # canonical
    text: str
    requirement: Requirement | None  # None: a path or an address
    place: Place
    constraint: bool = False
    url: str | None = None
    index: str | None = None  # the one that the project takes it from

    @property
    def pin(self) -> str | None:
        """The one version asked for; None where several would do."""
        if self.url:
            found = wheel_of(self.url)
            return str(found[1]) if found else None
        if self.requirement is None:
            return None
        for one in self.requirement.specifier:
            if one.operator in ("==", "===") and not one.version.endswith(".*"):
                return one.version
        return None

    @property
    def bounded(self) -> bool:
        """Whether the user said anything about the version."""
        return bool(self.url or (self.requirement and str(self.requirement.specifier)))


@dataclass(frozen=True)
class RequirementFile:
    wanted: tuple[Wanted, ...]
    options: tuple[tuple[str, str, Place], ...]  # --extra-index-url and the like
    missing: tuple[tuple[str, Place], ...]  # files that are named but not there


def read_requirement_files(folder: Path, names: Sequence[str], *, only_requirements: bool = False) -> dict[str, str]:
    """Requirement files with those that they name; `only_requirements` passes over other text files."""
    texts: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        path = folder / name
        if name in texts or not path.is_file() or path.stat().st_size > LARGEST_FILE:
            continue
        if only_requirements and not re.search(r"require|constraint|\breqs?\b", path.name):
            continue
        texts[name] = path.read_text(encoding="utf-8-sig", errors="replace")
        others = re.findall(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[ =]+(\S+)", texts[name])
        waiting += [posixpath.normpath(posixpath.join(posixpath.dirname(name), other)) for other in others]
    return texts


def parse_requirements(name: str, files: Mapping[str, str], *, constraint: bool = False) -> RequirementFile:
    """A file with the files it names; a file that names itself is read once."""
    wanted: list[Wanted] = []
    options: list[tuple[str, str, Place]] = []
    missing: list[tuple[str, Place]] = []
    _read(name, files, constraint, wanted, options, missing, set())
    return RequirementFile(tuple(wanted), tuple(options), tuple(missing))


def _read(
    name: str,
    files: Mapping[str, str],
    constraint: bool,
    wanted: list[Wanted],
    options: list[tuple[str, str, Place]],
    missing: list[tuple[str, Place]],
    seen: set[str],
) -> None:
    if name in seen:
        return
    seen.add(name)
    for number, line in logical_lines(files[name]):
        place = Place(name, number)
        option = re.match(r"(--?[a-zA-Z][\w-]*)(?:[= ]\s*(\S+))?", line) if line.startswith("-") else None
        if option is None:
            wanted.append(wanted_of(line, place, constraint=constraint))
        elif option[1] in ("-r", "--requirement", "-c", "--constraint"):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(name), option[2] or ""))
            if other in files:
                below = constraint or option[1] in ("-c", "--constraint")
                _read(other, files, below, wanted, options, missing, seen)
            else:
                missing.append((other, place))
        elif option[1] in ("-e", "--editable"):
            wanted.append(wanted_of(option[2] or "", place, constraint=constraint))
        else:
            options.append((option[1], option[2] or "", place))


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines without comments, continued ones joined, each with the number of its first line."""
    held, start = "", 0
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):  # pip drops the mark too
        if not held:
            start = number
        if line.rstrip().endswith("\\"):
            held += line.rstrip()[:-1] + " "
            continue
        whole = re.sub(r"(^|\s)#.*$", "", held + line).strip()
        held = ""
        if whole:
            yield start, whole
    if held.strip():
        yield start, held.strip()


def wanted_of(text: str, place: Place, *, constraint: bool = False) -> Wanted:
    plain = re.split(r"\s--(?:hash|config-settings|global-option)", text)[0].strip()
    try:
        requirement = Requirement(plain)
    except InvalidRequirement:
        wheel, egg = wheel_of(plain), re.search(r"#egg=([\w.-]+)", plain)
        name = egg[1] if egg else wheel[0] if wheel else re.sub(r"\[.*", "", project_name(plain))
        return Wanted(canonicalize_name(name), plain, None, place, constraint, plain)
    return Wanted(canonicalize_name(requirement.name), plain, requirement, place, constraint, requirement.url)


REPOSITORIES = {  # whose project has another name
    "flash-attention": "flash-attn",
    "TransformerEngine": "transformer-engine",
    "tiny-cuda-nn": "tinycudann",
}


def project_name(source: str) -> str:
    """apex of git+https://github.com/NVIDIA/apex.git@24.04"""
    address = re.sub(r"@[\w.-]+$", "", source.split("#")[0])
    address = re.sub(r"/(?:-/)?(?:archive|zipball|tarball)/.*$", "", address)  # CLIP/archive/refs/heads/main.zip
    name = address.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    return {
        "flash-attention": "flash-attn",
        "TransformerEngine": "transformer-engine",
        "tiny-cuda-nn": "tinycudann",
    }.get(name, canonicalize_name(name))


def wheel_of(url: str) -> tuple[str, Version, frozenset[str]] | None:
    """Name, version and tags of a wheel that a path or an address ends in."""
    name = url.split("#")[0].split("?")[0].rsplit("/", 1)[-1].replace("%2B", "+").replace("%2b", "+")
    if not name.endswith(".whl"):
        return None
    try:
        distribution, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return None
    return distribution, version, frozenset(str(tag) for tag in tags)
