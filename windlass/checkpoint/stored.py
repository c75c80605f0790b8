"""A run's checkpoints in a store: STORE/NAME/ID/step-00000100/, complete once its manifest is there."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint.folder import (
    DAY_S,
    NAME,
    Checkpoint,
    CheckpointFolder,
    Damage,
    damage,
    expired_steps,
    step_name,
)
from windlass.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from windlass.checkpoint.proven import ProvenFiles
from windlass.errors import UserError
from windlass.store import Entry, Store

RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
CURRENT = "current"  # beside the ids: which of them the name stands for now
WRITER = "writer"  # beside the steps: which attempt of the run saves them now


def current_id(store: Store, name: str) -> str | None:
    """The id of the newest run of this name that the store knows."""
    try:
        run_id = json.loads(store.read(f"{name}/{CURRENT}"))["id"]
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
            raise ValueError(f"{str(run_id)[:80]!r} is not the id of a run")  # it becomes part of paths here
        return run_id
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store.url}/{name}/{CURRENT} cannot be understood", evidence=str(error)) from None


def write_current_id(store: Store, name: str, run_id: str) -> None:
    store.write(f"{name}/{CURRENT}", json.dumps({"id": run_id, "since": round(time.time(), 3)}).encode())


@dataclass(frozen=True)
class StoredCheckpoint:
    """One step in a store, as a listing shows it."""

    step: int
    files: dict[str, Entry]  # by name within the checkpoint, the manifest among them

    @property
    def name(self) -> str:
        return step_name(self.step)

    @property
    def complete(self) -> bool:
        return MANIFEST_NAME in self.files

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def touched(self) -> float:
        return max((entry.modified for entry in self.files.values()), default=0.0)


@dataclass(frozen=True)
class StoredCheckpoints:
    """All of one run. `store` is the place of the run's id."""

    store: Store

    @classmethod
    def of_run(cls, store: Store, name: str, run_id: str) -> StoredCheckpoints:
        return cls(store.below(f"{name}/{run_id}"))

    def all(self) -> list[StoredCheckpoint]:
        """Every step there is, oldest first, complete or not."""
        steps: dict[int, dict[str, Entry]] = {}
        for entry in self.store.entries():
            folder, _, name = entry.name.partition("/")
            match = NAME.fullmatch(folder)
            if match and name:
                steps.setdefault(int(match[1]), {})[name] = entry
        return [StoredCheckpoint(step, files) for step, files in sorted(steps.items())]

    def complete(self) -> list[StoredCheckpoint]:
        return [checkpoint for checkpoint in self.all() if checkpoint.complete]

    def at(self, step: int) -> Store:
        """The place of a step."""
        return self.store.below(step_name(step))

    def manifest(self, step: int) -> Manifest:
        """ValueError says what is wrong with it; FileNotFoundError if it is not there."""
        return Manifest.parse(self.store.read(f"{step_name(step)}/{MANIFEST_NAME}").decode("utf-8"), step=step)

    def files(self, step: int) -> ProvenFiles:
        try:
            return ProvenFiles(self.at(step), self.manifest(step))
        except ValueError as error:
            raise _damaged(self, step, Damage(MANIFEST_NAME, str(error))) from None

    def holds(self, step: int, name: str, record: FileRecord) -> bool:
        """Whether a file is there as it was written, so that it need not be sent again."""
        entry = self.store.stat(f"{step_name(step)}/{name}")
        return entry is not None and (entry.size, entry.sha256) == (record.size, record.sha256)

    def put(self, checkpoint: Checkpoint, name: str, record: FileRecord) -> None:
        """Send one file of a checkpoint on disk."""
        self.store.put(checkpoint.path / name, f"{checkpoint.name}/{name}", sha256=record.sha256)

    def publish(self, manifest: Manifest) -> None:
        """The one moment at which the checkpoint comes to exist in the store."""
        self.store.write(f"{step_name(manifest.step)}/{MANIFEST_NAME}", manifest.to_json().encode())

    def claim(self) -> str:
        """Let this attempt be the one that saves here; an earlier one that still runs finds out (`claimed_by`)."""
        token = secrets.token_hex(8)
        self.store.write(WRITER, token.encode())
        return token

    def claimed_by(self, token: str) -> bool:
        return self.store.read(WRITER) == token.encode()

    def fetch(self, step: int, name: str, record: FileRecord, folder: Path) -> Damage | None:
        """Bring one file into a folder and prove it."""
        try:
            self.store.get(f"{step_name(step)}/{name}", folder / name)
        except FileNotFoundError:
            return Damage(name, "it is missing")
        reason = damage(folder / name, record)
        if reason is None:
            return None
        (folder / name).unlink(missing_ok=True)
        return Damage(name, reason)

    def delete(self, checkpoint: StoredCheckpoint) -> None:
        """The manifest first, so that a half-deleted checkpoint is never taken for a whole one."""
        if checkpoint.complete:
            self.store.delete([f"{checkpoint.name}/{MANIFEST_NAME}"])
        self.store.delete(f"{checkpoint.name}/{name}" for name in checkpoint.files)

    def remove(self, step: int) -> None:
        """Whatever there is of a step."""
        place = self.at(step)
        self.delete(StoredCheckpoint(step, {entry.name: entry for entry in place.entries()}))
        with contextlib.suppress(UserError):  # a policy may allow objects alone; parts take room, but never count
            for upload in place.unfinished():
                place.abort(upload)

    def expired(
        self, newest: int, *, keep: int, keep_every: int | None, protected: Iterable[int] = ()
    ) -> list[StoredCheckpoint]:
        """What retention lets go once `newest` is there."""
        complete = {checkpoint.step: checkpoint for checkpoint in self.complete()}
        expired = expired_steps(list(complete), newest, keep=keep, keep_every=keep_every, protected=protected)
        return [complete[step] for step in expired]

    def clear_leftovers(self, *, older_than_s: float = DAY_S, now: float | None = None) -> tuple[int, int]:
        """Give back the room of uploads that were cut off: (steps without a manifest, uploads without an end)."""
        limit = (time.time() if now is None else now) - older_than_s
        orphans = [checkpoint for checkpoint in self.all() if not checkpoint.complete and checkpoint.touched <= limit]
        for orphan in orphans:
            self.delete(orphan)
        uploads = [upload for upload in self.store.unfinished() if upload.begun <= limit]
        for upload in uploads:
            self.store.abort(upload)
        return len(orphans), len(uploads)


def fetch_whole(stored: StoredCheckpoints, step: int, target: CheckpointFolder) -> Checkpoint:
    """Bring a checkpoint to disk, proven, beside the one that may be there, and put it in its place when it is whole.

    What was brought before a failure is kept for the next try.
    """
    here, incoming = target.at(step), target.incoming(step)
    manifest = stored.files(step).manifest
    if here.complete and not any(here.damages()) and here.manifest().files == manifest.files:
        return here
    incoming.prepare(manifest)
    for name, record in manifest.files.items():
        if incoming.holds(name, record, former=here):
            continue
        damaged = stored.fetch(step, name, record, incoming.path)
        if damaged:
            incoming.delete()
            raise _damaged(stored, step, damaged)
    incoming.publish(manifest)
    return target.take(incoming)


def _damaged(stored: StoredCheckpoints, step: int, damaged: Damage) -> UserError:
    return UserError(
        f"{stored.store.url}/{step_name(step)} is damaged",
        evidence=f"{damaged.file}: {damaged.reason}",
        fix="take another step: windlass ckpt ls NAME --tier store",
    )
