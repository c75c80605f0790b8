"""Shards that go straight to an object store: each uploaded when it is complete, the index last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.common.cache import cache_root, name_digest
from windlass.common.files import sha256_of
from windlass.data.shards.folder import Index, ShardFacts, parse_index
from windlass.data.sources.source import INDEX_NAME
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.store import Store

OWN_NAME = re.compile(r"(validation/)?(index\.json|shard-\d+\.\w+|tokenizer/[^/]+)")


@dataclass(frozen=True)
class StoreDestination:
    """A place in an object store. The work folder is in the cache and holds one open shard and a few units."""

    store: Store

    @classmethod
    def at(cls, url: str) -> StoreDestination:
        from windlass.store import open_store

        return cls(open_store(url))

    @property
    def name(self) -> str:
        return self.store.url

    @property
    def work(self) -> Path:
        return cache_root() / "work" / name_digest(self.store.url)

    def require_free(self, overwrite: bool) -> None:
        index = self.store.stat(INDEX_NAME)
        if index is not None and not overwrite:
            raise UserError(f"{self.name} holds token shards already", fix="another -o s3://…, or --overwrite")
        if index is None and not self.work.exists():
            other = next(iter(self.store.entries()), None)
            if other is not None:
                raise UserError(
                    f"{self.name} is not empty and holds no token shards, so nothing is written there",
                    evidence=f"it holds {other.name}",
                    fix="another -o s3://…, or remove what is there",
                )

    def take(self, result: Path, folder: str, shard: ShardFacts) -> None:
        for name, expected in shard.checksums().items():
            self.store.put(result / folder / name, joined(folder, name), sha256=expected)

    def forget(self, result: Path, folder: str, shard: ShardFacts) -> None:
        for name in shard.checksums():
            (result / folder / name).unlink(missing_ok=True)

    def intact(self, result: Path, folder: str, shard: ShardFacts) -> bool:
        for name, expected in shard.checksums().items():
            there = self.store.stat(joined(folder, name))
            if there is None or there.sha256 != expected:
                return False
        return True

    def publish(self, result: Path, overwrite: bool) -> None:
        """Everything but the index first; an old index goes before new files of the same names come."""
        files = sorted(path for path in result.rglob("*") if path.is_file())
        names = {path.relative_to(result).as_posix(): path for path in files}
        indexes = [name for name in names if name.rsplit("/", 1)[-1] == INDEX_NAME]
        for name in sorted(set(names) - set(indexes)):
            expected = sha256_of(names[name])
            there = self.store.stat(name)  # the last shards were taken already
            if there is None or there.sha256 != expected:
                self.store.put(names[name], name, sha256=expected)
        for name in sorted(indexes, key=len, reverse=True):  # the outermost one last: with it the shards are there
            self.store.put(names[name], name, sha256=sha256_of(names[name]))

    def index(self) -> Index | None:
        try:
            return parse_index(self.store.read(INDEX_NAME).decode("utf-8"), f"{self.name}/{INDEX_NAME}")
        except FileNotFoundError:
            return None

    def begin(self) -> None:
        """Make way: what is there of shards that are replaced, or of a try that cannot be taken up, goes."""
        self.store.delete([INDEX_NAME])  # first, so that no reader takes what follows for whole
        self.store.delete([entry.name for entry in self.store.entries() if OWN_NAME.fullmatch(entry.name)])


def joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
