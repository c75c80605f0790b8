"""The files that a build sees: listed, hashed, and staged where fixes may change them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from windlass.errors import UserError

# Without a .dockerignore: what no image wants, and what must not leave the machine.
USUALLY_IGNORED = (
    ".git",
    "**/__pycache__",
    "**/*.pyc",
    ".venv",
    "venv",
    "runs",
    "images",
    "**/.mypy_cache",
    "**/.pytest_cache",
    "**/.ruff_cache",
    "**/*.egg-info",
    "node_modules",
    "**/.env",
    "**/.env.*",
    "**/*.pem",
    ".aws",
    ".ssh",
)
# Ours: written by builds, and no part of them.
ALWAYS_IGNORED = ("**/*.windlass",)


@dataclass(frozen=True)
class Ignore:
    """The patterns in order; the last that matches a path decides, and `!` takes one back."""

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, dockerignore: str | None) -> Ignore:
        if dockerignore is None:
            return cls((*USUALLY_IGNORED, *ALWAYS_IGNORED))
        lines = [line.strip() for line in dockerignore.splitlines()]
        return cls((*(line for line in lines if line and not line.startswith("#")), *ALWAYS_IGNORED))

    def ignores(self, path: str) -> bool:
        """Whether a file (its path relative to the folder, with /) is left out."""
        ignored = False
        for pattern in self.patterns:
            taken_back = pattern.startswith("!")
            if _expression(pattern.removeprefix("!")).fullmatch(path):
                ignored = not taken_back
        return ignored

    def may_skip(self, folder: str) -> bool:
        """Whether nothing below a folder can be wanted, so that it need not be read."""
        return self.ignores(folder) and not any(pattern.startswith("!") for pattern in self.patterns)


def _expression(pattern: str) -> re.Pattern[str]:
    """A pattern matches a path, and everything below it."""
    parts: Sequence[str] = [part for part in pattern.strip().strip("/").split("/") if part not in ("", ".")]
    text = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            text += ".*" if last else "(?:.*/)?"
            continue
        text += _one_part(part) + ("" if last else "/")
    return re.compile(f"{text}(?:/.*)?", re.DOTALL)


def _one_part(part: str) -> str:
    text, position = "", 0
    while position < len(part):
        letter = part[position]
        end = part.find("]", position + 2) if letter == "[" else -1
        if letter == "*":
            while part[position + 1 : position + 2] == "*":
                position += 1
            text += "[^/]*"
        elif letter == "?":
            text += "[^/]"
        elif end > 0:
            text += part[position : end + 1]
            position = end
        elif letter == "\\" and position + 1 < len(part):
            position += 1
            text += re.escape(part[position])
        else:
            text += re.escape(letter)
        position += 1
    return text


EDITABLE_BYTES = 200_000
# Whatever a Dockerfile may name to say what is installed.
EDITABLE = (".txt", ".in", ".toml", ".cfg", ".lock", ".yml", ".yaml", ".sh", ".pip", ".req", ".reqs", ".constraints",
            "setup.py", ".python-version", "pip.conf")  # fmt: skip
DOCKERIGNORE = ".dockerignore"
BLOCK = 1 << 20
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows: the same files make the same archive


@dataclass(frozen=True)
class Context:
    """A folder, less what its .dockerignore leaves out."""

    folder: Path
    ignore: Ignore

    @classmethod
    def open(cls, folder: Path) -> Context:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder to build from", fix="image.context=FOLDER    or --context FOLDER")
        file = folder / DOCKERIGNORE
        return cls(folder, Ignore.of(file.read_text() if file.is_file() else None))

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Paths relative to the folder, with /, in order."""
        found: list[str] = []
        for root, folders, names in os.walk(self.folder):
            at = Path(root).relative_to(self.folder).as_posix()
            prefix = "" if at == "." else f"{at}/"
            links = [name for name in folders if os.path.islink(os.path.join(root, name))]
            folders[:] = [name for name in folders if name not in links and not self.ignore.may_skip(prefix + name)]
            kept = [name for name in (*names, *links) if not self.ignore.ignores(prefix + name)]
            found += [prefix + name for name in kept if _is_file(os.path.join(root, name))]
        return tuple(sorted(found))

    def texts(self) -> dict[str, str]:
        """The small text files that may say what is installed, whatever their names."""
        texts: dict[str, str] = {}
        for name in self.files:
            path = self.folder / name
            named = name.endswith(EDITABLE) or "." not in path.name
            if named and path.is_file() and path.stat().st_size <= EDITABLE_BYTES:
                try:
                    texts[name] = path.read_text()
                except UnicodeDecodeError:
                    continue
        return texts

    def digest(self, changed: Mapping[str, str] | None = None) -> str:
        """sha256 over names, kinds, modes and bytes: equal for equal files, whenever and wherever they were written."""
        total = hashlib.sha256()
        for name in self.files:
            total.update(f"{name}\0{file_digest(self.folder / name, (changed or {}).get(name))}\n".encode())
        for name in sorted(set(changed or ()) - set(self.files)):
            total.update(f"{name}\0new:{hashlib.sha256((changed or {})[name].encode()).hexdigest()}\n".encode())
        return total.hexdigest()

    def stage(self, destination: Path, changed: Mapping[str, str] | None = None) -> Path:
        """The files in a folder of their own, linked where that is possible, with `changed` ones in their place."""
        for name in self.files:
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name not in (changed or {}) and name != DOCKERIGNORE:  # its work is done
                _link(self.folder / name, target)
        for name, text in (changed or {}).items():
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # else a write would go through the link into the user's own file
            target.write_text(text)
        return destination


def file_digest(path: Path, text: str | None = None) -> str:
    """Kind and content of one file; `text` instead of its bytes where it is given."""
    if text is not None:
        return f"{_mode(path)}:{hashlib.sha256(text.encode()).hexdigest()}"
    if path.is_symlink():
        return f"link:{os.readlink(path)}"
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return f"{_mode(path)}:{total.hexdigest()}"


def write_zip(folder: Path, names: Iterable[str], archive: Path, extra: Mapping[str, str]) -> None:
    """The same bytes for the same files. `extra`: further files, as text."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in sorted(names):
            info = zipfile.ZipInfo(name, ZIP_TIME)
            path = folder / name
            if path.is_symlink():
                info.external_attr = 0o120777 << 16
                zipped.writestr(info, os.readlink(path))
                continue
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if os.access(path, os.X_OK) else 0o644) << 16
            with zipped.open(info, "w") as target, path.open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
        for name, text in sorted(extra.items()):
            zipped.writestr(zipfile.ZipInfo(name, ZIP_TIME), text)


def _is_file(path: str) -> bool:
    """Or a link; sockets and pipes are no files to copy, and reading one would wait for ever."""
    return os.path.islink(path) or os.path.isfile(path)


def _mode(path: Path) -> str:
    return "x" if path.exists() and os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "f"


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def text_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, str]:
    """The text files of a build context, less some."""
    return {name: text for name, text in Context.open(folder).texts().items() if name not in leave_out}
