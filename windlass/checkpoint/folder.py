"""A run's checkpoints: which there are, which are complete, which may go."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileRecord, Manifest
from windlass.checkpoint.pickles import pickle_problem
from windlass.common.files import sha256_of, sync_directory, write_atomically
from windlass.errors import UserError

TIERS = ("memory", "local", "managed", "shared", "store")  # nearest first; of equal steps the nearest is taken
NODE_TIERS = ("memory", "local")  # every node holds its part of a step
NAME = re.compile(r"step-(\d{8,})")
INCOMING, FORMER, PINNED = ".incoming-", ".former-", ".pinned-"  # beside the checkpoints; never listed as one
DAY_S = 86400.0
CHANGED = "its contents changed: the SHA-256 does not match the manifest"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True, order=True)
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
        """ValueError says what is wrong with it; one of another step than the folder's name says is."""
        return Manifest.parse((self.path / MANIFEST_NAME).read_text(encoding="utf-8"), step=self.step)

    def size_on_disk(self) -> int:
        return sum(status.st_size for status in self._statuses() if stat.S_ISREG(status.st_mode))

    def touched(self) -> float:
        """When anything in it was last written."""
        return max((status.st_mtime for status in self._statuses()), default=0.0)

    def _statuses(self) -> Iterator[os.stat_result]:
        for path in (self.path, *self.path.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # retention may be deleting it
                yield path.stat()

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

    def begin(self) -> None:
        """Make its folder, without what a killed save or command left there."""
        self.delete()
        self.path.mkdir(parents=True)

    def prepare(self, manifest: Manifest) -> None:
        """Make an incoming checkpoint's folder ready: files that an attempt before brought stay, all others go."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MANIFEST_NAME).unlink(missing_ok=True)
        for leftover in [path for path in self.path.iterdir() if path.name not in manifest.files]:
            leftover.unlink()

    def holds(self, name: str, record: FileRecord, *, former: Checkpoint) -> bool:
        """Whether a file of an incoming checkpoint is here and whole: brought before, or taken from the one that it
        will replace.
        """
        if damage(self.path / name, record) is None:
            return True
        if damage(former.path / name, record) is not None:
            return False
        link_or_copy(former.path / name, self.path / name)
        return True

    def delete(self) -> None:
        """Take the manifest away first, so that a half-deleted checkpoint is never taken for a whole one."""
        (self.path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class CheckpointFolder:
    path: Path

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(self.path / step_name(step), step)

    def incoming(self, step: int) -> Checkpoint:
        """Where a checkpoint is put together on its way here, beside the one that it may replace."""
        return Checkpoint(self.path / f"{INCOMING}{step_name(step)}", step)

    def take(self, incoming: Checkpoint) -> Checkpoint:
        """Put a published incoming checkpoint in its place; one that is there is whole until then."""
        target, former = self.at(incoming.step), self.path / f"{FORMER}{self.at(incoming.step).name}"
        shutil.rmtree(former, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            target.path.rename(former)
        incoming.path.rename(target.path)
        sync_directory(self.path)
        shutil.rmtree(former, ignore_errors=True)
        return target

    def recover(self) -> None:
        """Finish a replacement that was cut off between its two renames."""
        for former in self.path.glob(f"{FORMER}*"):
            name = former.name.removeprefix(FORMER)
            target, incoming = self.path / name, self.path / f"{INCOMING}{name}"
            if not target.exists():
                (incoming if (incoming / MANIFEST_NAME).exists() else former).rename(target)

    def pin(self, checkpoint: Checkpoint) -> Checkpoint:
        """Another name for the files of a checkpoint, so that retention cannot take them away while they are read.

        FileNotFoundError if it did already. Where the file system has no hard links, the checkpoint itself.
        """
        pinned = Checkpoint(self.path / f"{PINNED}{os.getpid()}-{checkpoint.name}", checkpoint.step)
        shutil.rmtree(pinned.path, ignore_errors=True)
        try:
            pinned.path.mkdir()
            for name in (*checkpoint.manifest().files, MANIFEST_NAME):
                os.link(checkpoint.path / name, pinned.path / name)
        except FileNotFoundError:
            shutil.rmtree(pinned.path, ignore_errors=True)
            if checkpoint.complete:
                return checkpoint  # a file is missing for another reason: its proof will say so
            raise
        except (OSError, ValueError):
            shutil.rmtree(pinned.path, ignore_errors=True)
            return checkpoint
        return pinned

    def unpin(self, pinned: Checkpoint) -> None:
        if pinned.name.startswith(PINNED):
            shutil.rmtree(pinned.path, ignore_errors=True)

    def scratch(self) -> list[Path]:
        """What commands that were cut off more than a day ago left beside the checkpoints."""
        limit, leftovers = time.time() - DAY_S, []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # its command may be done this moment
                if path.name.startswith((INCOMING, FORMER, PINNED)) and path.stat().st_mtime <= limit:
                    leftovers.append(path)
        return leftovers

    def all(self) -> list[Checkpoint]:
        """Every checkpoint folder, oldest first, complete or not."""
        checkpoints = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = NAME.fullmatch(path.name)
            if match and path.is_dir():
                checkpoints.append(Checkpoint(path, int(match[1])))
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def complete(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.all() if checkpoint.complete]

    def choose(self, step: int | None) -> Checkpoint:
        """The complete checkpoint of a step, or the newest."""
        complete = self.complete()
        chosen = [checkpoint for checkpoint in complete if step is None or checkpoint.step == step]
        if chosen:
            return chosen[-1]
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        steps = ", ".join(str(checkpoint.step) for checkpoint in complete)
        raise UserError(
            f"{what} in {self.path}",
            evidence=f"complete: {steps}" if steps else "nothing complete there",
            fix=f"windlass ckpt ls {self.path.parent.name}",
        )

    def expired(
        self, step: int, *, keep: int, keep_every: int | None, protected: Iterable[int] = ()
    ) -> list[Checkpoint]:
        """Complete checkpoints that retention lets go after the save of `step`."""
        steps = [checkpoint.step for checkpoint in self.complete()]
        expired = expired_steps(steps, step, keep=keep, keep_every=keep_every, protected=protected)
        return [self.at(old) for old in expired]

    def unfinished(self) -> list[Checkpoint]:
        """What a killed save left behind."""
        return [checkpoint for checkpoint in self.all() if not checkpoint.complete]


def damage(path: Path, record: FileRecord, *, contents: bool = True) -> str | None:
    """What is wrong with one file of a checkpoint, in words; None if it is as it was written."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"it has {size:,} bytes, {record.size:,} were written"
        if contents and sha256_of(path) != record.sha256:
            return CHANGED
        if contents and path.name == METADATA_NAME:
            return pickle_problem(path)
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def link_or_copy(source: Path, target: Path) -> None:
    """Files of a checkpoint never change, so two can share them."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def expired_steps(
    steps: Iterable[int], newest: int, *, keep: int, keep_every: int | None, protected: Iterable[int] = ()
) -> list[int]:
    """All steps but the newest `keep`, the permanent and the protected ones. Those later than `newest` do not count: a
    resume that passed them over found them damaged.
    """
    older = sorted(step for step in steps if step <= newest)[:-keep]
    kept = set(protected)
    return [step for step in older if step not in kept and not (keep_every and step % keep_every == 0)]
