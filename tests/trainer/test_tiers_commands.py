"""`windlass ckpt` on every tier of a run that was cut off, and `export` of what is only in one of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests.store.s3_server import FaultyS3
from tests.trainer.managed_service import ManagedStandIn, running_service
from tests.trainer.states import state_of
from tests.trainer.tier_runs import Cluster, tiered_run
from windlass.checkpoint import CheckpointFolder
from windlass.cli.main import run_command
from windlass.runfolder import RunFolder
from windlass.trainer.checkpointing.materialize import obtain

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def s3(s3_process: FaultyS3) -> Iterator[FaultyS3]:
    yield s3_process
    s3_process.reset()


@pytest.fixture(scope="module")
def service() -> Iterator[ManagedStandIn]:
    pytest.importorskip("amzn_sagemaker_checkpointing")
    with running_service() as state:
        yield state


@pytest.fixture(scope="module")
def cut_off(
    s3: FaultyS3, service: ManagedStandIn, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Killed before step 10: memory and service have 9, the disks 8, folder and store 4 and 8."""
    run = tiered_run(
        corpus,
        background=False,
        store="s3://bucket/runs",
        managed_every=3,
        managed_endpoint=service.endpoint,
    )
    cluster = Cluster(tmp_path_factory.mktemp("cut-off"), run, environment=s3.environment)
    job = cluster.start(faults="sleep:step=10,seconds=60")
    job.wait_for(lambda: 8 in {event["step"] for event in cluster.events("uploaded")})
    job.wait_for(lambda: 9 in {event["step"] for event in cluster.events("checkpoint") if event["tier"] == "managed"})
    for process in job.processes:
        process.kill()
    job.result()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.setenv("WINDLASS_RUNS", str(cluster.root / "runs"))
        patch.setenv("WINDLASS_NODE_DIR", str(cluster.node(0)))
        yield cluster


def ckpt(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    capsys.readouterr()
    try:
        code = run_command(["ckpt", *arguments, "--json"])
    except SystemExit as left:
        code = int(left.code or 0)
    return code, json.loads(capsys.readouterr().out)


def test_ls(cut_off: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = ckpt("ls", "run", capsys=capsys)
    assert code == 0
    assert [(row["tier"], row["step"], row["complete"]) for row in rows] == [
        ("memory", 9, True),
        ("local", 8, True),
        ("managed", 3, True),
        ("managed", 6, True),
        ("managed", 9, True),
        ("shared", 4, True),
        ("shared", 8, True),
        ("store", 4, True),
        ("store", 8, True),
    ]
    assert all(row["bytes"] > 0 and row["world_size"] == 2 for row in rows)
    assert ckpt("ls", "run", "--tier", "store", capsys=capsys)[1] == rows[-2:]


def test_verify(cut_off: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = ckpt("verify", "run", capsys=capsys)
    assert code == 0
    assert len(rows) == 9
    assert not [row for row in rows if row["damages"]]


@pytest.mark.parametrize("tier", ["memory", "managed", "shared", "store"])
def test_get_from(tier: str, cut_off: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ckpt("get", "run", "--tier", tier, "--to", str(tmp_path / "got"), capsys=capsys)
    assert code == 0, said
    checkpoint = CheckpointFolder(tmp_path / "got").at(said["step"])
    assert str(checkpoint.path) == said["path"]
    assert list(checkpoint.damages()) == []
    assert said["step"] == (9 if tier in ("memory", "managed") else 8)


def test_pieces_put_together_are_the_checkpoint(cut_off: Cluster, tmp_path: Path) -> None:
    """The same step from the ranks' pieces and from the run folder: tensor by tensor the same."""
    folder = RunFolder(cut_off.folder.path)
    step = 8
    with pytest.MonkeyPatch.context() as patch:
        both = tmp_path / "node"  # a node that holds the pieces of both
        for number in (0, 1):
            shutil.copytree(cut_off.node(number), both, dirs_exist_ok=True)
        patch.setenv("WINDLASS_NODE_DIR", str(both))
        ours = state_of(obtain(folder, step, tier="local", to=tmp_path / "got").path)
    theirs = state_of(CheckpointFolder(folder.checkpoints).at(step).path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_pieces_of_a_save_in_the_background(corpus: Path, tmp_path: Path) -> None:
    """Written from the host copies of the state, which must still know what they are parts of."""
    run = tiered_run(corpus, memory_every=None, local_every=4, local_path=str(tmp_path / "disk"))
    cluster = Cluster(tmp_path, run)
    job = cluster.start(faults="sleep:step=6,seconds=60")
    job.wait_for(lambda: any(event["tier"] == "shared" for event in cluster.events("checkpoint")))
    for process in job.processes:
        process.kill()
    job.result()
    ours = state_of(obtain(cluster.folder, 4, tier="local", to=tmp_path / "got").path)
    theirs = state_of(CheckpointFolder(cluster.folder.checkpoints).at(4).path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_node_lacks_pieces(cut_off: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = ckpt("get", "run", "--tier", "local", "--to", str(tmp_path), capsys=capsys)
    assert code == 2
    assert "rank-0001.safetensors on this node: it is missing" in said["evidence"]


def test_a_tier_that_the_run_has_not(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(tmp_path, tiered_run(corpus, memory_every=None), ranks=1, nodes=1)
    assert cluster.train(overrides=["train.steps=2"]).codes == [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDLASS_RUNS", str(tmp_path / "runs"))
        code, said = ckpt("ls", "run", "--tier", "memory", capsys=capsys)
    assert code == 2
    assert said["error"] == "the run run has no memory tier"


def test_prune_and_what_is_only_in_the_store(
    cut_off: Cluster, s3: FaultyS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last, for it deletes: the run folder keeps step 8 alone, and step 4 comes back from the store."""
    code, said = ckpt("prune", "run", "--tier", "shared", "--keep", "1", "--dry-run", capsys=capsys)
    assert (code, [row["step"] for row in said["expired"]], said["deleted"]) == (0, [4], [])
    code, said = ckpt("prune", "run", "--tier", "shared", "--keep", "1", capsys=capsys)
    assert (code, said["code"]) == (2, "needs-confirmation")
    code, said = ckpt("prune", "run", "--tier", "shared", "--keep", "1", "--yes", capsys=capsys)
    assert [row["step"] for row in said["deleted"]] == [4]
    folder = CheckpointFolder(cut_off.folder.checkpoints)
    assert [checkpoint.step for checkpoint in folder.all()] == [8]
    code, said = ckpt("get", "run", "--step", "4", capsys=capsys)
    assert (code, said["step"]) == (0, 4)
    assert [checkpoint.step for checkpoint in folder.complete()] == [4, 8]
    ckpt("prune", "run", "--tier", "store", "--keep", "1", "--yes", capsys=capsys)
    assert [row["step"] for row in ckpt("ls", "run", "--tier", "store", capsys=capsys)[1]] == [8]
    text = click.testing.CliRunner().invoke(_cli(), ["ckpt", "ls", "run"]).output
    assert re.search(r"^store +8 +[0-9.]+ MiB +complete", text, re.MULTILINE)
    assert text.startswith("TIER")


def _cli() -> Any:
    from windlass.cli.main import cli

    return cli


def test_export_of_a_run_whose_folder_lost_its_checkpoints(
    cut_off: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the test before there is one in the store; export reads it there."""
    shutil.rmtree(cut_off.folder.checkpoints)
    code, said = ckpt("export", "run", "--step", "8", "--to", str(tmp_path / "out"), capsys=capsys)
    assert code == 0, said
    assert said["step"] == 8
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert CheckpointFolder(cut_off.folder.checkpoints).all() == []
