"""The store as a tier: uploads beside training, and resumes from it, against an S3 that fails."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.store.s3_server import Fault, FaultyS3
from tests.trainer.harness import Result
from tests.trainer.test_tiers import assert_same_curve, resumed_from
from tests.trainer.tier_runs import Cluster, tiered_run
from windlass.checkpoint import CheckpointFolder
from windlass.checkpoint.stored import StoredCheckpoints, current_id
from windlass.store import StoreOptions, open_store

pytestmark = pytest.mark.train

Undisturbed = Callable[..., Result]


def stored_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    changes = {"memory_every": None, "local_every": None, "local_path": None, "store": "s3://bucket/runs", **changes}
    return tiered_run(corpus, **changes)


def cluster_with(s3: FaultyS3, root: Path, run: dict[str, Any], **options: Any) -> Cluster:
    return Cluster(root, run, environment=s3.environment, **options)


def in_store(s3: FaultyS3) -> StoredCheckpoints:
    """The run's checkpoints, past the proxy."""
    store = open_store("s3://bucket/runs", StoreOptions(endpoint=s3.server))
    run_id = current_id(store, "run")
    assert run_id is not None
    return StoredCheckpoints.of_run(store, "run", run_id)


def assert_whole(s3: FaultyS3, steps: list[int], tmp_path: Path) -> None:
    """The store has just these steps, each whole to the byte, and no half uploads."""
    stored = in_store(s3)
    assert [(checkpoint.step, checkpoint.complete) for checkpoint in stored.all()] == [(step, True) for step in steps]
    for step in steps:
        folder = tmp_path / "proof" / str(step)
        folder.mkdir(parents=True)
        for name, record in stored.manifest(step).files.items():
            assert stored.fetch(step, name, record, folder) is None
    shutil.rmtree(tmp_path / "proof", ignore_errors=True)


def test_every_checkpoint_goes_there_and_retention_too(s3: FaultyS3, corpus: Path, tmp_path: Path) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, every=2, keep=3, store_keep=2))
    result = cluster.train()
    assert result.codes == [0, 0], result.output
    assert [checkpoint.step for checkpoint in CheckpointFolder(cluster.folder.checkpoints).all()] == [8, 10, 12]
    assert_whole(s3, [10, 12], tmp_path)
    assert {event["step"] for event in cluster.events("uploaded")} >= {10, 12}
    assert cluster.events("upload-failed") == []


def test_a_new_machine_goes_on_from_the_store(
    s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run = stored_run(corpus, background=False)
    cluster = cluster_with(s3, tmp_path / "old", run)
    job = cluster.start(faults="sleep:step=9,seconds=60")
    job.wait_for(lambda: 8 in {event["step"] for event in cluster.events("uploaded")})
    for rank in (0, 1):
        job.signal(rank, signal.SIGKILL)
    job.result()
    other = cluster_with(s3, tmp_path / "new", run)
    s3.inject(Fault("truncated", method="GET", times=2), Fault("SlowDown", times=3), Fault("dropped", times=2))
    resumed = other.resume(most=1)
    assert resumed_from(other) == (8, "store")
    whole = undisturbed({**run, "checkpoint": {"every": 100}}, 2)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 8}
    assert_whole(s3, [4, 8, 12], tmp_path)


def test_a_damaged_checkpoint_comes_back_from_the_store(
    s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus))
    first = cluster.train(overrides=["train.steps=8"])
    assert first.codes == [0, 0], first.output
    victim = next(CheckpointFolder(cluster.folder.checkpoints).at(8).path.glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-5])
    cluster.resume(most=1)
    assert resumed_from(cluster) == (8, "store")
    assert [event["tier"] for event in cluster.events("checkpoint-damaged")] == ["shared"]


