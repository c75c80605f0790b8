"""Code that travels with a job: packed into ConfigMaps, the same bytes for the same files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import windlass
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.secrets import read_values

PART_BYTES = 900_000  # a ConfigMap holds 1 MiB at most, its names and labels included
MOST_PARTS = 8
IGNORED = frozenset(("__pycache__", "node_modules", "runs", "venv", "wandb"))
CODE, WINDLASS = "code", "windlass"  # the archives a job can carry
BOOTSTRAP = "bootstrap.py"
DIGEST_KEY = "digest"


@dataclass(frozen=True)
class Carried:
    """What goes with a job beside its run file."""

    archives: Mapping[str, bytes] = field(default_factory=dict)  # CODE, WINDLASS
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)  # by which the pods of this submission know each other


def gather(run: Run, environment: Mapping[str, str]) -> Carried:
    """Read what a run carries. Raises UserError for what is missing or too large."""
    asked = run.target.kubernetes
    archives = {}
    if asked.code:
        archives[CODE] = pack_code(Path(asked.code).expanduser())
    if asked.carry_windlass:
        archives[WINDLASS] = _pack(Path(windlass.__file__).parent, prefix="windlass/")
    return Carried(archives, read_values(run, environment), token=secrets.token_hex(32))


def pack_code(folder: Path) -> bytes:
    """A folder of code as an archive that fits."""
    if not folder.is_dir():
        raise UserError(f"target.kubernetes.code is {folder}, which is no folder")
    archive = _pack(folder)
    if len(archive) > PART_BYTES * MOST_PARTS:
        largest = sorted(((path.stat().st_size, name) for name, path in _files(folder)), reverse=True)[:3]
        raise UserError(
            f"the code in {folder} is too large to go with the job: {len(archive) / 2**20:.1f} MiB packed, "
            f"{PART_BYTES * MOST_PARTS / 2**20:.1f} MiB at most",
            evidence="largest: " + ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for size, name in largest),
            fix="put it into the image (`windlass image build`) or on the volume of target.kubernetes.storage",
        )
    return archive


def config_maps(name: str, archive: bytes) -> list[dict[str, Any]]:
    """An archive as the data of ConfigMaps NAME-0, NAME-1, …; the last one ends with the digest of them all."""
    kind = name.rpartition("-")[2]
    parts = [archive[begin : begin + PART_BYTES] for begin in range(0, len(archive), PART_BYTES)]
    made: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-{index}"},
            "binaryData": {f"{kind}.{index:02d}": base64.b64encode(part).decode()},
        }
        for index, part in enumerate(parts)
    ]
    made[-1]["data"] = {f"{kind}.{DIGEST_KEY}": archive_digest(archive)}
    if kind == WINDLASS:
        made[-1]["data"][BOOTSTRAP] = resources.files(__package__).joinpath(BOOTSTRAP).read_text()
    return made


def archive_digest(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


def _pack(folder: Path, prefix: str = "") -> bytes:
    """Bytes that depend on names and contents alone: two submissions of one folder are the same request."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in _files(folder):
            entry = tarfile.TarInfo(prefix + name)
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


def _files(folder: Path) -> Sequence[tuple[str, Path]]:
    """Files to carry, by their names below the folder: nothing hidden, nothing made by Python or by runs."""
    found = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if one not in IGNORED and not one.startswith("."))
        for one in sorted(files):
            path = Path(here, one)
            if not one.startswith(".") and not one.endswith((".pyc", ".so")) and path.is_file():
                found.append((str(path.relative_to(folder)), path))
    return found
