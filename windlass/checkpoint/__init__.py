"""Checkpoints on disk: layout, manifest, verification, retention. No torch: any command can read them."""

from windlass.checkpoint.folder import NODE_TIERS, TIERS, Checkpoint, CheckpointFolder, damage
from windlass.checkpoint.manifest import FileRecord, Manifest, hash_file

__all__ = ["NODE_TIERS", "TIERS", "Checkpoint", "CheckpointFolder", "FileRecord", "Manifest", "damage", "hash_file"]
