"""torch DCP's files, written as one stream per rank and read back in proven blocks, by any layout.

They are what DCP's own FileSystemWriter writes, and its reader reads them. Beyond that, DCP's description says where in
an item the values begin, so that a rank reads the rows it needs and not the whole item.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from windlass.checkpoint import FileRecord
from windlass.checkpoint.manifest import BLOCK_BYTES, METADATA_NAME, Hashing
from windlass.checkpoint.pickles import UnsafePickleError, load_pickle
from windlass.checkpoint.proven import ProvenFiles
from windlass.store import Sink, Store
from windlass.trainer.checkpointing.blocks import BlockReader, Blocks, Readers
from windlass.trainer.model.safetensors_files import narrowed

SLAB_BYTES = BLOCK_BYTES  # of a tensor, filled at once
SMALL_BYTES = 2**14  # an item of so few values is read whole


def save_tensors(state: dict[str, Tensor], place: Store, group: dist.ProcessGroup) -> dict[str, FileRecord]:
    """Write this rank's part of the state, and on rank 0 the description of all; what was written."""
    writer = TensorWriter(place)
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)  # which rank writes what is worked out once
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    return writer.records


class TensorWriter(dcp.StorageWriter):
    """Writes a rank's tensors as one file, each byte once; `records` are the files that this rank wrote."""

    def __init__(self, place: Store) -> None:
        self.place = place
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(self._write(plan.storage_data, plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = "1.0.0"
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta()
        description = pickle.dumps(metadata)
        with self.place.create(METADATA_NAME, size=len(description)) as file:
            file.write(description)
        hashing = Hashing()
        hashing.update(description)
        self.records[METADATA_NAME] = hashing.record()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _write(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors = cast("list[Tensor]", [planner.resolve_data(item) for item in plan.items])  # a state has no others
        results = []
        with self.place.create(name, size=sum(tensor.nbytes for tensor in tensors)) as file:
            stream = _Stream(file)
            for item, tensor in zip(plan.items, tensors, strict=True):
                offset = stream.hashing.size
                values_at = stream.save(tensor.detach().contiguous())
                place = _StorageInfo(name, offset, stream.hashing.size - offset)
                place.values_at = values_at  # type: ignore[attr-defined]  # DCP's own reader takes no notice
                results.append(WriteResult(item.index, place.length, place))
        self.records[name] = stream.hashing.record()
        return results


class _Stream:
    """What torch.save writes to: hashed on its way, and watched for where the values begin."""

    def __init__(self, file: Sink) -> None:
        self.file, self.hashing = file, Hashing()
        self._begins: dict[int, int] = {}  # where a write of so many bytes began
        self._problem: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Fails later, in `save`: torch covers the error of a file with one about its own offsets."""
        self._begins[memoryview(data).nbytes] = self.hashing.size
        try:
            if self._problem is None:
                self.file.write(data)
                self.hashing.update(data)
        except Exception as error:
            self._problem = error
        return memoryview(data).nbytes

    def flush(self) -> None: ...

    def save(self, tensor: Tensor) -> int | None:
        """Write a tensor as DCP does; at which byte of the item its values begin, if it is large."""
        begun = self.hashing.size
        self._begins = {}
        if tensor.untyped_storage().size() != tensor.nbytes:
            tensor = tensor.clone()
        torch.save(tensor, cast(Any, self))  # `write` and `flush` are all that it asks for
        if self._problem is not None:
            raise self._problem
        at = self._begins.get(tensor.nbytes)
        return at - begun if at is not None and tensor.nbytes > SMALL_BYTES else None


class TensorReader(dcp.StorageReader):
    """Fills tensors from a checkpoint: the blocks that this rank needs, each proven while it is read.

    With `readers` the ranks of a node read a block that several of them need once. What is damaged is in
    `blocks.problems` after the load, and why the store could not be asked in `blocks.failure`: the tensors are then
    worth nothing.
    """

    def __init__(self, files: ProvenFiles, readers: Readers | None = None, description: bytes | None = None) -> None:
        self.files, self.readers = files, readers
        self.blocks = BlockReader(files)
        self._description = description

    @functools.cached_property
    def metadata(self) -> Metadata:
        """DCP's description of the tensors, a pickle that can do nothing but that."""
        metadata = load_pickle(self._description or self.files.read(METADATA_NAME))
        if not isinstance(metadata, Metadata):
            raise UnsafePickleError("it is not DCP's description of tensors")
        for place in (metadata.storage_data or {}).values():
            record = self.files.manifest.files.get(place.relative_path)
            if record is None or not 0 <= place.offset <= place.offset + place.length <= record.size:
                raise UnsafePickleError(f"it names bytes that {place.relative_path} does not have")
        return metadata

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        slabs = sorted(
            (slab for item in plan.items for slab in self._slabs(item)), key=lambda slab: (slab.file, slab.start)
        )
        with self.blocks.reading({block for slab in slabs for block in slab.blocks()}, self.readers) as blocks:
            for slab in slabs:
                target = planner.resolve_tensor(slab.item).detach()
                values = slab.values(blocks)
                if values is not None:
                    narrowed(target, slab.within, slab.lengths).copy_(values)
        for item in plan.items:
            planner.commit_tensor(item, planner.resolve_tensor(item))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _slabs(self, item: ReadItem) -> Iterator[Slab]:
        if 0 in item.lengths:
            return
        described = self.metadata.state_dict_metadata[item.storage_index.fqn]
        place = self.metadata.storage_data[item.storage_index]
        assert isinstance(described, TensorStorageMetadata)
        chunk, dtype = _chunk_of(described, item), described.properties.dtype
        size = math.prod(chunk.sizes) * dtype.itemsize
        begin = getattr(place, "values_at", None)
        if not (isinstance(begin, int) and 0 <= begin <= place.length - size):
            bounds = tuple(item.storage_offsets), tuple(item.lengths)
            yield Slab(item, place.relative_path, place.offset, place.length, *bounds)
            return
        for offsets, lengths in slabs_of(chunk.sizes, item.storage_offsets, item.lengths, SLAB_BYTES // dtype.itemsize):
            first, last = span(chunk.sizes, offsets, lengths)
            start, size = place.offset + begin + first * dtype.itemsize, (last + 1 - first) * dtype.itemsize
            layout = dtype, strides_of(chunk.sizes)
            yield Slab(item, place.relative_path, start, size, offsets, lengths, layout)


@dataclass(frozen=True)
class Slab:
    """A part of a saved tensor that is read at once: bytes of a file, and where they go."""

    item: ReadItem
    file: str
    start: int
    size: int
    offsets: tuple[int, ...]  # in the saved tensor
    lengths: tuple[int, ...]
    layout: tuple[torch.dtype, tuple[int, ...]] | None = None  # and strides; None: an item, as torch.save wrote it

    @property
    def within(self) -> tuple[int, ...]:
        """Where it begins in what the rank needs of that tensor."""
        return tuple(at - start for at, start in zip(self.offsets, self.item.storage_offsets, strict=True))

    def blocks(self) -> Iterator[tuple[str, int]]:
        last = (self.start + self.size - 1) // BLOCK_BYTES
        return ((self.file, index) for index in range(self.start // BLOCK_BYTES, last + 1))

    def values(self, blocks: Blocks) -> Tensor | None:
        """None if a block is damaged."""
        content = bytearray(self.size)
        for file, index in self.blocks():
            block, begin = blocks(file, index), index * BLOCK_BYTES
            if block is None:
                return None
            first, last = max(self.start, begin), min(self.start + self.size, begin + len(block))
            content[first - self.start : last - self.start] = block[first - begin : last - begin]
        if self.layout is None:
            saved: Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return narrowed(saved, self.offsets, self.lengths)
        dtype, strides = self.layout
        return torch.frombuffer(content, dtype=dtype).as_strided(self.lengths, strides)


def slabs_of(sizes: Any, offsets: Any, lengths: Any, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box of a tensor (offsets, lengths) in boxes that span at most about `limit` values, in the order of memory."""
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    if row > limit and len(sizes) > 1:
        for index in range(offsets[0], offsets[0] + lengths[0]):
            for inner_offsets, inner_lengths in slabs_of(sizes[1:], offsets[1:], lengths[1:], limit):
                yield (index, *inner_offsets), (1, *inner_lengths)
        return
    rows = max(1, limit // max(row, 1))
    for begin in range(offsets[0], offsets[0] + lengths[0], rows):
        yield (begin, *offsets[1:]), (min(rows, offsets[0] + lengths[0] - begin), *lengths[1:])


def span(sizes: Any, offsets: Any, lengths: Any) -> tuple[int, int]:
    """The first and the last value of a box, counted in the memory of the whole tensor."""
    strides = strides_of(sizes)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def strides_of(sizes: Any) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def _chunk_of(described: TensorStorageMetadata, item: ReadItem) -> ChunkStorageMetadata:
    """What an item of the file holds of its tensor."""
    index = item.storage_index
    if index.index is not None and described.chunks[index.index].offsets == index.offset:
        return described.chunks[index.index]
    return next(chunk for chunk in described.chunks if chunk.offsets == index.offset)
