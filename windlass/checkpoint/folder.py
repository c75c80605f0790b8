"""A run's checkpoints: which there are, which are complete, which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint.manifest import MANIFEST_NAME, Manifest, damage
from windlass.errors import UserError
from windlass.runfolder import write_atomically

NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Damage:
    file: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def complete(self) -> bool:
        """Published: its manifest was put in place after everything else was written."""
        return (self.path / MANIFEST_NAME).is_file()

    def manifest(self) -> Manifest:
        return Manifest.read(self.path)

    def size_on_disk(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def damages(self, *, contents: bool = True, share: tuple[int, int] = (0, 1)) -> Iterator[Damage]:
        """Files that are not as they were written. `share` (i, n): look at every n-th file only, for n readers."""
        try:
            manifest = self.manifest()
        except (OSError, ValueError, TypeError, KeyError) as error:
            yield Damage(MANIFEST_NAME, str(error) or type(error).__name__)
            return
        index, count = share
        for name, record in sorted(manifest.files.items())[index::count]:
            reason = damage(self.path / name, record, contents=contents)
            if reason:
                yield Damage(name, reason)

    def publish(self, manifest: Manifest) -> None:
        """The one moment at which the checkpoint comes to exist."""
        write_atomically(self.path / MANIFEST_NAME, manifest.to_json())

    def delete(self) -> None:
        """Take the manifest away first, so that a half-deleted checkpoint is never taken for a whole one."""
        (self.path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class CheckpointFolder:
    path: Path

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self.path / f"step-{step:08d}", step)

    def all(self) -> list[Checkpoint]:
        """Every checkpoint folder, oldest first, complete or not."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Checkpoint(path, int(match[1])))
        return sorted(found, key=lambda one: one.step)

    def complete(self) -> list[Checkpoint]:
        return [one for one in self.all() if one.complete]

    def choose(self, step: int | None) -> Checkpoint:
        """The complete checkpoint of a step, or the newest."""
        complete = self.complete()
        chosen = [one for one in complete if step is None or one.step == step]
        if chosen:
            return chosen[-1]
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        steps = ", ".join(str(one.step) for one in complete)
        raise UserError(
            f"{what} in {self.path}",
            evidence=f"complete: {steps}" if steps else "nothing complete there",
            fix=f"windlass ckpt ls {self.path.parent.name}",
        )

    def expired(
        self, step: int, *, keep: int, keep_every: int | None, protected: Iterable[int] = ()
    ) -> list[Checkpoint]:
        """Complete checkpoints that retention lets go after the save of `step`."""
        there = [one.step for one in self.complete()]
        return [
            self.at(one) for one in expired_steps(there, step, keep=keep, keep_every=keep_every, protected=protected)
        ]

    def unfinished(self) -> list[Checkpoint]:
        """What a killed save left behind."""
        return [one for one in self.all() if not one.complete]


def expired_steps(
    there: Iterable[int], newest: int, *, keep: int, keep_every: int | None, protected: Iterable[int] = ()
) -> list[int]:
    """All steps but the newest `keep`, the permanent and the protected ones. Those later than `newest` do not count: a
    resume that passed them over found them damaged.
    """
    older = sorted(step for step in there if step <= newest)[:-keep]
    kept = set(protected)
    return [step for step in older if step not in kept and not (keep_every and step % keep_every == 0)]
