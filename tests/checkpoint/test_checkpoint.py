"""Checkpoints on disk: what counts as one, what is damaged, what may go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint import Checkpoint, CheckpointFolder, FileRecord, Manifest, damage, hash_file
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.errors import UserError


def publish(folder: Path, step: int) -> Checkpoint:
    checkpoint = CheckpointFolder(folder).at(step)
    checkpoint.path.mkdir(parents=True)
    for rank in (0, 1):
        (checkpoint.path / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 1000)
    files = {path.name: hash_file(path) for path in checkpoint.path.iterdir()}
    checkpoint.publish(
        Manifest(
            step=step,
            tokens=step * 64,
            files=files,
            model={"fingerprint": "f", "config": {"rope": {"factor": 8.0}}},
            order={"seed": 0},
            data_state={"lanes": {"0": [1, 2, 3]}},
            world_size=2,
            created=1.5,
            versions={"torch": "2"},
        )
    )
    return checkpoint


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    checkpoint = publish(tmp_path, 3)
    manifest = checkpoint.manifest()
    assert checkpoint.manifest() == manifest
    assert (manifest.step, manifest.tokens, manifest.world_size, manifest.size) == (3, 192, 2, 2000)
    assert manifest.data_state == {"lanes": {"0": [1, 2, 3]}}
    assert list(checkpoint.damages()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"tokens": 192', '"tokens": 193'),
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: json.dumps({**json.loads(text), "checksum": "0" * 64}),
        lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != "files"}),
    ],
)
def test_a_changed_manifest_is_damage(change: Callable[[str], str], tmp_path: Path) -> None:
    checkpoint = publish(tmp_path, 3)
    path = checkpoint.path / MANIFEST_NAME
    path.write_text(change(path.read_text()))
    (found,) = checkpoint.damages()
    assert found.file == MANIFEST_NAME
    assert found.reason


def test_damages_in_words(tmp_path: Path) -> None:
    checkpoint = publish(tmp_path, 3)
    (checkpoint.path / "__0_0.distcp").write_bytes(b"short")
    (checkpoint.path / "__1_0.distcp").write_bytes(bytes([2]) * 1000)
    assert {damaged.file: damaged.reason for damaged in checkpoint.damages()} == {
        "__0_0.distcp": "it has 5 bytes, 1,000 were written",
        "__1_0.distcp": "its contents changed: the SHA-256 does not match the manifest",
    }
    assert [damaged.file for damaged in checkpoint.damages(contents=False)] == ["__0_0.distcp"]
    (checkpoint.path / "__0_0.distcp").unlink()
    assert next(checkpoint.damages()).reason == "it is missing"
    (checkpoint.path / "__0_0.distcp").mkdir()
    size = (checkpoint.path / "__0_0.distcp").stat().st_size
    assert "it cannot be read" in (damage(checkpoint.path / "__0_0.distcp", FileRecord(size, "")) or "")


def test_readers_share_the_work(tmp_path: Path) -> None:
    checkpoint = publish(tmp_path, 3)
    for path in checkpoint.path.glob("*.distcp"):
        path.unlink()
    parts = [[damaged.file for damaged in checkpoint.damages(share=(index, 3))] for index in range(3)]
    assert sorted(itertools.chain(*parts)) == ["__0_0.distcp", "__1_0.distcp"]
    assert max(map(len, parts)) == 1


def test_only_what_has_a_manifest_counts(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (5, 100_000_000, 20):
        publish(tmp_path, step)
    folder.at(7).path.mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000009").touch()
    assert [checkpoint.step for checkpoint in folder.all()] == [5, 7, 20, 100_000_000]
    assert [checkpoint.step for checkpoint in folder.complete()] == [5, 20, 100_000_000]
    assert [checkpoint.step for checkpoint in folder.unfinished()] == [7]
    assert folder.choose(None).step == 100_000_000
    assert folder.choose(20).step == 20
    with pytest.raises(UserError, match="no complete checkpoint of step 7"):
        folder.choose(7)
    assert CheckpointFolder(tmp_path / "none").all() == []


def test_deleting(tmp_path: Path) -> None:
    checkpoint = publish(tmp_path, 5)
    checkpoint.delete()
    checkpoint.delete()
    assert CheckpointFolder(tmp_path).all() == []


@given(
    steps=st.sets(st.integers(1, 300), min_size=1, max_size=12),
    saved=st.integers(1, 300),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
)
def test_retention(
    steps: set[int], saved: int, keep: int, keep_every: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("retention")
    folder = CheckpointFolder(root)
    for step in steps | {saved}:
        folder.at(step).path.mkdir()
        (folder.at(step).path / MANIFEST_NAME).touch()
    there = sorted(steps | {saved})
    gone = {checkpoint.step for checkpoint in folder.expired(saved, keep=keep, keep_every=keep_every)}
    so_far = [step for step in there if step <= saved]
    assert not gone & set(so_far[-keep:]), "the newest are kept"
    assert not {step for step in gone if keep_every and step % keep_every == 0}, "permanent ones are kept"
    assert all(step < saved for step in gone), "what was just saved and what came later is left alone"
    assert all(step in gone or step in so_far[-keep:] or (keep_every and step % keep_every == 0) for step in so_far)
