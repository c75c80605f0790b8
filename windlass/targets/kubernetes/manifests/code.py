"""Code that travels with a job: packed into ConfigMaps, the same bytes for the same files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import re
import secrets
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import windlass
from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.kubernetes.manifests.secrets import SECRET_TEXT, own_names, read_values
from windlass.targets.kubernetes.pod.interface import BOOTSTRAP, CARRIED, CODE, DIGEST_KEY, WINDLASS
from windlass.targets.protocol import LOOP_VARIABLE

PART_BYTES = 900_000  # a ConfigMap holds 1 MiB at most, its names and labels included
MOST_PARTS = 8
MOST_PLAIN_BYTES = 100 * 2**20  # before packing: what is larger is not even read
IGNORED = frozenset(("__pycache__", "node_modules"))
IGNORED_UNLESS_PACKAGES = frozenset(("runs", "venv", "wandb"))  # with an __init__.py they are code
CREDENTIAL_FOLDERS = (".aws", ".ssh", ".kube", ".gnupg", ".docker", ".azure", ".config/gcloud", ".config/gh")
CREDENTIAL_FILES = re.compile(r"credentials(\.json|\.csv)?|id_(rsa|dsa|ecdsa|ed25519)|kubeconfig|[^/]+\.(p12|pfx|jks)")


@dataclass(frozen=True)
class Carried:
    """What goes with a job beside its run file."""

    archives: Mapping[str, bytes] = field(default_factory=dict)  # CODE, WINDLASS
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)  # by which the pods of this submission know each other
    bootstrap: str = ""  # the program that unpacks the WINDLASS archive in a pod


def gather(run: Run, environment: Mapping[str, str]) -> Carried:
    """Read what a run carries. Raises UserError for what is missing or too large."""
    if LOOP_VARIABLE in environment:
        return _carried_here(run, environment, Path(CARRIED))
    options = run.target.kubernetes
    archives, bootstrap = {}, ""
    code = options.code or run.code
    if code:
        archives[CODE] = pack_code(Path(code).expanduser())
    if options.carry_windlass:
        archives[WINDLASS] = _pack(_entries(Path(windlass.__file__).parent), prefix="windlass/", trusted=True)
        bootstrap = resources.files("windlass.targets.kubernetes.pod").joinpath(BOOTSTRAP).read_text()
    values = read_values(run, environment)
    return Carried(archives, values, token=secrets.token_hex(32), bootstrap=bootstrap)


def _carried_here(run: Run, environment: Mapping[str, str], folder: Path) -> Carried:
    """In the pod of a retry loop: what was read when the run was first submitted, byte by byte."""
    archives = {}
    for kind in (CODE, WINDLASS):
        parts = sorted(folder.glob(f"{kind}.[0-9][0-9]"))
        if parts:
            archives[kind] = b"".join(part.read_bytes() for part in parts)
    bootstrap = (folder / BOOTSTRAP).read_text() if WINDLASS in archives else ""
    values = {name: environment[name] for name in own_names(run)}
    return Carried(archives, values, token=secrets.token_hex(32), bootstrap=bootstrap)


def pack_code(folder: Path) -> bytes:
    """A folder of code as an archive that fits. Refuses what would take a secret or another folder's files along."""
    if not folder.is_dir():
        raise UserError(
            f"the code of the run, {folder}, is no folder",
            fix="target.kubernetes.code=FOLDER    that holds your code, or null",
        )
    _must_not_be_credentials(folder)
    entries = _entries(folder)
    if sum(entry.size for entry in entries) > MOST_PLAIN_BYTES:
        raise _too_large(folder, entries, "unpacked", MOST_PLAIN_BYTES)
    archive = _pack(entries)
    if len(archive) > PART_BYTES * MOST_PARTS:
        raise _too_large(folder, entries, "packed", PART_BYTES * MOST_PARTS, len(archive))
    return archive


def config_maps(name: str, carried: Carried) -> list[dict[str, Any]]:
    """The archives as ConfigMaps, those of the first one NAME-code-0, NAME-code-1, …"""
    archives = sorted(carried.archives.items())
    return [part for kind, archive in archives for part in _config_maps(name, kind, archive, carried.bootstrap)]


def _config_maps(name: str, kind: str, archive: bytes, bootstrap: str) -> list[dict[str, Any]]:
    """The parts of an archive; the last one ends with the digest of them all."""
    parts = [archive[begin : begin + PART_BYTES] for begin in range(0, len(archive), PART_BYTES)]
    made: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-{kind}-{index}"},
            "binaryData": {f"{kind}.{index:02d}": base64.b64encode(part).decode()},
        }
        for index, part in enumerate(parts)
    ]
    made[-1]["data"] = {f"{kind}.{DIGEST_KEY}": archive_digest(archive)}
    if kind == WINDLASS:
        made[-1]["data"][BOOTSTRAP] = bootstrap
    return made


