"""Where fetched parts go: a folder of them, one file, or either in an object store."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass.common.cache import cache_root, name_digest
from windlass.common.files import sha256_of, write_atomically
from windlass.data.sources.source import compression, file_format
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.data.sources.fetching import PartFacts
    from windlass.store import Store

WHOLE = "whole"
MANIFEST = "fetched.yaml"  # JSON, which YAML is too; not among the suffixes of data


class FetchDestination(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def work(self) -> Path: ...

    def require_free(self, overwrite: bool) -> None: ...

    def take(self, parts: Path, part: PartFacts) -> None:
        """A part is complete."""
        ...

    def forget(self, parts: Path, part: PartFacts) -> None:
        """A part that was taken will not be made again: it may go from here."""
        ...

    def intact(self, parts: Path, part: PartFacts) -> bool:
        """Whether a part that was taken is still what it was."""
        ...

    def prepare(self, parts: Path, facts: Sequence[PartFacts], manifest: str) -> str:
        """Everything that can be done before the result appears; a proof that will tell it from other results."""
        ...

    def published(self, proof: str) -> bool:
        """Whether the result of that proof is there."""
        ...

    def publish(self, parts: Path, facts: Sequence[PartFacts], manifest: str, overwrite: bool) -> None: ...


@dataclass(frozen=True)
class LocalParts:
    """A folder of parts, or one file that holds them one after another."""

    out: Path

    @property
    def name(self) -> str:
        return str(self.out)

    @property
    def one_file(self) -> bool:
        return file_format(self.out) == "jsonl"

    @property
    def work(self) -> Path:
        return self.out.parent / f".{self.out.name}.partial"

    def require_free(self, overwrite: bool) -> None:
        if not self.out.exists() and not self.out.is_symlink():
            return
        if not overwrite:
            raise UserError(f"{self.out} exists", fix="another -o, or --overwrite")
        ours = self.out.is_file() if self.one_file else (self.out / MANIFEST).is_file()
        if not ours and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise UserError(f"{self.out} was not made by a fetch, so it is not overwritten", fix="another -o")

    def take(self, parts: Path, part: PartFacts) -> None:
        """It stays where it is."""

    def forget(self, parts: Path, part: PartFacts) -> None:
        """It stays where it is."""

    def intact(self, parts: Path, part: PartFacts) -> bool:
        path = parts / part.name
        return path.is_file() and path.stat().st_size == part.size and sha256_of(path) == part.sha256

    def prepare(self, parts: Path, facts: Sequence[PartFacts], manifest: str) -> str:
        if not self.one_file:
            return manifest
        return put_together(parts, facts, self.work / WHOLE)

    def published(self, proof: str) -> bool:
        if self.one_file:
            return self.out.is_file() and sha256_of(self.out) == proof
        manifest = self.out / MANIFEST
        return manifest.is_file() and manifest.read_text() == proof

    def publish(self, parts: Path, facts: Sequence[PartFacts], manifest: str, overwrite: bool) -> None:
        if self.one_file:
            (self.work / WHOLE).replace(self.out)
            return
        remove_others(parts, facts)
        write_atomically(parts / MANIFEST, manifest)
        if overwrite and self.out.exists():
            former = self.work / "former"
            shutil.rmtree(former, ignore_errors=True)
            self.out.rename(former)
        parts.rename(self.out)


@dataclass(frozen=True)
class StoreParts:
    """Parts in an object store, each uploaded when it is complete; or one object, uploaded at the end."""

    store: Store
    file: str = ""  # the one object; "": a folder of parts

    @property
    def name(self) -> str:
        return f"{self.store.url}/{self.file}".rstrip("/")

    @property
    def work(self) -> Path:
        return cache_root() / "work" / name_digest(self.name)

    def require_free(self, overwrite: bool) -> None:
        if overwrite:
            return
        if self.store.stat(self.file or MANIFEST):
            raise UserError(f"{self.name} is there already", fix="another -o, or --overwrite")
        if not self.file and not self.work.exists() and (other := next(iter(self.store.entries()), None)):
            raise UserError(
                f"{self.name} is not empty, so nothing is written there",
                evidence=f"it holds {other.name}",
                fix="another -o s3://…, or --overwrite",
            )

    def take(self, parts: Path, part: PartFacts) -> None:
        if not self.file:
            self.store.put(parts / part.name, part.name, sha256=part.sha256)

    def forget(self, parts: Path, part: PartFacts) -> None:
        if not self.file:
            (parts / part.name).unlink()

    def intact(self, parts: Path, part: PartFacts) -> bool:
        if self.file:
            return LocalParts(Path("-")).intact(parts, part)
        there = self.store.stat(part.name)
        return there is not None and there.size == part.size and there.sha256 == part.sha256

    def prepare(self, parts: Path, facts: Sequence[PartFacts], manifest: str) -> str:
        return put_together(parts, facts, self.work / WHOLE) if self.file else manifest

    def published(self, proof: str) -> bool:
        if self.file:
            there = self.store.stat(self.file)
            return there is not None and there.sha256 == proof
        try:
            return self.store.read(MANIFEST).decode() == proof
        except FileNotFoundError:
            return False

    def publish(self, parts: Path, facts: Sequence[PartFacts], manifest: str, overwrite: bool) -> None:
        if self.file:
            self.store.put(self.work / WHOLE, self.file, sha256=sha256_of(self.work / WHOLE))
            return
        ours = {part.name for part in facts}
        stale = [one.name for one in self.store.entries("part-") if one.name not in ours]
        self.store.delete(stale)
        self.store.write(MANIFEST, manifest.encode())


def fetch_destination(out: str) -> FetchDestination:
    """The place that `-o` names."""
    if file_format(Path(out)) and compression(out) not in (None, ".gz"):
        raise UserError(f"{out} cannot be written", cause="files are written plain or as .gz", fix="-o FILE.jsonl.gz")
    if "://" not in out:
        return LocalParts(Path(out))
    from windlass.store import open_store

    if file_format(Path(out)) == "jsonl":
        folder, _, name = out.rpartition("/")
        return StoreParts(open_store(folder), name)
    return StoreParts(open_store(out))


def put_together(parts: Path, facts: Sequence[PartFacts], whole: Path) -> str:
    """All parts as one file; its checksum."""
    with whole.open("wb") as out:
        for part in facts:
            with (parts / part.name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    return sha256_of(whole)


def remove_others(parts: Path, facts: Sequence[PartFacts]) -> None:
    """A part that was begun when a process died, and that no later one needed."""
    names = {part.name for part in facts}
    for path in parts.iterdir():
        if path.name not in names:
            path.unlink()
