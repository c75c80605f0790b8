"""Checkpoints on disk: layout, manifest, verification, retention. No torch: any command can read them."""

from windlass.checkpoint.folder import Checkpoint, CheckpointFolder
from windlass.checkpoint.manifest import FileRecord, Manifest, hash_file

__all__ = ["Checkpoint", "CheckpointFolder", "FileRecord", "Manifest", "hash_file"]
