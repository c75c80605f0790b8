"""Where a finished folder goes: a folder here that appears by one rename."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.common.files import sha256_of
from windlass.data.shards.folder import Index, ShardFacts, read_index
from windlass.data.sources.source import INDEX_NAME
from windlass.errors import UserError


class Destination(Protocol):
    """A place for shard folders. What is made is worked on in `work` and comes to exist with `publish`."""

    @property
    def name(self) -> str: ...

    @property
    def work(self) -> Path:
        """The folder for work in progress: the same one for every process that makes this."""
        ...

    def require_free(self, overwrite: bool) -> None: ...

    def begin(self) -> None:
        """Work begins at the beginning: nothing made before will be taken up."""
        ...

    def take(self, result: Path, folder: str, shard: ShardFacts) -> None:
        """A shard under RESULT/FOLDER is complete."""
        ...

    def forget(self, result: Path, folder: str, shard: ShardFacts) -> None:
        """A shard that was taken will not be made again: what is not needed of it here may go."""
        ...

    def intact(self, result: Path, folder: str, shard: ShardFacts) -> bool:
        """Whether a shard that was taken is still what it was."""
        ...

    def publish(self, result: Path, overwrite: bool) -> None: ...

    def index(self) -> Index | None:
        """Of the shards that are there now."""
        ...


@dataclass(frozen=True)
class FolderDestination:
    """A folder on this machine."""

    out: Path

    @property
    def name(self) -> str:
        return str(self.out)

    @property
    def work(self) -> Path:
        return self.out.parent / f".{self.out.name}.partial"

    def require_free(self, overwrite: bool) -> None:
        out = self.out
        if not out.exists() and not out.is_symlink():
            return
        if not overwrite:
            raise UserError(f"{out} exists", fix="another -o FOLDER, or --overwrite")
        if not (out / INDEX_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is not a folder of token shards, so it is not overwritten", fix="another -o FOLDER")

    def begin(self) -> None:
        """What is there stays until it is replaced."""

    def take(self, result: Path, folder: str, shard: ShardFacts) -> None:
        """It stays where it is."""

    def forget(self, result: Path, folder: str, shard: ShardFacts) -> None:
        """It stays where it is."""

    def intact(self, result: Path, folder: str, shard: ShardFacts) -> bool:
        try:
            return all(sha256_of(result / folder / name) == expected for name, expected in shard.checksums().items())
        except FileNotFoundError:
            return False

    def publish(self, result: Path, overwrite: bool) -> None:
        former = self.work / "former"
        if overwrite and self.out.exists():
            shutil.rmtree(former, ignore_errors=True)
            self.out.rename(former)
        result.rename(self.out)

    def index(self) -> Index | None:
        return read_index(self.out) if (self.out / INDEX_NAME).is_file() else None


def destination(out: Path | str) -> Destination:
    """The place that `-o` names."""
    text = os.fspath(out)
    if "://" in text:
        from windlass.data.shards.store_destination import StoreDestination

        return StoreDestination.at(text)
    return FolderDestination(Path(text))