def archive_digest(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


@dataclass(frozen=True)
class _Entry:
    """A file to carry, or a link to a folder that is carried too."""

    name: str  # below the folder
    path: Path
    size: int
    link: str | None = None


def _entries(folder: Path) -> list[_Entry]:
    """What to carry, by name: nothing hidden, nothing made by Python or by runs. Only names and sizes are read."""
    root, entries, strange = folder.resolve(), [], []
    for here, folders, files in os.walk(folder):
        links = [directory for directory in folders if Path(here, directory).is_symlink()]
        folders[:] = [
            directory for directory in folders if directory not in links and not _is_left_out(Path(here, directory))
        ]
        for file in (*files, *links):
            path = Path(here, file)
            name = str(path.relative_to(folder))
            if file.startswith(".") or file.endswith(".pyc") or (file in links and _is_left_out(path)):
                continue
            if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(root)):
                strange.append(f"{name} -> {os.readlink(path)}")
            elif path.is_dir():
                entries.append(_Entry(name, path, 0, link=os.path.relpath(path.resolve(), Path(root, name).parent)))
            elif stat.S_ISREG(path.stat().st_mode):
                entries.append(_Entry(name, path, path.stat().st_size))
            else:
                raise UserError(f"{path} is neither a file nor a folder, and cannot go with the job", fix=f"rm {path}")
    if strange:
        raise UserError(
            f"a link in the code folder {folder} leads out of the folder, or nowhere",
            evidence="\n".join(strange[:5]) + (f"\nand {len(strange) - 5} more" if len(strange) > 5 else ""),
            cause="what is there would go to the cluster without anybody having named it",
            fix="copy it into the folder; or give the link a name that begins with a dot: hidden files stay here",
        )
    return sorted(entries, key=lambda entry: entry.name)


def _is_left_out(folder: Path) -> bool:
    if folder.name in IGNORED_UNLESS_PACKAGES:
        return not (folder / "__init__.py").is_file()
    return folder.name in IGNORED or folder.name.startswith(".")


def _pack(entries: Sequence[_Entry], prefix: str = "", *, trusted: bool = False) -> bytes:
    """Bytes that depend on names and contents alone: two submissions of one folder are the same request."""
    plain, holding = io.BytesIO(), []
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for item in entries:
            entry = tarfile.TarInfo(prefix + item.name)
            if item.link is not None:
                entry.type, entry.linkname = tarfile.SYMTYPE, item.link
                tar.addfile(entry)
                continue
            try:
                with item.path.open("rb") as file:
                    content = file.read(item.size)
            except OSError as error:
                raise UserError(f"{item.path} cannot be read", evidence=str(error)) from None
            if not trusted and (CREDENTIAL_FILES.fullmatch(item.path.name) or SECRET_TEXT.search(content)):
                holding.append(item.name)
            entry.size, entry.mode = len(content), 0o755 if os.access(item.path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    if holding:
        raise UserError(
            "the code that would go with the job holds what looks like a secret",
            evidence=", ".join(holding[:5]) + (f" and {len(holding) - 5} more" if len(holding) > 5 else ""),
            cause="whoever may read ConfigMaps in the namespace would have it",
            fix="move it out of the folder, or give it a name that begins with a dot: hidden files stay here\n"
            "target.kubernetes.secrets=['NAME=file:PATH']    gives it to the pods as a secret",
        )
    return gzip.compress(plain.getvalue(), mtime=0)


def _must_not_be_credentials(folder: Path) -> None:
    place, home = folder.resolve(), Path.home().resolve()
    inside = f"/{place.as_posix()}/"
    if home.is_relative_to(place):
        what = f"{folder} is your home folder, or holds it"
    elif any(f"/{name}/" in inside for name in CREDENTIAL_FOLDERS):
        what = f"{folder} is a folder of credentials, not of code"
    else:
        return
    raise UserError(
        f"target.kubernetes.code: {what}",
        evidence=str(place),
        fix="target.kubernetes.code=FOLDER    a folder with the code alone; secrets go by target.kubernetes.secrets",
    )


def _too_large(folder: Path, entries: Sequence[_Entry], how: str, most: int, size: int | None = None) -> UserError:
    largest = sorted(entries, key=lambda entry: entry.size, reverse=True)[:3]
    size = size if size is not None else sum(entry.size for entry in entries)
    return UserError(
        f"the code in {folder} is too large to go with the job: {size / 2**20:.1f} MiB {how}, "
        f"{most / 2**20:.1f} MiB at most",
        evidence="largest: " + ", ".join(f"{file.name} ({file.size / 2**20:.1f} MiB)" for file in largest),
        fix="put it into the image (`windlass image build`) or on the volume of target.kubernetes.storage",
    )
