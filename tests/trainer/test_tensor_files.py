"""Which bytes of a file hold a part of a tensor, and files that are proven block by block."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint import CheckpointFolder, FileRecord, Manifest, hash_file
from windlass.checkpoint.manifest import BLOCK_BYTES, Hashing
from windlass.checkpoint.proven import DamagedError, ProvenFiles
from windlass.errors import UserError

torch = pytest.importorskip("torch")

boxes = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 6)).map(
        lambda drawn: (drawn[0], drawn[1] % drawn[0], min(drawn[2], drawn[0] - drawn[1] % drawn[0]))
    ),
    max_size=4,
)


@given(axes=boxes, limit=st.sampled_from([1, 3, 7, 1000]))
def test_slabs_cover_a_box_in_the_order_of_memory(axes: list[tuple[int, int, int]], limit: int) -> None:
    from windlass.trainer.checkpointing.tensor_files import slabs_of, span, strides_of

    sizes, offsets, lengths = ([axis[at] for axis in axes] for at in range(3))
    saved = torch.arange(math.prod(sizes))
    box = saved.reshape(sizes)
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        box = box.narrow(axis, offset, length)
    filled, before = torch.full_like(box, -1), -1
    for slab_offsets, slab_lengths in slabs_of(sizes, offsets, lengths, limit):
        first, last = span(sizes, slab_offsets, slab_lengths)
        assert before < first <= last
        target, before = filled, first
        for axis, (offset, length) in enumerate(zip(slab_offsets, slab_lengths, strict=True)):
            target = target.narrow(axis, offset - offsets[axis], length)
        target.copy_(saved[first : last + 1].clone().as_strided(slab_lengths, strides_of(sizes)))
    assert torch.equal(filled, box)


@pytest.mark.slow
@given(st.lists(st.integers(0, 3 * 2**20), max_size=8))
def test_a_record_does_not_depend_on_how_a_file_was_written(sizes: list[int]) -> None:
    hashing = Hashing()
    for size in [*sizes, BLOCK_BYTES]:
        hashing.update(memoryview(bytes(size)))
    at_once = Hashing()
    at_once.update(bytes(sum(sizes) + BLOCK_BYTES))
    assert hashing.record() == at_once.record()
    assert len(hashing.record().blocks) == -(-hashing.size // BLOCK_BYTES)


@pytest.fixture
def checkpoint(tmp_path: Path) -> ProvenFiles:
    """Written by DCP itself: two blocks and a bit."""
    import torch.distributed.checkpoint as dcp

    step = CheckpointFolder(tmp_path).at(1)
    state = {"a": torch.arange(5 * 2**20, dtype=torch.float32).reshape(5, -1), "b": torch.arange(4 * 2**20) / 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(step.path), no_dist=True)
    files = {path.name: hash_file(path) for path in step.path.iterdir()}
    step.publish(Manifest(step=1, tokens=1, files=files, model={}, order={}))
    return ProvenFiles.of_folder(step)


def test_only_blocks_that_are_read_are_proven(checkpoint: ProvenFiles, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from windlass.trainer.checkpointing.tensor_files import TensorReader

    (path,) = tmp_path.rglob("*.distcp")
    content = bytearray(path.read_bytes())
    content[-1000_000] ^= 1  # in the last block, which holds a part of b alone
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, size, problems in (("a", 5 * 2**20, []), ("b", 4 * 2**20, [path.name])):
            reader = TensorReader(checkpoint)
            state = {name: torch.zeros((5, 2**20) if name == "a" else size)}
            dcp.load(state, storage_reader=reader, no_dist=True)
            assert [damage.file for damage in reader.blocks.problems] == problems
    assert [damage.file for damage in checkpoint.damages()] == [path.name]
    with pytest.raises(DamagedError, match=r"bytes 33,554,432 to 3\d,\d+,\d+"):
        checkpoint.read_block(path.name, 2)


def test_files_of_an_older_version_are_read_whole_first(checkpoint: ProvenFiles) -> None:
    old = {name: FileRecord(record.size, record.sha256) for name, record in checkpoint.manifest.files.items()}
    manifest = dataclasses.replace(checkpoint.manifest, files=old)
    assert Manifest.parse(manifest.to_json()) == manifest
    assert "blocks" not in manifest.to_json()
    files = ProvenFiles(checkpoint.store, manifest)
    assert files.unproven() == sorted(old)
    assert checkpoint.unproven() == list(files.damages()) == files.misfits() == []


def test_a_step_that_is_let_go_while_it_is_exported_is_not_called_damaged(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from windlass.trainer.export import CheckpointValues

    step = CheckpointFolder(tmp_path).at(1)
    like = torch.arange(8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"model.a": like}, storage_writer=dcp.FileSystemWriter(step.path), no_dist=True)
    files = {path.name: hash_file(path) for path in step.path.iterdir()}
    step.publish(Manifest(step=1, tokens=1, files=files, model={}, order={}))
    values = CheckpointValues(ProvenFiles.of_folder(step))
    assert torch.equal(values("a", like), like)
    values.reader.blocks._kept.clear()
    step.delete()
    with pytest.raises(UserError, match="step 1 was let go while it was read"):
        values("a", like)
