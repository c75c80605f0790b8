"""The user's code in a pod: from the mounted ConfigMaps to a folder on PYTHONPATH."""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
from pathlib import Path

from windlass.targets.kubernetes.pod.interface import CODE, DIGEST_KEY

ARRIVAL_SECONDS = 180.0  # kubelets refresh mounted ConfigMaps once a minute or so
POLL_SECONDS = 1.0


class NotArrivedError(Exception):
    """The code that all pods are to run is not here."""


def code_digest(carried: Path) -> str | None:
    """The digest of the code that is mounted now; None where the run carries none."""
    try:
        return (carried / f"{CODE}.{DIGEST_KEY}").read_text().strip()
    except FileNotFoundError:
        return None


def unpack_code(carried: Path, scratch: Path, wanted: str | None, *, patience: float = ARRIVAL_SECONDS) -> Path | None:
    """The folder with the code whose digest is `wanted`, waiting for it to arrive; None where the run carries none."""
    if wanted is None:
        return None
    folder = scratch / f"{CODE}-{wanted[:12]}"
    if folder.is_dir():
        return folder
    deadline = time.monotonic() + patience
    while (archive := _archive(carried, wanted)) is None:
        if time.monotonic() > deadline:
            raise NotArrivedError(f"the code {wanted[:12]} has not arrived in {carried}")
        time.sleep(POLL_SECONDS)
    unfinished = folder.with_suffix(".new")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(unfinished, filter="data")
    unfinished.rename(folder)
    return folder


def _archive(carried: Path, wanted: str) -> bytes | None:
    """All parts, if they are those of the wanted archive: parts of two versions may be mixed for a moment."""
    try:
        archive = b"".join(path.read_bytes() for path in sorted(carried.glob(f"{CODE}.[0-9][0-9]")))
    except FileNotFoundError:
        return None
    return archive if hashlib.sha256(archive).hexdigest() == wanted else None
