"""The files that a build sees: listed, hashed, and staged where fixes may change them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

from windlass.common.files import sha256_of
from windlass.errors import UserError

# Without a .dockerignore: what no image wants, and what must not leave the machine.
USUALLY_IGNORED = (
    *(".git", ".venv", "venv", "runs", "images", "node_modules", ".aws", ".ssh", "**/.env", "**/.env.*", "**/*.pem"),
    *("**/__pycache__", "**/*.pyc", "**/*.egg-info", "**/.mypy_cache", "**/.pytest_cache", "**/.ruff_cache"),
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
            parts = _parts(pattern.removeprefix("!"))
            if parts and _matches(parts, path.split("/")):
                ignored = not pattern.startswith("!")
        return ignored

    def may_skip(self, folder: str) -> bool:
        """Whether nothing below a folder can be wanted, so that it need not be read."""
        return self.ignores(folder) and not any(pattern.startswith("!") for pattern in self.patterns)


@cache
def _parts(pattern: str) -> Sequence[str]:
    """The parts of a pattern of Go between its slashes, as `fnmatch` writes them."""
    translated = re.sub(r"\\(.)", r"[\1]", pattern.replace("[^", "[!"))
    return [part for part in translated.strip().split("/") if part not in ("", ".")]


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a pattern matches a path, or a folder that it is in."""
    if not pattern:
        return True
    if not path:
        return False
    if pattern[0] == "**":
        return len(pattern) == 1 or any(_matches(pattern[1:], path[start:]) for start in range(len(path)))
    return fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


EDITABLE_BYTES = 200_000
# Whatever a Dockerfile may name to say what is installed.
EDITABLE = (
    *(".txt", ".in", ".toml", ".cfg", ".lock", ".yml", ".yaml", ".sh", ".pip", ".req", ".reqs", ".constraints"),
    *("setup.py", ".python-version", "pip.conf"),
)
CODE = (".py", ".json")
DOCKERIGNORE = ".dockerignore"
NOTHING: Mapping[str, str] = {}
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
        files: list[str] = []
        for root, folders, names in os.walk(self.folder):
            at = Path(root).relative_to(self.folder).as_posix()
            prefix = "" if at == "." else f"{at}/"
            links = [name for name in folders if os.path.islink(os.path.join(root, name))]
            folders[:] = [name for name in folders if name not in links and not self.ignore.may_skip(prefix + name)]
            names += links
            kept = [name for name in names if not self.ignore.ignores(prefix + name)]
            files += [prefix + name for name in kept if _is_file(os.path.join(root, name))]
        return tuple(sorted(files))

    def texts(self) -> dict[str, str]:
        """The small text files that may say what is installed, whatever their names."""
        return self._small(lambda name: name.endswith(EDITABLE) or "." not in name.rsplit("/", 1)[-1])

    def code(self) -> dict[str, str]:
        """The small files that say what an image does when it runs."""
        return self._small(lambda name: name.endswith(CODE))

    def _small(self, wanted: Callable[[str], bool]) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name in filter(wanted, self.files):
            path = self.folder / name
            if path.is_file() and path.stat().st_size <= EDITABLE_BYTES:
                with contextlib.suppress(UnicodeDecodeError):
                    texts[name] = path.read_bytes().decode()  # line endings as they are
        return texts

    def digest(self, changed: Mapping[str, str] = NOTHING) -> str:
        """sha256 over names, kinds, modes and bytes: equal for equal files, whenever and wherever they were written."""
        total = hashlib.sha256()
        for name in sorted({*self.files, *changed}):
            total.update(f"{name}\0{_file_digest(self.folder / name, changed.get(name))}\n".encode())
        return total.hexdigest()

    def stage(self, destination: Path, changed: Mapping[str, str] = NOTHING) -> None:
        """The files in a folder of their own, linked where that is possible, with `changed` ones in their place."""
        for name in {*self.files, *changed} - {DOCKERIGNORE}:  # its work is done
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in changed:
                target.write_text(changed[name])
            else:
                _link(self.folder / name, target)

    def copy(self, destination: Path) -> None:
        """The files in a folder that is theirs alone: what was there before goes."""
        shutil.rmtree(destination, ignore_errors=True)
        for name in self.files:
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.folder / name, target, follow_symlinks=False)


def _file_digest(path: Path, text: str | None) -> str:
    """Kind and content of a file; `text` instead of its bytes where it is given."""
    if text is None and path.is_symlink():
        return f"link:{os.readlink(path)}"
    mode = "x" if path.is_file() and path.stat().st_mode & 0o100 else "f"
    content = sha256_of(path) if text is None else hashlib.sha256(text.encode()).hexdigest()
    return f"{mode}:{content}"


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
                shutil.copyfileobj(source, target)
        for name, text in sorted(extra.items()):
            zipped.writestr(zipfile.ZipInfo(name, ZIP_TIME), text)


def _is_file(path: str) -> bool:
    """Or a link; sockets and pipes are no files to copy, and reading one would wait for ever.

    Not `Path.is_file`, which raises in a folder that may be listed but not entered.
    """
    return os.path.islink(path) or os.path.isfile(path)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        shutil.copy2(source, target, follow_symlinks=False)


def context_names(folder: Path) -> frozenset[str]:
    """Every file that a builder sends: all but what a .dockerignore leaves out."""
    file = folder / DOCKERIGNORE
    return frozenset(Context(folder, Ignore.of(file.read_text() if file.is_file() else "")).files)


def text_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, str]:
    """The text files of a build context, less some."""
    return {name: text for name, text in Context.open(folder).texts().items() if name not in leave_out}


def code_files(folder: Path) -> dict[str, str]:
    """The Python files and configurations of a build context."""
    return Context.open(folder).code()
