"""Weights as they lie in safetensors files: any rows of any tensor, read without the rest and without a memory map.

Put a rank's part of a full tensor into its parameter, from memory or from a file, without communication.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from windlass.errors import UserError

CHUNK_BYTES = 8 << 20  # what a rank holds beside its own slices while it reads
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is: its file, and its bytes there."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """The rows [first, last) a few at a time, each part with its first row."""
        step = max(1, CHUNK_BYTES // max(1, self.row_bytes))
        with self.path.open("rb", buffering=0) as file:
            for row in range(first, last, step):
                yield row, self._read(file.fileno(), row, min(last, row + step))

    def whole(self) -> Tensor:
        with self.path.open("rb", buffering=0) as file:
            if self.shape:
                return self._read(file.fileno(), 0, self.shape[0])
            return self._bytes(file.fileno(), self.begin, self.dtype.itemsize).view(self.dtype).reshape(())

    def _read(self, file: int, first: int, last: int) -> Tensor:
        data = self._bytes(file, self.begin + first * self.row_bytes, (last - first) * self.row_bytes)
        return data.view(self.dtype).reshape(last - first, *self.shape[1:])

    def _bytes(self, file: int, place: int, count: int) -> Tensor:
        buffer = np.empty(count, dtype=np.uint8)
        view, done = memoryview(buffer.data), 0
        while done < count:
            got = os.preadv(file, [view[done:]], place + done)
            if not got:
                raise OSError(f"{self.path} ends {count - done:,} bytes early")
            done += got
        return torch.from_numpy(buffer)


def weight_files(folder: Path) -> list[Path] | None:
    """The safetensors files of a model folder; None where it holds none."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        return None
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return [folder / name for name in names]


def parse_header(content: mmap.mmap | bytearray) -> tuple[dict[str, Any], dict[str, str], int]:
    """The entries of a safetensors file, its own remarks, and where its values begin."""
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= len(content) - 8:
        raise ValueError(f"a header of {length:,} bytes in a file of {len(content):,}")
    entries: dict[str, Any] = json.loads(content[8 : 8 + length])
    return entries, entries.pop("__metadata__", {}), 8 + length


def make_header(described: dict[str, Tensor], remarks: dict[str, str]) -> bytes:
    """What a file of these tensors begins with; their values follow in the same order."""
    entries: dict[str, Any] = {"__metadata__": remarks}
    end = 0
    for name, tensor in described.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, described: dict[str, Tensor], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """A file of the tensors that `described` has the shapes and types of, in its order; one is in memory at a time."""
    with path.open("wb") as file:
        file.write(make_header(described, {"format": "pt"}))
        for (name, tensor), expected in zip(tensors, described, strict=True):
            if name != expected or (tensor.shape, tensor.dtype) != (described[name].shape, described[name].dtype):
                raise RuntimeError(f"{name} {tuple(tensor.shape)} was to be {expected}")
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file and its own remarks; a file that is cut short or no safetensors file is a UserError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            entries, remarks, start = parse_header(content)
        tensors = {}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
            rows = tensor.shape[0] if tensor.shape else 1
            if rows * tensor.row_bytes != end - begin or start + end > size:
                raise ValueError(f"{name} lies beyond the end of the file, which has {size:,} bytes")
            tensors[name] = tensor
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the weights of {file.parent} cannot be loaded",
            evidence=f"{file.name}: {type(error).__name__}: {error}",
            fix="copy or download the folder again",
        ) from None
    return tensors, remarks


def fill(target: Tensor, value: Tensor) -> None:
    """Copy this rank's slice of a full tensor into a parameter."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            local, offsets = own_part(target)
            local.copy_(narrowed(value, offsets, local.shape))
        else:
            target.copy_(value)


def own_part(target: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The plain tensor that this rank holds, and where in the full one it begins."""
    if not isinstance(target, DTensor):
        return target, (0,) * target.ndim
    local = target.to_local()
    shape, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if tuple(shape) != tuple(local.shape):
        raise RuntimeError(f"a part of shape {tuple(local.shape)} where {tuple(shape)} was expected")
    return local, tuple(offsets)


def narrowed(full: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The part of a full tensor that begins at `offsets`: a view."""
    for axis, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        full = full.narrow(axis, first if size else 0, size)
    return full


@torch.no_grad()
def fill_from(target: Tensor, stored: StoredTensor) -> None:
    """Read this rank's rows of a stored tensor. Rows that the file lacks become the mean of those it has."""
    if not target.ndim:
        target.copy_(stored.whole())
        return
    local, (first, *columns) = own_part(target)
    last, num_stored = first + local.shape[0], stored.shape[0]
    for row, part in stored.chunks(first, min(last, num_stored)):
        rows = local[row - first : row - first + part.shape[0]]
        rows.copy_(narrowed(part, (0, *columns), rows.shape))
    if last > num_stored and last > first:
        mean = mean_row(stored)
        local[max(num_stored, first) - first :].copy_(narrowed(mean, columns, local.shape[1:]))


def mean_row(stored: StoredTensor) -> Tensor:
    """The mean of all rows: where a row for a new token begins."""
    total = torch.zeros(stored.shape[1:], dtype=torch.float64)
    for _, part in stored.chunks(0, stored.shape[0]):
        total += part.to(torch.float64).sum(0)
    return (total / stored.shape[0]).to(torch.float32)
