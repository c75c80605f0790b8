"""Checkpoints in pieces: one file per rank, held by the rank's own node and, in memory, by a peer node too.

A step is published on a node when its manifest is there, as everywhere. The manifest lists the pieces of all ranks,
also those of other nodes: whoever holds one manifest can prove every piece.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.checkpoint.folder import Checkpoint, CheckpointFolder, damage
from windlass.checkpoint.manifest import Manifest, piece_name
from windlass.checkpoint.ownership import node_folder, place_of, read_id
from windlass.errors import UserError
from windlass.runfolder import RunFolder

if TYPE_CHECKING:
    from windlass.spec.checkpoint import CheckpointSection


def tier_path(spec: CheckpointSection, tier: str) -> Path | None:
    """Where a node tier lies on this node, environment variables filled in; None if the run has no such tier."""
    every, text = {
        "memory": (spec.memory_every, spec.memory_path),
        "local": (spec.local_every, spec.local_path),
    }[tier]
    if every is None or text is None:
        return None
    # Shells know $UID, but do not hand it on.
    text = re.sub(r"\$(UID\b|\{UID\})", str(os.getuid()), text)
    path = os.path.expandvars(os.path.expanduser(text))
    if "$" in path:
        raise UserError(
            f"checkpoint.{tier}_path names a variable that is not set on this node",
            evidence=text,
            fix=f"checkpoint.{tier}_path=/some/path",
        )
    return Path(path)


def pieces_here(folder: RunFolder, spec: CheckpointSection, tier: str) -> CheckpointFolder | None:
    """This node's part of a run's checkpoints in a tier; None if the run has no such tier, or has not begun."""
    root, run_id = tier_path(spec, tier), read_id(folder)
    return CheckpointFolder(node_folder(root, folder, run_id)) if root and run_id else None


def make_private(root: Path, place: Path, *, tier: str) -> None:
    """Make a run's folder below a tier's path, for this user alone. Refused where another user could put something else
    in its place: what a run resumes from would be that user's.
    """
    try:
        root.mkdir(mode=0o700 if tier == "memory" else 0o777, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        above, own = root.stat(), place.lstat()
    except OSError as error:
        raise _not_ours(root, tier, str(error)) from None
    if tier == "memory" and above.st_uid not in (0, os.getuid()):
        raise _not_ours(root, tier, f"it belongs to user {above.st_uid}, this is user {os.getuid()}")
    if tier == "memory" and above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        raise _not_ours(root, tier, f"others may write to it: its mode is {stat.filemode(above.st_mode)}")
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.getuid():
        raise _not_ours(place, tier, f"it belongs to user {own.st_uid} or is a link, this is user {os.getuid()}")
    if own.st_mode & 0o077:
        place.chmod(0o700)  # as an older windlass made it


def _not_ours(path: Path, tier: str, evidence: str) -> UserError:
    return UserError(
        f"{path} cannot hold the {tier} tier of this user's runs",
        evidence=evidence,
        cause="whoever owns the folder decides what a run resumes from",
        fix=f"checkpoint.{tier}_path=/a/folder/of/your/own",
    )


def clear_earlier_runs(root: Path, folder: RunFolder, run_id: str) -> list[str]:
    """Remove what earlier runs of this very folder left on this node; their names."""
    mine = node_folder(root, folder, run_id)
    earlier = [path for path in root.glob(f"{place_of(folder)}-*") if path != mine and path.is_dir()]
    for path in earlier:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in earlier]


def ranks_held(checkpoint: Checkpoint, manifest: Manifest) -> list[int]:
    """Whose pieces of a published step are on this node with the right size."""
    return [
        rank
        for rank in range(manifest.world_size)
        if (record := manifest.files.get(piece_name(rank)))
        and damage(checkpoint.path / piece_name(rank), record, contents=False) is None
    ]


def readable_manifest(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest, unless it is missing or damaged."""
    try:
        return checkpoint.manifest()
    except (OSError, ValueError, TypeError, KeyError):
        return None
