"""From tokenized units to shards: duplicates, the validation split, and a place to go on from after a kill."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.build.destinations import Destination
from windlass.data.build.duplicates import SeenDigests
from windlass.data.build.processes import remove_part
from windlass.data.build.progress import Work, read_object
from windlass.data.build.worker import DIGEST_BYTES, LENGTH_DTYPE
from windlass.data.shards.folder import DTYPES, Index, ShardFacts
from windlass.data.shards.writing import DamagedWorkError, ShardWriter
from windlass.data.sources.reading import SKIPPED_SHOWN
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError

log = logging.getLogger(__name__)

VALIDATION = "validation"  # the folder in the folder
SAVE_SECONDS = 1.0


@dataclass(frozen=True)
class Recipe:
    """What becomes of the documents."""

    shard_tokens: int
    limit: int | None = None  # documents that are read
    dedup: bool = False
    validation: float = 0.0

    @property
    def digests(self) -> bool:
        return self.dedup or bool(self.validation)


class Assembly:
    """The shard folders under WORK/result, filled unit by unit."""

    def __init__(self, work: Work, tokenizer: Tokenizer, recipe: Recipe, place: Destination) -> None:
        self.work, self.tokenizer, self.recipe, self.place = work, tokenizer, recipe, place
        self.result = work.path / "result"
        self._taken: list[tuple[str, ShardFacts]] = []  # shards that the saved progress does not cover yet
        self._dtype = DTYPES[tokenizer.dtype]
        self._done: list[Path] = []  # parts that the saved progress does not cover yet
        try:
            self._open(work.progress())
        except (DamagedWorkError, KeyError, TypeError, ValueError, AttributeError) as error:  # or its progress is
            log.warning("starting over: %s: %s", type(error).__name__, error)
            work.start_over()
            self._open(None)

    def _open(self, progress: dict[str, Any] | None) -> None:
        saved = progress or {"next_unit": 0, "num_read": 0, "num_duplicates": 0, "num_seen": 0}
        self.next_unit, self.num_read = saved["next_unit"], saved["num_read"]
        self.num_duplicates: int = saved["num_duplicates"]
        self.left_out = Counter[str](saved.get("left_out", {}))
        self.reasons: list[str] = list(saved.get("reasons", []))
        self._writers = {}
        for name in ["", *([VALIDATION] if self.recipe.validation else [])]:
            state = progress["writers"][name] if progress else None
            for facts in state["shards"] if state else ():
                if not all(self.place.intact(*file) for file in self._files(name, ShardFacts(**facts))):
                    raise DamagedWorkError(f"{Path(name) / facts['name']} is not as it was left")
            self._writers[name] = ShardWriter(
                self.result / name,
                self.tokenizer,
                shard_tokens=self.recipe.shard_tokens,
                closed=lambda facts, name=name: self._take(name, facts),  # type: ignore[misc]
                state=state,
            )
        self._seen = SeenDigests()
        self._digests_path = self.work.path / "seen.digests"
        if self.recipe.dedup:
            self._read_digests(saved["num_seen"])
        self._saved_at = time.monotonic()

    def _read_digests(self, count: int) -> None:
        self._digests_file = self._digests_path.open("ab")
        self._digests_file.truncate(count * DIGEST_BYTES)
        held = np.fromfile(self._digests_path, dtype="<u8").reshape(-1, 2)
        if len(held) != count or not bool(self._seen.add(held).all()):
            raise DamagedWorkError(f"{self._digests_path.name} is not as it was left")

    def _take(self, folder: str, shard: ShardFacts) -> None:
        for file in self._files(folder, shard):
            self.place.take(*file)
        self._taken.append((folder, shard))

    def _files(self, folder: str, shard: ShardFacts) -> Iterator[tuple[Path, str, str]]:
        """Of each file of a shard where it is, its name in the result, and its checksum."""
        for name, checksum in shard.checksums().items():
            path = self.result / folder / name
            yield path, path.relative_to(self.result).as_posix(), checksum

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.recipe.limit is not None and self.num_read >= self.recipe.limit

    @property
    def num_documents(self) -> int:
        return sum(writer.num_documents for writer in self._writers.values())

    def add(self, number: int, part: Path) -> None:
        """Move a tokenized unit from the spool into the shards."""
        lengths = np.fromfile(part.with_suffix(".lengths"), dtype=LENGTH_DTYPE)
        if self.recipe.limit is not None:
            lengths = lengths[: self.recipe.limit - self.num_read]
        if len(lengths):
            count = int(lengths.sum())
            tokens = np.memmap(part.with_suffix(".tokens"), dtype=self._dtype, mode="r", shape=(count,))
            for name, kept in self._destinations(part, len(lengths)):
                if kept.all():
                    self._writers[name].append(tokens, lengths)
                elif kept.any():
                    self._writers[name].append(tokens[np.repeat(kept, lengths.astype(np.int64))], lengths[kept])
        done = read_object(part.with_suffix(".done")) or {}
        self.left_out.update(done.get("left_out", {}))
        self.reasons = [*self.reasons, *done.get("reasons", [])][:SKIPPED_SHOWN]
        self.num_read += len(lengths)
        self.next_unit = number + 1
        self._done.append(part)
        if time.monotonic() >= self._saved_at + SAVE_SECONDS:
            self.save()

    def _destinations(self, part: Path, count: int) -> list[tuple[str, NDArray[np.bool_]]]:
        """Which documents of a part go into which folder."""
        kept = np.ones(count, dtype=np.bool_)
        if not self.recipe.digests:
            return [("", kept)]
        digests = np.fromfile(part.with_suffix(".digests"), dtype="<u8").reshape(-1, 2)[:count]
        if self.recipe.dedup:
            kept = self._seen.add(digests)
            self.num_duplicates += count - int(kept.sum())
            self._digests_file.write(digests[kept].tobytes())
        if not self.recipe.validation:
            return [("", kept)]
        chosen = digests[:, 1] < np.uint64(int(self.recipe.validation * 2.0**64))
        return [("", kept & ~chosen), (VALIDATION, kept & chosen)]

    def save(self) -> None:
        """From here on a new process can go on; the parts that led here are not needed any more."""
        if self.recipe.dedup:
            self._digests_file.flush()
        self.work.save(
            {
                "next_unit": self.next_unit,
                "num_read": self.num_read,
                "num_duplicates": self.num_duplicates,
                "num_seen": len(self._seen),
                "left_out": dict(self.left_out),
                "reasons": self.reasons,
                "writers": {name: writer.state() for name, writer in self._writers.items()},
            }
        )
        for part in self._done:
            remove_part(part)
        for folder, shard in self._taken:
            for path, _, _ in self._files(folder, shard):
                self.place.forget(path)
        self._done, self._taken = [], []
        self._saved_at = time.monotonic()

    def finish(self, names: str) -> Index:
        if not self.num_documents:
            absent = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            raise UserError(
                f"{names} holds nothing to train on" if self.tokenizer.marks_loss else f"{names} holds no text",
                evidence="\n".join([f"left out: {absent}", *self.reasons]) if absent else None,
                cause=None if absent else "every file is empty, or every document in them",
            )
        for kind, count in self.left_out.items():
            log.warning("%s: %s %s are left out", names, f"{count:,}", kind)
        for reason in self.reasons:
            log.warning("left out: %s", reason)
        counts = {name: writer.num_documents for name, writer in self._writers.items()}
        for name, count in counts.items():
            if not count:
                raise UserError(
                    f"--validation {self.recipe.validation} leaves no document for {name or 'training'}",
                    evidence=f"{self.num_documents:,} documents in all",
                    fix="another share, or more text; data.holdout keeps sequences apart instead of documents",
                )
        left_out = {**({"duplicates": self.num_duplicates} if self.recipe.dedup else {}), **self.left_out}
        indexes = {name: writer.finish(left_out if not name else None) for name, writer in self._writers.items()}
        return indexes[""]
