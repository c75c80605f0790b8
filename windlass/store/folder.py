"""A folder as a store: the same promises on a file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

from windlass.common.files import sync_directory
from windlass.store.interface import Entry, Store, Upload

PART = ".part-"  # names of files on their way in; never listed


@dataclass(frozen=True)
class FolderStore:
    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        start = self.path / prefix if not prefix or prefix.endswith("/") else (self.path / prefix).parent
        names = sorted(
            file.relative_to(self.path).as_posix()
            for file in start.rglob("*")
            if file.is_file() and not file.name.startswith(PART)
        )
        for name in names:
            entry = self.stat(name) if name.startswith(prefix) else None
            if entry:
                yield entry

    def folders(self, prefix: str = "") -> list[str]:
        start = self.path / prefix
        return sorted(child.name for child in start.iterdir() if child.is_dir()) if start.is_dir() else []

    def stat(self, name: str) -> Entry | None:
        try:
            status = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(name, status.st_size, status.st_mtime, f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}")

    def read(self, name: str, start: int = 0, size: int | None = None, *, version: str | None = None) -> bytes:
        if version is not None:
            entry = self.stat(name)
            if entry is not None and entry.version != version:
                raise OSError(f"{self.path / name} changed while it was read")
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read() if size is None else file.read(size)

    def get(self, name: str, path: Path) -> Entry:
        self._copy(self.path / name, path)
        entry = self.stat(name)
        if entry is None:
            raise FileNotFoundError(self.path / name)
        return entry

    def put(self, path: Path, name: str, *, sha256: str | None = None) -> Entry:
        self._copy(path, self.path / name)
        entry = self.stat(name)
        assert entry is not None
        return entry

    @contextlib.contextmanager
    def create(self, name: str, *, size: int, only_new: bool = False) -> Iterator[BufferedWriter]:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{PART}{target.name}-{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if only_new:
                os.link(temporary, target)  # unlike a rename, refuses to replace
                temporary.unlink()
            else:
                temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(target.parent)

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        try:
            with self.create(name, size=len(data), only_new=only_new) as file:
                file.write(data)
        except FileExistsError:
            if only_new and (self.path / name).exists():
                return False
            raise  # a file stands where a folder must be
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.path / name
            path.unlink(missing_ok=True)
            for folder in path.parents:  # an object store has no empty folders; neither does this one
                if folder == self.path:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def unfinished(self) -> list[Upload]:
        files = {file.relative_to(self.path).as_posix(): file for file in sorted(self.path.rglob(f"{PART}*"))}
        return [Upload(name, name, file.stat().st_mtime) for name, file in files.items()]

    def abort(self, upload: Upload) -> None:
        (self.path / upload.key).unlink(missing_ok=True)

    def below(self, prefix: str) -> Store:
        return FolderStore(self.path / prefix)

    def _copy(self, source: Path, target: Path) -> None:
        with source.open("rb") as reading, FolderStore(target.parent).create(target.name, size=0) as writing:
            shutil.copyfileobj(reading, writing, 2**20)
