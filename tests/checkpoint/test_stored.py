"""Checkpoints in a store: complete by their manifest, proven on their way back, let go and tidied."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint.test_checkpoint import publish
from tests.store.s3_server import Fault, FaultyS3
from tests.store.test_store import QUICK
from windlass.checkpoint import CheckpointFolder
from windlass.checkpoint.ownership import begin_anew, known_to, read_id, write_id
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
        stored.publish(checkpoint.manifest())


def test_only_what_has_a_manifest_counts(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    send(stored, tmp_path / "here", 8, whole=False)
    assert [(checkpoint.step, checkpoint.complete) for checkpoint in stored.all()] == [(4, True), (8, False)]
    assert [checkpoint.step for checkpoint in stored.complete()] == [4]
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
    assert [checkpoint.step for checkpoint in stored.complete()] == [4, 6, 8, 10]


def test_leftovers_go_after_a_day(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    send(stored, tmp_path / "here", 8, whole=False)
    assert stored.clear_leftovers() == (0, 0)
    assert stored.clear_leftovers(now=time.time() + 90_000) == (1, 0)
    assert [checkpoint.step for checkpoint in stored.all()] == [4]


def test_which_run_a_name_stands_for(store: Store) -> None:
    assert current_id(store, "run") is None
    write_current_id(store, "run", "abc")
    assert current_id(store, "run") == "abc"
    for text in (b"{}", b"[]", b"7", b"", b'{"id": "../../home"}', b'{"id": 7}', b'{"id": ""}'):
        store.write("run/current", text)
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


def test_a_damaged_copy_does_not_cost_the_one_that_is_here(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    here = CheckpointFolder(tmp_path / "here")
    victim = here.at(4).path / "__0_0.distcp"
    victim.write_bytes(b"\x07" * 1000)  # something differs, so that the store's copy is wanted
    stored.store.write("step-00000004/__0_0.distcp", b"\x02" * 1000)
    before = {path.name: path.read_bytes() for path in here.at(4).path.iterdir()}
    with pytest.raises(UserError, match="is damaged"):
        fetch_whole(stored, 4, here)
    assert {path.name: path.read_bytes() for path in here.at(4).path.iterdir()} == before
    assert [one.name for one in here.path.iterdir()] == ["step-00000004"], "nothing else is left"


def test_a_fetch_that_was_cut_off_goes_on_where_it_was(stored: StoredCheckpoints, tmp_path: Path) -> None:
    """What came whole is not asked for again, what is torn is, and the manifest that is here stays until the end."""
    send(stored, tmp_path / "here", 4)
    back = CheckpointFolder(tmp_path / "back")
    incoming = back.incoming(4)
    incoming.prepare(stored.manifest(4))
    assert stored.fetch(4, "__0_0.distcp", stored.manifest(4).files["__0_0.distcp"], incoming.path) is None
    (incoming.path / "__1_0.distcp").write_bytes(b"torn")
    (incoming.path / ".part-__1_0.distcp-77").write_bytes(b"of a process that was killed")
    stored.store.delete(["step-00000004/__0_0.distcp"])  # it is here: nobody needs to ask for it
    assert back.all() == []
    whole = fetch_whole(stored, 4, back)
    assert list(whole.damages()) == []
    assert [path.name for path in back.path.iterdir()] == ["step-00000004"]


def test_a_whole_one_is_left_alone(stored: StoredCheckpoints, tmp_path: Path) -> None:
    send(stored, tmp_path / "here", 4)
    here = CheckpointFolder(tmp_path / "here")
    before = here.at(4).path.stat().st_ino
    stored.store.delete([f"step-00000004/__{rank}_0.distcp" for rank in (0, 1)])
    assert fetch_whole(stored, 4, here).path.stat().st_ino == before


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_replacement_that_was_cut_off_is_finished(moment: str, tmp_path: Path) -> None:
    """Killed between the two renames: the new one is complete and takes its place."""
    folder = CheckpointFolder(tmp_path / "here")
    old = publish(tmp_path / "here", 4)
    new = publish(tmp_path / "there", 4)
    new.path.rename(folder.incoming(4).path)
    if moment == "between":
        old.path.rename(folder.path / ".former-step-00000004")
    folder.recover()
    assert [checkpoint.step for checkpoint in folder.complete()] == [4]
    assert list(folder.at(4).damages()) == []
    if moment == "between":
        assert not folder.incoming(4).path.exists()


def test_a_step_goes_also_where_uploads_may_not_be_listed(s3: FaultyS3) -> None:
    """Many policies allow objects alone; what is left of uploads takes room, but nothing counts it."""
    store = open_store("s3://bucket", QUICK)
    store.write("run/id/step-00000001/manifest.json", b"{}")
    s3.inject(denied := Fault("403", method="GET", path=r"[?&]uploads", times=10**9))
    StoredCheckpoints.of_run(store, "run", "id").remove(1)
    assert denied.met
    assert s3.keys("bucket") == []
