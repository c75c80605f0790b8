"""Checkpoints that are in a cluster: listed, and brought here file by file, each proven by its manifest."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import threading
from pathlib import Path
from queue import Queue
from typing import IO, Any

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest, damage
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.errors import ExitCode, UserError
from windlass.targets.kubernetes.pod.interface import RUNS
from windlass.targets.kubernetes.pod_scripts import PodScripts

ATTEMPTS = 3
STREAM_SECONDS = 300.0  # of silence


def list_in_cluster(scripts: PodScripts, run_name: str) -> list[dict[str, Any]]:
    rows = scripts.ask("checkpoints", _folder(run_name))
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise UserError(
            "the answer of a pod about its checkpoints is not understood",
            evidence=str(rows)[:200],
            fix="target.kubernetes.image must be one that nobody else changes",
            exit_code=ExitCode.FAILED,
        )
    return [{"created": None, "world_size": None, "tokens": None, **row, "tier": "cluster"} for row in rows]


def _is_row(row: object) -> bool:
    """Pods are not trusted: what they say becomes names of folders here."""
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and row["step"] >= 0
        and isinstance(row.get("path"), str)
        and type(row.get("bytes")) is int
        and isinstance(row.get("complete"), bool)
    )


def fetch(scripts: PodScripts, run_name: str, step: int | None, to: Path) -> Checkpoint:
    """Bring one checkpoint here, beside one that may be there: what is here and whole is not brought again."""
    there = list_in_cluster(scripts, run_name)
    complete = [row for row in there if row["complete"]]
    chosen = [row for row in complete if step is None or row["step"] == step]
    if not chosen:
        steps = ", ".join(str(row["step"]) for row in complete)
        raise UserError(
            "no complete checkpoint" + (f" of step {step}" if step is not None else "") + f" of {run_name} is there",
            evidence=f"complete: {steps}" if steps else "nothing complete in the cluster",
            fix=f"windlass ckpt ls {run_name}",
        )
    row = chosen[-1]
    text = scripts.read("part", f"{row['path']}/{MANIFEST_NAME}", "0", "0").decode()
    try:
        manifest = Manifest.parse(text, step=row["step"])
    except ValueError as error:
        raise UserError(f"the manifest of step {row['step']} is damaged in the cluster", evidence=str(error)) from None
    folder = CheckpointFolder(to)
    incoming = folder.incoming(row["step"])
    incoming.prepare(manifest)
    for attempt in range(ATTEMPTS + 1):
        here = folder.at(row["step"])
        wrong = [name for name, part in sorted(manifest.files.items()) if not incoming.holds(name, part, former=here)]
        if not wrong:
            incoming.publish(manifest)
            return folder.take(incoming)
        if attempt < ATTEMPTS:
            _bring(scripts, row["path"], wrong, incoming.path)
    first = (wrong[0], damage(incoming.path / wrong[0], manifest.files[wrong[0]]))
    raise UserError(
        f"the checkpoint of step {row['step']} does not come here whole",
        evidence=f"{first[0]}: {first[1]}",
        cause="it is damaged where it is, or the connection breaks",
        fix=f"windlass ckpt get {run_name} --step {row['step']}    tries again, from where it was",
        exit_code=ExitCode.FAILED,
    )


def _bring(scripts: PodScripts, origin: str, names: list[str], to: Path) -> None:
    """Unpack a tar stream as it comes; where it breaks off, the whole files are kept."""
    to.mkdir(parents=True, exist_ok=True)
    pipe = _Pipe()
    unpacker = threading.Thread(target=_unpack, args=(pipe, to, set(names)), daemon=True)
    unpacker.start()
    try:
        with contextlib.suppress(UserError):  # what is missing afterwards is asked for again, and said if it stays so
            scripts.stream("tar", origin, json.dumps(names), to=pipe.put, timeout=STREAM_SECONDS)
    finally:
        pipe.put(b"")
        unpacker.join()


def _unpack(pipe: _Pipe, to: Path, names: set[str]) -> None:
    try:
        with tarfile.open(fileobj=pipe, mode="r|") as archive:
            for entry in archive:
                if entry.name in names and entry.isfile():
                    target = to / entry.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(entry)
                    if content is not None:
                        _copy(content, target)
    except (tarfile.TarError, OSError):
        pass
    finally:
        pipe.drain()


def _copy(content: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        while chunk := content.read(1 << 20):
            file.write(chunk)


class _Pipe(io.RawIOBase):
    """A file that one thread writes and another reads, holding little in between."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: Queue[bytes] = Queue(maxsize=64)
        self._rest, self._ended = b"", False

    def put(self, data: bytes) -> None:
        self._chunks.put(bytes(data))

    def read(self, size: int = -1, /) -> bytes:
        found = bytearray(self._rest)
        while not self._ended and (size < 0 or len(found) < size):
            chunk = self._chunks.get()
            self._ended = not chunk
            found += chunk
        wanted = len(found) if size < 0 else size
        self._rest = bytes(found[wanted:])
        return bytes(found[:wanted])

    def drain(self) -> None:
        """Let the writer go on although nobody reads any more."""
        while not self._ended:
            self._ended = not self._chunks.get()


def _folder(run_name: str) -> str:
    return f"{RUNS}/{run_name}/checkpoints"
