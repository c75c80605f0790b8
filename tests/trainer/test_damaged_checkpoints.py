"""A checkpoint that changed on disk is named, and the one before it is used."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, train
from windlass.checkpoint import CheckpointFolder, hash_file

pytestmark = pytest.mark.train


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def plant_code(path: Path) -> None:
    """DCP's description of the tensors replaced by a call, and the manifest made to agree."""
    folder = path.parent
    path.write_bytes(pickle.dumps(Payload(f"touch {folder.parents[3] / 'ran'}")))
    checkpoint = CheckpointFolder(folder.parent).at(int(folder.name.removeprefix("step-")))
    manifest = checkpoint.manifest()
    checkpoint.publish(dataclasses.replace(manifest, files={**manifest.files, path.name: hash_file(path)}))


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def run(corpus: Path) -> dict[str, Any]:
    return tiny_run(corpus, train__steps=9, checkpoint__every=3, checkpoint__background=False)


@pytest.fixture(scope="module")
def killed(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died in step 8, with whole checkpoints of steps 3 and 6; tests work on copies."""
    root = tmp_path_factory.mktemp("killed")
    train(root, run, ranks=2, faults="kill:rank=1,step=8")
    assert [checkpoint.step for checkpoint in CheckpointFolder(root / "runs/run/checkpoints").complete()] == [3, 6]
    return root


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "copy"))


DAMAGES = [
    ("__0_0.distcp", truncate),
    ("__1_0.distcp", flip_a_bit),
    ("__1_0.distcp", remove),
    (".metadata", plant_code),
    ("manifest.json", truncate),
    ("manifest.json", flip_a_bit),
    (".metadata", truncate),
    (".metadata", flip_a_bit),
    ("manifest.json", empty),
]


@pytest.mark.parametrize(("file", "damage"), campaign(DAMAGES, always=6), ids=lambda one: getattr(one, "__name__", one))
def test_the_one_before_is_used(
    file: str,
    damage: Callable[[Path], None],
    copy: Path,
    run: dict[str, Any],
    undisturbed: Callable[..., Result],
) -> None:
    damage(copy / "runs/run/checkpoints/step-00000006" / file)
    resumed = train(copy, run, ranks=2, attempt=2)
    assert resumed.codes == [0, 0], resumed.output
    (event,) = resumed.events("checkpoint-damaged")
    assert (event["checkpoint"], event["file"]) == ("step-00000006", file)
    assert event["reason"]
    assert f"step-00000006 is damaged and passed over: {file}: " in resumed.output
    assert not (copy / "ran").exists()
    assert resumed.events("resumed")[0]["step"] == 3
    assert resumed.losses == undisturbed(run).losses
    whole = CheckpointFolder(resumed.folder.checkpoints)
    assert [checkpoint.step for checkpoint in whole.all()] == [3, 6, 9]
    assert not [damage for checkpoint in whole.all() for damage in checkpoint.damages()], "step 6 was written anew"


def test_all_damaged(copy: Path, run: dict[str, Any]) -> None:
    checkpoints = CheckpointFolder(copy / "runs/run/checkpoints")
    flip_a_bit(checkpoints.at(3).path / "__0_0.distcp")
    truncate(checkpoints.at(6).path / "manifest.json")
    before = {path: path.read_bytes() for path in checkpoints.path.rglob("*") if path.is_file()}
    failed = train(copy, run, ranks=2, attempt=2)
    assert failed.codes == [2, 2]
    assert failed.output.count("error: none of the 2 checkpoints of this run is whole") == 1
    assert "steps 3, 6" in failed.output
    assert {path: path.read_bytes() for path in checkpoints.path.rglob("*") if path.is_file()} == before
    assert {(e["checkpoint"], e["file"]) for e in failed.events("checkpoint-damaged")} == {
        ("step-00000003", "__0_0.distcp"),
        ("step-00000006", "manifest.json"),
    }


def test_all_gone(copy: Path, run: dict[str, Any]) -> None:
    """The history tells of saves, and there is none: nothing is trained again from step 0 unless somebody says so."""
    before = (copy / "runs/run/metrics.jsonl").read_bytes()
    shutil.rmtree(copy / "runs/run/checkpoints")
    refused = train(copy, run, ranks=2, attempt=2)
    assert refused.codes == [2, 2], refused.output
    assert refused.output.count("error: the checkpoints of run are gone") == 1
    assert "saves up to step 6" in refused.output
    assert "begin again with --fresh" in refused.output
    assert (copy / "runs/run/metrics.jsonl").read_bytes() == before


def test_retention_never_counts_a_damaged_one(copy: Path, run: dict[str, Any]) -> None:
    """With keep=1, a damaged step 6 must not make the new, whole steps 4 and 5 expire."""
    flip_a_bit(copy / "runs/run/checkpoints/step-00000006/__0_0.distcp")
    options = {"ranks": 2, "overrides": ["checkpoint.keep=1", "checkpoint.every=1"]}
    train(copy, run, attempt=2, faults=";;kill:rank=0,step=6", **options)
    checkpoints = CheckpointFolder(copy / "runs/run/checkpoints")
    assert [checkpoint.step for checkpoint in checkpoints.complete() if not list(checkpoint.damages())] == [5]
    again = train(copy, run, attempt=3, **options)
    assert again.codes == [0, 0], again.output
    assert [event["step"] for event in again.events("resumed")] == [3, 5]
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [9]


def test_what_a_killed_save_or_deletion_left_is_cleared_away(copy: Path, run: dict[str, Any]) -> None:
    """Without a manifest it is not a checkpoint, but it takes room."""
    checkpoints = CheckpointFolder(copy / "runs/run/checkpoints")
    (checkpoints.at(3).path / "manifest.json").unlink()
    shutil.copytree(checkpoints.at(3).path, checkpoints.at(7).path)
    resumed = train(copy, run, ranks=2, attempt=2)
    assert resumed.codes == [0, 0], resumed.output
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [6, 9]
