"""Read a complete checkpoint, wherever it lies, in blocks that are proven as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from windlass.checkpoint.folder import CHANGED, Checkpoint, Damage
from windlass.checkpoint.manifest import BLOCK_BYTES, METADATA_NAME, FileRecord, Manifest
from windlass.checkpoint.pickles import UnsafePickleError, check_pickle
from windlass.store import FolderStore, Store


class DamagedError(Exception):
    """A file of a checkpoint is not as it was written."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.damage = Damage(file, reason)


@dataclass(frozen=True)
class ProvenFiles:
    """The files of one step, in a folder or in an object store."""

    store: Store  # the place of the step
    manifest: Manifest

    @classmethod
    def of_folder(cls, checkpoint: Checkpoint) -> ProvenFiles:
        return cls(FolderStore(checkpoint.path), checkpoint.manifest())

    @property
    def step(self) -> int:
        return self.manifest.step

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        record = self._record(name)
        data = self._bytes(name, 0, record.size)
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise DamagedError(name, CHANGED)
        return data

    def read_block(self, name: str, index: int) -> bytes:
        """The `index`-th BLOCK_BYTES of a file. Of a file without proofs of its blocks, whose whole must be proven
        before, they are as they come.
        """
        record, start = self._record(name), index * BLOCK_BYTES
        data = self._bytes(name, start, min(BLOCK_BYTES, record.size - start))
        if record.blocks and hashlib.sha256(data).hexdigest() != record.blocks[index]:
            raise DamagedError(name, f"{CHANGED} (bytes {start:,} to {start + len(data):,})")
        return data

    def misfits(self) -> list[Damage]:
        """What one listing shows: files that are missing, and those of another size."""
        sizes = {entry.name: entry.size for entry in self.store.entries()}
        return [
            Damage(name, "it is missing" if size is None else f"it has {size:,} bytes, {record.size:,} were written")
            for name, record in sorted(self.manifest.files.items())
            if (size := sizes.get(name)) != record.size
        ]

    def unproven(self) -> list[str]:
        """Files of an older version, which have no proofs of their blocks: to be read whole before they are trusted."""
        return sorted(name for name, record in self.manifest.files.items() if record.size and not record.blocks)

    def damages(self, names: list[str] | None = None) -> Iterator[Damage]:
        """Read files whole, with the memory of one block, and say which are not as they were written."""
        for name in sorted(self.manifest.files) if names is None else names:
            record, digest = self.manifest.files[name], hashlib.sha256()
            try:
                for start in range(0, record.size, BLOCK_BYTES):
                    digest.update(self._bytes(name, start, min(BLOCK_BYTES, record.size - start)))
                if digest.hexdigest() != record.sha256:
                    yield Damage(name, CHANGED)
                elif name == METADATA_NAME:
                    check_pickle(self.read(name))
            except DamagedError as error:
                yield error.damage
            except UnsafePickleError as error:
                yield Damage(name, str(error))

    def _record(self, name: str) -> FileRecord:
        record = self.manifest.files.get(name)
        if record is None:
            raise DamagedError(name, "the manifest does not know it")
        return record

    def _bytes(self, name: str, start: int, size: int) -> bytes:
        try:
            data = self.store.read(name, start, size)
        except FileNotFoundError:
            raise DamagedError(name, "it is missing") from None
        except OSError as error:  # of a disk; that a store is out of reach (UserError) says nothing about the file
            raise DamagedError(name, f"it cannot be read: {error}") from None
        if len(data) != size:
            written = self.manifest.files[name].size
            raise DamagedError(name, f"it has {start + len(data):,} bytes, {written:,} were written")
        return data
