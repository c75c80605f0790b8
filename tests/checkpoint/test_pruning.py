"""What `prune` may delete, whose folders memory tiers use, and what a command that reads sees while a run saves."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.checkpoint.test_checkpoint import publish
from windlass.checkpoint import CheckpointFolder, hash_file
from windlass.checkpoint.browsing import views
from windlass.checkpoint.ownership import alone, write_id
from windlass.checkpoint.pieces import make_private, tier_path
from windlass.checkpoint.pruning import best_of, clear_leftovers, expired_rows
from windlass.checkpoint.stored import StoredCheckpoints
from windlass.cli.models.ckpt import ckpt
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.spec.checkpoint import CheckpointSection
from windlass.store import open_store


def folder_of(root: Path, **checkpoint: Any) -> RunFolder:
    folder = RunFolder(root / "runs/run")
    run = {"name": "run", "model": {"preset": "llama-tiny"}, "data": {}, "checkpoint": checkpoint}
    folder.create(parse_run(run))
    return folder


def store_of(root: Path, *steps: int) -> StoredCheckpoints:
    stored = StoredCheckpoints.of_run(open_store(str(root / "store")), "run", "abc")
    for step in steps:
        checkpoint = publish(root / "elsewhere", step)
        for name, record in checkpoint.manifest().files.items():
            stored.put(checkpoint, name, record)
        stored.publish(checkpoint.manifest())
    return stored


def test_nothing_empties_all_tiers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, store=str(tmp_path / "store"))
    write_id(folder, "abc")
    for step in (4, 8):
        publish(folder.checkpoints, step)
    store_of(tmp_path, 4, 8)
    with pytest.raises(UserError, match="every checkpoint of the run"):
        expired_rows(folder, None, keep=0, keep_every=None)
    gone = expired_rows(folder, "shared", keep=0, keep_every=None)
    assert [row.step for _, row in gone] == [4, 8], "one tier by its name, while another has what is newest"


@pytest.mark.parametrize("in_store", [(), (4,)])
def test_the_newest_step_of_a_run_is_never_let_go(in_store: tuple[int, ...], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **({"store": str(tmp_path / "store")} if in_store else {}))
    write_id(folder, "abc")
    for step in (4, 8):
        publish(folder.checkpoints, step)
    store_of(tmp_path, *in_store)
    with pytest.raises(UserError, match="step 8, the newest of the run"):
        expired_rows(folder, "shared", keep=0, keep_every=None)
    assert [row.step for _, row in expired_rows(folder, "shared", keep=1, keep_every=None)] == [4]


def test_the_command_refuses_and_deletes_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, store=str(tmp_path / "store"))
    write_id(folder, "abc")
    publish(folder.checkpoints, 8)
    stored = store_of(tmp_path, 8)
    done = CliRunner().invoke(ckpt, ["prune", str(folder.path), "--keep", "0", "--yes"])
    assert isinstance(done.exception, UserError)
    assert [checkpoint.step for checkpoint in CheckpointFolder(folder.checkpoints).complete()] == [8]
    assert [checkpoint.step for checkpoint in stored.complete()] == [8]


HOLDER = """
import sys, time
from pathlib import Path
from windlass.checkpoint.ownership import hold
assert hold(Path(sys.argv[1])) is not None
print("held", flush=True)
time.sleep(600)
"""


def test_a_save_under_way_is_not_a_leftover(tmp_path: Path) -> None:
    """However long the run has been silent: its trainer lives, so what it writes is not what a killed save left."""
    folder = folder_of(tmp_path)
    publish(folder.checkpoints, 4)
    under_way = CheckpointFolder(folder.checkpoints).at(8)
    under_way.path.mkdir()
    (under_way.path / "__0_0.distcp").write_bytes(b"half")
    long_ago = time.time() - 7200
    for path in (under_way.path / "__0_0.distcp", under_way.path):
        os.utime(path, (long_ago, long_ago))
    folder.history.write_text(json.dumps({"time": long_ago, "event": "started"}) + "\n")
    command = [sys.executable, "-c", HOLDER, str(folder.checkpoints)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "held\n"
        with alone(folder) as nobody_trains:
            assert not nobody_trains
        assert clear_leftovers(folder, None) == 0
        assert under_way.path.exists()
        trainer.kill()
    assert clear_leftovers(folder, None) == 1
    assert not under_way.path.exists()


def test_what_is_still_being_written_elsewhere_is_not_a_leftover(tmp_path: Path) -> None:
    """On another machine whose locks do not reach here: its lines are old, its files are not."""
    folder = folder_of(tmp_path)
    under_way = CheckpointFolder(folder.checkpoints).at(8)
    under_way.path.mkdir(parents=True)
    (under_way.path / "__0_0.distcp").write_bytes(b"half")
    folder.history.write_text(json.dumps({"time": time.time() - 7200, "event": "started"}) + "\n")
    assert clear_leftovers(folder, None) == 0
    folder.history.write_text(json.dumps({"time": time.time() - 7200, "event": "finished"}) + "\n")
    assert clear_leftovers(folder, None) == 1


def test_the_best_is_known_from_manifests_too(tmp_path: Path) -> None:
    """A machine that has no metrics of the run: the newest manifest says which step was the best."""
    folder = folder_of(tmp_path, keep_best=True, keep=1)
    for step in (2, 4, 8):
        publish(folder.checkpoints, step)
    newest = CheckpointFolder(folder.checkpoints).at(8)
    known = {"best_step": 2, "best_loss": 1.5, "without_best": 2, "last_step": 8}
    newest.publish(dataclasses.replace(newest.manifest(), validation=known))
    (view,) = views(folder)
    assert best_of(folder, {row.step: row for row in view.rows()}) == 2
    assert [row.step for _, row in expired_rows(folder, None, keep=None, keep_every=None)] == [4]


def test_verify_tells_removed_from_damaged(tmp_path: Path) -> None:
    """Retention lets a step go while it is read: that is no damage."""
    folder = folder_of(tmp_path)
    checkpoint = CheckpointFolder(folder.checkpoints).at(4)
    publish(folder.checkpoints, 4)
    large = checkpoint.path / "__0_0.distcp"
    with large.open("wb") as file:
        file.truncate(200 * 2**20)  # takes a moment to hash
    manifest = checkpoint.manifest()
    checkpoint.publish(dataclasses.replace(manifest, files={**manifest.files, large.name: hash_file(large)}))

    def let_go() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not _is_open(large):
            time.sleep(0.001)
        checkpoint.delete()

    retention = threading.Thread(target=let_go)
    retention.start()
    done = CliRunner().invoke(ckpt, ["verify", str(folder.path)])
    retention.join()
    assert done.exit_code == 0, done.output
    assert "removed meanwhile" in done.output
    assert "DAMAGED" not in done.output


def _is_open(path: Path) -> bool:
    for handle in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(handle) == str(path):
                return True
        except OSError:
            continue
    return False


def test_the_memory_tier_is_each_users_own(tmp_path: Path) -> None:
    spec = CheckpointSection(memory_every=1)
    assert tier_path(spec, "memory") == Path(f"/dev/shm/windlass-{os.getuid()}")
    root, place = tmp_path / "memory", tmp_path / "memory/run-1-abc"
    make_private(root, place, tier="memory")
    assert [oct(one.stat().st_mode & 0o777) for one in (root, place)] == ["0o700", "0o700"]
    place.chmod(0o755)  # as an older windlass made it
    make_private(root, place, tier="memory")
    assert oct(place.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("harm", ["writable", "link", "owner", "owner of the run's"])
def test_a_folder_that_others_can_change_is_refused(harm: str, tmp_path: Path) -> None:
    root, place = tmp_path / "memory", tmp_path / "memory/run-1-abc"
    root.mkdir(mode=0o700)
    if harm == "writable":
        root.chmod(0o777)
    elif harm == "link":
        (tmp_path / "theirs").mkdir()
        place.symlink_to(tmp_path / "theirs")
    elif os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    elif harm == "owner":
        os.chown(root, 12345, -1)
    else:
        place.mkdir()
        os.chown(place, 12345, -1)
    with pytest.raises(UserError, match="cannot hold the memory tier") as caught:
        make_private(root, place, tier="memory")
    assert caught.value.fix == "checkpoint.memory_path=/a/folder/of/your/own"


def test_a_shared_place_with_the_sticky_bit_will_do(tmp_path: Path) -> None:
    root = tmp_path / "shm"
    root.mkdir()
    root.chmod(0o1777)
    make_private(root, root / "run-1-abc", tier="memory")
    assert oct(root.stat().st_mode & 0o7777) == "0o1777", "it is not ours to change"
