"""A checkpoint that somebody else wrote runs no code here: not when it is proven, not when it is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint import CheckpointFolder, Manifest, hash_file
from windlass.checkpoint.pickles import UnsafePickleError, check_pickle, load_pickle
from windlass.checkpoint.proven import ProvenFiles

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few tensors, written by DCP and published."""
    import torch.distributed.checkpoint as dcp

    checkpoint = CheckpointFolder(tmp_path_factory.mktemp("saved")).at(4)
    state = {
        "model.a": torch.arange(6.0).reshape(3, 2),
        "half": torch.ones(4, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint.path), no_dist=True)
    files = {path.name: hash_file(path) for path in checkpoint.path.iterdir()}
    checkpoint.publish(Manifest(step=4, tokens=1, files=files, model={}, order={}))
    return checkpoint.path


class Payload:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


def planted(metadata: Any, kind: str, mark: Path) -> bytes:
    """DCP's metadata with a way to run code or to read elsewhere in it."""
    import torch.distributed.checkpoint.metadata as dcp_metadata

    info = next(iter(metadata.storage_data.values()))
    if kind == "call":
        metadata.planner_data = Payload(os.system, f"touch {mark}")
    elif kind == "only a call":
        metadata = Payload(os.system, f"touch {mark}")
    elif kind == "builtin":
        metadata.planner_data = Payload(eval, f"open({str(mark)!r}, 'w')")
    elif kind == "bytes":  # DCP unpickles such an entry with no restriction
        metadata.state_dict_metadata["model.a"] = dcp_metadata.BytesStorageMetadata()
    elif kind == "class":
        data = pickle.dumps(metadata)[:-1]
        change = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVx\nI1\nstt\x62" + b"0."
        return data + change
    elif kind == "elsewhere":
        info.relative_path = "../../secret"
    elif kind == "elsewhere, by another class":  # DCP asks any object for its relative_path
        index = next(iter(metadata.storage_data))
        other = dcp_metadata.StorageMeta()
        other.__dict__.update(vars(info), relative_path="../../secret")
        metadata.storage_data[index] = other
    return pickle.dumps(metadata)


def plant(folder: Path, kind: str, mark: Path, saved: Path) -> None:
    """Write it, and make the manifest agree: whoever writes to a bucket can."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(planted(metadata, kind, mark))
    checkpoint = CheckpointFolder(folder.parent).at(4)
    manifest = checkpoint.manifest()
    files = {**manifest.files, ".metadata": hash_file(folder / ".metadata")}
    checkpoint.publish(dataclasses.replace(manifest, files=files))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / saved.name))


def test_what_dcp_writes_comes_through(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    check_pickle(data)
    assert load_pickle(data) == pickle.loads(data)
    assert list(CheckpointFolder(saved.parent).at(4).damages()) == []


def test_enumerations_as_python_3_11_0_wrote_them(saved: Path) -> None:
    import torch.distributed.checkpoint.metadata as dcp_metadata

    formats = dcp_metadata._MEM_FORMAT_ENCODING
    data = pickle.dumps(Payload(getattr, formats, "TORCH_CHANNELS_LAST"))
    assert load_pickle(data) is formats.TORCH_CHANNELS_LAST
    for call in (
        Payload(getattr, formats, "__class__"),
        Payload(getattr, torch.Size, "TORCH_X"),
        Payload(getattr, 7, 7),
    ):
        with pytest.raises(UnsafePickleError):
            load_pickle(pickle.dumps(call))


@pytest.mark.parametrize(
    "kind", ["call", "only a call", "builtin", "bytes", "class", "elsewhere", "elsewhere, by another class"]
)
def test_a_planted_payload_is_damage_and_is_not_run(kind: str, saved: Path, copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    plant(copy, kind, mark, saved)
    (found,) = CheckpointFolder(tmp_path).at(4).damages()
    assert found.file == ".metadata"
    assert found.reason
    with pytest.raises(UnsafePickleError):
        load_pickle((copy / ".metadata").read_bytes())
    assert not mark.exists()


def test_the_reason_names_what_it_would_run(saved: Path, copy: Path, tmp_path: Path) -> None:
    plant(copy, "call", tmp_path / "ran", saved)
    (found,) = CheckpointFolder(tmp_path).at(4).damages()
    assert "it would run posix.system" in found.reason


@pytest.mark.parametrize("kind", ["call", "only a call", "bytes", "elsewhere"])
def test_loading_refuses_it_too(kind: str, saved: Path, copy: Path, tmp_path: Path) -> None:
    """The reader that resume and export use, past the proof: what changed after it is refused as well."""
    import torch.distributed.checkpoint as dcp

    from windlass.trainer.checkpointing.tensor_files import TensorReader

    mark = tmp_path / "ran"
    plant(copy, kind, mark, saved)
    (tmp_path / "secret").write_bytes(b"")
    files = ProvenFiles.of_folder(CheckpointFolder(copy.parent).at(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(BaseException, match=r"description of tensors|files outside|do not load"):
            dcp.load({"model.a": torch.zeros(3, 2)}, storage_reader=TensorReader(files), no_dist=True)
    assert not mark.exists()


def test_the_reader_reads(saved: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from windlass.trainer.checkpointing.tensor_files import TensorReader

    state = {"model.a": torch.zeros(3, 2)}
    files = ProvenFiles.of_folder(CheckpointFolder(saved.parent).at(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, storage_reader=TensorReader(files), no_dist=True)
    assert torch.equal(state["model.a"], torch.arange(6.0).reshape(3, 2))


@given(data=st.data())
def test_damaged_bytes_are_refused_and_nothing_else_happens(data: st.DataObject, saved: Path) -> None:
    """Fuzz: the real file with bytes changed, cut or put in. Either it is refused or it still is DCP's metadata."""
    content = bytearray((saved / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                content[place] = data.draw(st.integers(0, 255))
            case 1:
                del content[place : place + data.draw(st.integers(1, 20))]
            case 2:
                content[place:place] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(UnsafePickleError):
        check_pickle(bytes(content))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(UnsafePickleError):
        check_pickle(data)
