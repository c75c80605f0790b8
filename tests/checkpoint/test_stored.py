"""Checkpoints in a store: complete by their manifest, proven on their way back, let go and tidied."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint.test_checkpoint import publish
from windlass.checkpoint import CheckpointFolder
from windlass.checkpoint.identity import begin_anew, known_to, read_id, write_id
from windlass.checkpoint.stored import StoredCheckpoints, current_id, fetch_whole, write_current_id
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def stored(store: Store) -> StoredCheckpoints:
    return StoredCheckpoints.of_run(store, "run", "abc")


def send(stored: StoredCheckpoints, folder: Path, step: int, *, whole: bool = True) -> None:
    checkpoint = publish(folder, step)
    for name, record in checkpoint.manifest().files.items():
        stored.put(checkpoint, name, record)
    if whole:
        stored.publish(checkpoint)


def test_only_what_has_a_manifest_counts(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    send(stored, tmp_path / "here", 8, whole=False)
    assert [(one.step, one.complete) for one in stored.all()] == [(4, True), (8, False)]
    assert [one.step for one in stored.complete()] == [4]
    assert stored.manifest(4) == CheckpointFolder(tmp_path / "here").at(4).manifest()
    with pytest.raises(FileNotFoundError):
        stored.manifest(8)


def test_there_and_back(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    back = fetch_whole(stored, 4, CheckpointFolder(tmp_path / "back"))
    assert list(back.damages()) == []
    assert back.manifest() == stored.manifest(4)


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_damage_in_the_store_is_found_on_the_way_back(harm: str, stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    if harm == "changed":
        stored.store.write("step-00000004/__1_0.distcp", b"\x02" * 1000)
    else:
        stored.store.delete(["step-00000004/__1_0.distcp"])
    with pytest.raises(UserError) as caught:
        fetch_whole(stored, 4, CheckpointFolder(tmp_path / "back"))
    assert "__1_0.distcp" in (caught.value.evidence or "")
    assert CheckpointFolder(tmp_path / "back").all() == []


def test_retention(stored: StoredCheckpoints, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        send(stored, tmp_path / "here", step)
    gone = stored.expired(10, keep=2, keep_every=4, protected={6})
    assert [one.step for one in gone] == [2]
    for one in gone:
        stored.delete(one)
    assert [one.step for one in stored.complete()] == [4, 6, 8, 10]


def test_leftovers_go_after_a_day(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    send(stored, tmp_path / "here", 8, whole=False)
    assert stored.clear_leftovers() == (0, 0)
    assert stored.clear_leftovers(now=time.time() + 90_000) == (1, 0)
    assert [one.step for one in stored.all()] == [4]


def test_which_run_a_name_stands_for(store: Store) -> None:
    assert current_id(store, "run") is None
    write_current_id(store, "run", "abc")
    assert current_id(store, "run") == "abc"
    store.write("run/current", b"{}")
    with pytest.raises(UserError, match="cannot be understood"):
        current_id(store, "run")


def test_ids_of_run_folders(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert read_id(folder) is None
    first = begin_anew(folder)
    assert read_id(folder) == first
    assert not known_to(folder, "s3://bucket")
    write_id(folder, first, known_to="s3://bucket")
    assert read_id(folder) == first
    assert known_to(folder, "s3://bucket")
    assert not known_to(folder, "s3://other")
    assert begin_anew(folder) != first
    assert not known_to(folder, "s3://bucket")
