"""Put the pieces of all ranks together into a checkpoint that any number of ranks can read."""

from __future__ import annotations

import dataclasses
import json
import mmap
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest, hash_file
from windlass.trainer.stored import DTYPES
from windlass.trainer.tiers_piece import PARTS


def assemble(place: Path, manifest: Manifest, target: CheckpointFolder) -> Checkpoint:
    """From proven pieces in `place`. Holds the whole state in memory once."""
    state: dict[str, Tensor] = {}
    for name in sorted(manifest.files):
        _add(place / name, state)
    checkpoint = target.incoming(manifest.step)
    checkpoint.delete()
    checkpoint.path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch points out that one process saves: it is meant to
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint.path), no_dist=True)
    files = {path.name: hash_file(path) for path in checkpoint.path.iterdir() if path.is_file()}
    checkpoint.publish(dataclasses.replace(manifest, files=files, layout=None))
    return target.take(checkpoint)


def _add(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        length = int.from_bytes(content[:8], "little")
        described = json.loads(content[8 : 8 + length])
        parts = json.loads(described.pop("__metadata__")[PARTS])
        for name, facts in described.items():
            shape, offsets = parts[name]
            dtype, (begin, end) = DTYPES[facts["dtype"]], facts["data_offsets"]
            whole = state.setdefault(name, torch.empty(shape, dtype=dtype))
            values = torch.empty(facts["shape"], dtype=dtype)
            if values.numel() == 0:
                continue
            source = torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=8 + length + begin)
            values.reshape(-1).view(torch.uint8).copy_(source)
            del source  # it holds on to the mapping
            for axis, (offset, size) in enumerate(zip(offsets, facts["shape"], strict=True)):
                whole = whole.narrow(axis, offset, size)
            whole.copy_(values)