def test_an_outage_never_stops_training(s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Uploads fail, steps go on; the run ends with an error that says what is only here; started again, it uploads."""
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, upload_seconds=1))
    job = cluster.start(faults="sleep:step=2,seconds=60,rank=0")
    job.wait_for(lambda: job.step() >= 1)
    s3.inject(outage := Fault("503", method="PUT", times=10**9))
    for process in job.processes:
        process.kill()
    job.result()
    result = cluster.train(attempt=2)
    assert outage.met > 0
    assert result.codes == [1, 1], result.output
    assert max(result.losses) == 12
    assert cluster.events("upload-failed")
    assert "does not answer properly" in cluster.events("upload-failed")[0]["error"]
    assert 12 in cluster.events("only-local")[0]["steps"]
    assert "the run is trained to its end, but step 12 is not in s3://bucket/runs" in result.output
    assert cluster.events("finished") == []
    s3.clear()
    again = cluster.resume(most=1)
    assert again.codes == [0, 0]
    assert_whole(s3, [4, 8, 12], tmp_path)
    assert_same_curve(cluster, again, undisturbed)


UPLOADING = ("upload.begin", "upload.file", "upload.manifest", "upload.published")
# Amid files and before the manifest that makes them count; then every stage, on both ranks.
CHOSEN = [("upload.file", 1), ("upload.manifest", 0)]
STAGES = list(dict.fromkeys([*CHOSEN, *((point, rank) for point in UPLOADING for rank in (0, 1))]))


@pytest.mark.parametrize(("point", "rank"), campaign(STAGES, always=len(CHOSEN)))
def test_kill_in_an_upload(
    point: str, rank: int, s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus))
    killed = cluster.train(faults=f"kill:rank={rank},step=4,point={point}")
    assert killed.codes[rank] == -signal.SIGKILL, killed.output
    resumed = cluster.resume(most=1)
    assert_whole(s3, [4, 8, 12], tmp_path)
    assert_same_curve(cluster, resumed, undisturbed)


def test_sigterm_uploads_within_the_grace(s3: FaultyS3, corpus: Path, tmp_path: Path) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, every=100))
    result = cluster.train(faults="term:step=6,rank=1")
    assert result.codes == [75, 75], result.output
    assert_whole(s3, [5], tmp_path)


def test_sigterm_says_what_did_not_fit(s3: FaultyS3, corpus: Path, tmp_path: Path) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, every=100, grace_seconds=6, upload_seconds=300))
    s3.inject(Fault("503", method="PUT", path="step-", times=10**9))
    result = cluster.train(faults="term:step=6,rank=1")
    assert result.codes == [75, 75], result.output
    assert cluster.events("only-local")[0]["steps"] == [5]
    assert cluster.events("preempted")[0]["only_local"] == [5]
    s3.clear()
    cluster.resume(most=1)
    assert_whole(s3, [5, 12], tmp_path)


def test_a_store_that_refuses_is_said_before_the_first_step(s3: FaultyS3, corpus: Path, tmp_path: Path) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, store="s3://nowhere/x"))
    result = cluster.train()
    assert result.codes == [2, 2]
    assert "there is no bucket nowhere" in result.output
    assert result.losses == {}


def test_an_unreachable_store_does_not_keep_a_run_from_going_on(
    s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus, upload_seconds=1, background=False))
    cluster.train(faults="kill:step=10")
    s3.inject(Fault("dropped", times=10**9))
    result = cluster.train(attempt=2)
    assert resumed_from(cluster) == (8, "shared")
    assert max(result.losses) == 12
    assert result.codes == [1, 1], "its last step is only here"


def test_leftovers_of_other_days_are_cleared(s3: FaultyS3, corpus: Path, tmp_path: Path) -> None:
    cluster = cluster_with(s3, tmp_path, stored_run(corpus))
    cluster.train(faults="kill:step=3")
    stored = in_store(s3)
    client = s3.client()
    prefix = stored.store.url.removeprefix("s3://bucket/")
    client.create_multipart_upload(Bucket="bucket", Key=f"{prefix}/step-00000001/__0_0.distcp")
    cluster.resume(most=1)
    assert stored.store.unfinished() == []
    assert_whole(s3, [4, 8, 12], tmp_path)


def test_a_restore_may_take_long_and_be_killed(corpus: Path, tmp_path: Path) -> None:
    """Longer than `parallel.timeout_minutes`, which is there to find hangs. Nothing is brought to a disk."""
    run = stored_run(corpus, store=str(tmp_path / "store"), background=False)
    old = Cluster(tmp_path / "old", run)
    assert old.train(overrides=["train.steps=8"]).codes == [0, 0]
    new = Cluster(tmp_path / "new", run)
    killed = new.train(faults="kill:rank=1,point=restore.begin")
    assert killed.codes[1] == -signal.SIGKILL, killed.output
    limit = ["parallel.timeout_minutes=0.2"]
    resumed = new.train(faults="sleep:rank=0,point=restore.begin,seconds=15", overrides=limit, attempt=2)
    assert resumed.codes == [0, 0], resumed.output
    assert resumed_from(new) == (8, "store")
    assert sorted(resumed.losses) == [9, 10, 11, 12]
    assert [checkpoint.step for checkpoint in CheckpointFolder(new.folder.checkpoints).all()] == [12]


def test_straight_to_the_store_with_kills_in_every_stage(
    s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """No checkpoint is ever in the run folder, and each attempt begins on a machine without one."""
    run = stored_run(corpus, direct=True, keep=2, background=False)
    # Rank 0 writes the manifest: when another rank dies after its part is there, the step is whole and counts.
    stages = (("save.staged", 1), ("save.written", 0), ("save.manifest", 0), ("save.published", 1))
    for number, (point, rank) in enumerate(stages):
        cluster = cluster_with(s3, tmp_path / f"machine-{number}", run)
        killed = cluster.train(faults=f"kill:rank={rank},step=8,point={point}")
        assert -signal.SIGKILL in killed.codes, killed.output
        assert [checkpoint.step for checkpoint in in_store(s3).complete()] == (
            [4, 8] if point == "save.published" else [4]
        )
        if number:
            assert resumed_from(cluster) == (4, "store")
    last = cluster_with(s3, tmp_path / "last", run)
    resumed = last.resume(most=1)
    assert resumed_from(last) == (8, "store")
    whole = undisturbed({**run, "checkpoint": {"every": 100}}, 2)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 8}
    assert CheckpointFolder(last.folder.checkpoints).all() == []
    assert_whole(s3, [8, 12], tmp_path)
