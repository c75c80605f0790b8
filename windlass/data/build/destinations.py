"""Where a result goes: a folder or a file here, or a place in an object store. It appears when it is complete."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from windlass.common.files import cache_root, name_digest, sha256_of
from windlass.data.sources.source import INDEX_NAME
from windlass.errors import UserError
from windlass.store import Store, open_store


@dataclass(frozen=True)
class Product:
    """A kind of result: the file of it that comes last, and the names that its files have in a store."""

    what: str
    marker: str
    own_name: re.Pattern[str]
    taken: str  # of a place in a store that holds one


SHARDS = Product(
    "token shards",
    INDEX_NAME,
    re.compile(r"(validation/)?(index\.json|shard-\d+\.\w+|tokenizer/[^/]+)"),
    "holds token shards already",
)
PARTS = Product(
    "fetched records",
    "fetched.yaml",  # JSON, which YAML is too; not among the suffixes of data
    re.compile(r"fetched\.yaml|part-\d+\.jsonl(\.gz)?"),
    "is there already",
)


@dataclass(frozen=True)
class FolderDestination:
    """A folder on this machine, or a single file. It is made in `work`, beside it, and appears by one rename."""

    out: Path
    product: Product
    one_file: bool = False

    @property
    def name(self) -> str:
        return str(self.out)

    @property
    def work(self) -> Path:
        """The folder for work in progress: the same one for every process that makes this."""
        return self.out.parent / f".{self.out.name}.partial"

    def require_free(self, overwrite: bool) -> None:
        out = self.out
        if not out.exists() and not out.is_symlink():
            return
        if not overwrite:
            raise UserError(f"{out} exists", fix="another -o, or --overwrite")
        empty = not self.one_file and out.is_dir() and not any(out.iterdir())
        if not (empty or (out if self.one_file else out / self.product.marker).is_file()):
            raise UserError(f"{out} holds no {self.product.what}, so it is not overwritten", fix="another -o")

    def begin(self) -> None:
        """Work begins at the beginning. What is there stays until it is replaced."""

    def take(self, path: Path, name: str, sha256: str) -> None:
        """A file of the result is complete. It stays where it is."""

    def forget(self, path: Path) -> None:
        """A file that was taken will not be made again. It stays where it is."""

    def intact(self, path: Path, name: str, sha256: str) -> bool:
        """Whether a file that was taken is still what it was."""
        return path.is_file() and sha256_of(path) == sha256

    def publish(self, result: Path, overwrite: bool) -> None:
        if overwrite and self.out.is_dir():
            former = self.work / "former"
            shutil.rmtree(former, ignore_errors=True)
            self.out.rename(former)
        result.rename(self.out)

    def published(self) -> str | None:
        """What tells the result that is there now from others: the text of its marker, or a single file's SHA-256."""
        path = self.out if self.one_file else self.out / self.product.marker
        if not path.is_file():
            return None
        return sha256_of(path) if self.one_file else path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class StoreDestination:
    """A place in an object store: files go there as they are complete, the marker last; or a single object.

    The work folder is in the cache and holds only what is not complete yet.
    """

    store: Store
    product: Product
    file: str = ""  # the single object

    @property
    def name(self) -> str:
        return f"{self.store.url}/{self.file}".rstrip("/")

    @property
    def one_file(self) -> bool:
        return bool(self.file)

    @property
    def work(self) -> Path:
        return cache_root() / "work" / name_digest(self.name)

    def require_free(self, overwrite: bool) -> None:
        if self.store.stat(self.file or self.product.marker):
            if not overwrite:
                raise UserError(f"{self.name} {self.product.taken}", fix="another -o s3://…, or --overwrite")
        elif not self.file and not self.work.exists():
            names = (entry.name for entry in self.store.entries())
            other = next((name for name in names if not (overwrite and self.product.own_name.fullmatch(name))), None)
            if other:
                raise UserError(
                    f"{self.name} is not empty and holds no {self.product.what}, so nothing is written there",
                    evidence=f"it holds {other}",
                    fix="another -o s3://…, or remove what is there",
                )

    def begin(self) -> None:
        """Make way: what is there of a result that is replaced, or of a try that cannot be taken up, goes."""
        if not self.file:
            self.store.delete([self.product.marker])  # first, so that no reader takes what follows for whole
            entries = self.store.entries()
            self.store.delete([entry.name for entry in entries if self.product.own_name.fullmatch(entry.name)])

    def take(self, path: Path, name: str, sha256: str) -> None:
        if not self.file:
            self.store.put(path, name, sha256=sha256)

    def forget(self, path: Path) -> None:
        if not self.file:
            path.unlink(missing_ok=True)

    def intact(self, path: Path, name: str, sha256: str) -> bool:
        if self.file:
            return path.is_file() and sha256_of(path) == sha256
        entry = self.store.stat(name)
        return entry is not None and entry.sha256 == sha256

    def publish(self, result: Path, overwrite: bool) -> None:
        if self.file:
            self.store.put(result, self.file, sha256=sha256_of(result))
            return
        files = {path.relative_to(result).as_posix(): path for path in result.rglob("*") if path.is_file()}
        # Markers last, the outermost one at the very end: with it the result is there.
        for name in sorted(files, key=lambda name: (files[name].name == self.product.marker, -len(name), name)):
            sha256 = sha256_of(files[name])
            if not self.intact(files[name], name, sha256):  # the last files were taken already
                self.store.put(files[name], name, sha256=sha256)

    def published(self) -> str | None:
        if self.file:
            entry = self.store.stat(self.file)
            return entry.sha256 if entry else None
        try:
            return self.store.read(self.product.marker).decode("utf-8")
        except FileNotFoundError:
            return None


Destination = FolderDestination | StoreDestination


def destination(out: Path | str, product: Product, *, one_file: bool = False) -> Destination:
    """The place that `-o` names."""
    text = os.fspath(out)
    if "://" not in text:
        return FolderDestination(Path(text), product, one_file)
    folder, _, name = text.rpartition("/") if one_file else (text, "", "")
    return StoreDestination(open_store(folder), product, name)
