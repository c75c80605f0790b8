"""One rank's part of the state as a safetensors file, written and hashed in one pass, read straight into tensors.

Put the pieces of all ranks together into a checkpoint that any number of ranks can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, FileRecord, Manifest, hash_file
from windlass.store import Sink
from windlass.trainer.model.safetensors_files import DTYPES, NAMES, make_header, narrowed, own_part, parse_header

PARTS = "windlass-parts"  # in a file's metadata: what the parts in it are parts of


def local_parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of every tensor, sharing its memory."""
    return {name: own_part(tensor)[0].detach() for name, tensor in sorted(state.items())}


@dataclass(frozen=True)
class Piece:
    """What a rank writes: the header is known before the values are."""

    header: bytes
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Piece:
        # Of every tensor: the shape of the whole, and where in it this rank's part begins.
        places = {name: [list(tensor.shape), list(own_part(tensor)[1])] for name, tensor in state.items()}
        parts = local_parts(state)
        return cls(make_header(parts, {PARTS: json.dumps(places)}), parts)

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.parts.values())

    def write(self, file: Sink) -> FileRecord:
        digest, size = hashlib.sha256(), 0
        for chunk in self._chunks():
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        return FileRecord(size, digest.hexdigest())

    def _chunks(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for tensor in self.parts.values():
            if tensor.numel():
                flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
                yield flat.numpy().data


def write_piece(path: Path, piece: Piece, *, sync: bool) -> FileRecord:
    """Into a file that has its room already."""
    with path.open("r+b") as file:
        record = piece.write(file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    return record


def reserve(files: Iterable[tuple[Path, int]]) -> None:
    """Take the room of files now, so that filling them cannot fail half way."""
    for path, size in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if size:
                os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)


def read_piece(path: Path, state: dict[str, Tensor]) -> None:
    """Fill this rank's parts of `state` from a file that is proven to be as it was written."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        fill(content, state)


def fill(content: mmap.mmap | bytearray, state: dict[str, Tensor]) -> None:
    described, _, start = parse_header(content)
    parts = local_parts(state)
    if described.keys() != parts.keys():
        raise ValueError(f"the piece holds other tensors: {sorted(described.keys() ^ parts.keys())[:4]}")
    for name, target in parts.items():
        facts = described[name]
        if (facts["shape"], facts["dtype"]) != (list(target.shape), NAMES[target.dtype]):
            raise ValueError(f"{name} is {facts['dtype']} {facts['shape']} in the piece, {target.shape} here")
        if target.numel() == 0:
            continue
        target.copy_(_values(content, start, facts))


def _values(content: mmap.mmap | bytearray, start: int, facts: dict[str, Any]) -> Tensor:
    """A copy of one tensor of a file whose values begin at `start`."""
    begin, end = facts["data_offsets"]
    values = torch.empty(facts["shape"], dtype=DTYPES[facts["dtype"]])
    source = torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=start + begin)
    values.reshape(-1).view(torch.uint8).copy_(source)
    return values


def assemble(place: Path, manifest: Manifest, target: CheckpointFolder) -> Checkpoint:
    """From proven pieces in `place`. Holds the whole state in memory once."""
    state: dict[str, Tensor] = {}
    for name in sorted(manifest.files):
        _add(place / name, state)
    checkpoint = target.incoming(manifest.step)
    checkpoint.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch points out that one process saves: it is meant to
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint.path), no_dist=True)
    files = {path.name: hash_file(path) for path in checkpoint.path.iterdir() if path.is_file()}
    checkpoint.publish(dataclasses.replace(manifest, files=files, layout=None))
    return target.take(checkpoint)


def _add(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        described, remarks, start = parse_header(content)
        parts = json.loads(remarks[PARTS])
        for name, facts in described.items():
            shape, offsets = parts[name]
            whole = state.setdefault(name, torch.empty(shape, dtype=DTYPES[facts["dtype"]]))
            if 0 in facts["shape"]:
                continue
            values = _values(content, start, facts)
            narrowed(whole, offsets, facts["shape"]).copy_(values)
