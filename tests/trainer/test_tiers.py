"""Checkpoint tiers: the nearest complete one is taken, a lost node comes back from its peer's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result
from tests.trainer.tier_runs import STEPS, Cluster, tiered_run
from windlass.checkpoint.manifest import piece_name

pytestmark = pytest.mark.train

Undisturbed = Callable[..., Result]


def assert_same_curve(cluster: Cluster, resumed: Result, undisturbed: Undisturbed) -> None:
    plain = {**cluster.run, "checkpoint": {"every": 100}}
    whole = undisturbed(plain, cluster.ranks)
    assert sorted(whole.losses) == list(range(1, STEPS + 1))
    assert resumed.losses == whole.losses
    assert resumed.grad_norms == whole.grad_norms


def resumed_from(cluster: Cluster) -> tuple[int, str]:
    event = cluster.events("resumed")[-1]
    return event["step"], event["tier"]


def test_all_tiers_of_an_undisturbed_run(corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    cluster = Cluster(tmp_path, tiered_run(corpus))
    result = cluster.train()
    assert result.codes == [0, 0], result.output
    saved: dict[str, list[int]] = {}
    for event in cluster.events("checkpoint"):
        saved.setdefault(event["tier"], []).append(event["step"])
    assert saved["shared"] == [4, 8, 12]
    assert saved["local"] == [2, 4, 6, 8, 10]
    assert set(saved["memory"]) <= set(range(1, STEPS))
    assert len(saved["memory"]) >= 3
    assert cluster.events("checkpoint-failed") == []
    for node in (0, 1):
        assert [folder.all() for tier in ("memory", "disk") for folder in cluster.pieces(node, tier)] == [[], []]
    assert_same_curve(cluster, result, undisturbed)


@pytest.mark.parametrize(
    ("lost", "expected"),
    campaign(
        [
            (((0, None),), (7, "memory")),  # a whole node: its pieces come from the peer
            (((0, "memory"), (1, "memory")), (6, "local")),
            (((0, "memory"), (1, None)), (4, "shared")),  # one disk is left, but it has half of the pieces
            ((), (7, "memory")),
            (((1, None),), (7, "memory")),
            (((0, None), (1, None)), (4, "shared")),
        ],
        always=3,
    ),
)
def test_the_nearest_complete_tier(
    lost: tuple[tuple[int, str | None], ...],
    expected: tuple[int, str],
    corpus: Path,
    tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False))
    killed = cluster.train(faults="kill:rank=0,step=8;kill:rank=1,step=8")
    assert min(killed.codes) < 0, killed.output
    for node, tier in lost:
        cluster.lose(node, tier)
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == expected
    assert_same_curve(cluster, resumed, undisturbed)


def test_four_ranks_on_two_nodes_without_a_run_folder_checkpoint(
    corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Nothing was ever saved on shared storage: a lost node still costs nothing but the steps since."""
    run = tiered_run(corpus, background=False, every=100, local_every=None, local_path=None)
    cluster = Cluster(tmp_path, run, ranks=4)
    cluster.train(faults="kill:rank=2,step=6")
    cluster.lose(1)
    resumed = cluster.train(attempt=2, faults="kill:rank=0,step=9")
    assert resumed_from(cluster) == (5, "memory")
    manifests = [cluster.pieces(node, "memory")[0].at(8).path / "manifest.json" for node in (0, 1)]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    assert {path.name for path in cluster.pieces(1, "memory")[0].at(8).path.glob("rank-*")} == {
        piece_name(rank) for rank in range(4)
    }
    cluster.lose(0)
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == (8, "memory")
    assert_same_curve(cluster, resumed, undisturbed)


def test_a_node_that_came_back_is_doubled_again_at_once(corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """First node 1 is lost, then, before anything is saved again, node 0."""
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False, every=100, memory_every=5))
    cluster.train(faults="kill:step=6")
    cluster.lose(1)
    cluster.train(attempt=2, faults="kill:step=7")
    assert resumed_from(cluster) == (5, "memory")
    cluster.lose(0)
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == (5, "memory")
    assert_same_curve(cluster, resumed, undisturbed)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_damaged_piece(tier: str, corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """In memory the peer has a whole one; on a disk there is no other, and the next tier serves."""
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False))
    cluster.train(faults="kill:step=8")
    if tier == "disk":
        cluster.lose(0, "memory")
        cluster.lose(1, "memory")
    (pieces,) = cluster.pieces(1, tier)
    path = pieces.complete()[-1].path / piece_name(1)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == ((7, "memory") if tier == "memory" else (4, "shared"))
    damaged = cluster.events("checkpoint-damaged")
    assert [record["file"] for record in damaged] == ([] if tier == "memory" else [piece_name(1)])
    assert_same_curve(cluster, resumed, undisturbed)


def test_another_number_of_ranks_passes_the_pieces_over(corpus: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False))
    cluster.train(faults="kill:step=8")
    alone = Cluster(tmp_path, cluster.run, ranks=1, nodes=1)
    resumed = alone.resume(most=1)
    assert resumed_from(alone) == (4, "shared")
    passed = alone.events("checkpoint-passed-over")
    assert [(record["tier"], record["step"]) for record in passed] == [("memory", 7), ("local", 6)]
    assert "world_size 2 there, 1 here" in passed[0]["reason"]
    assert resumed.codes == [0]


def test_only_pieces_of_other_ranks(corpus: Path, tmp_path: Path) -> None:
    """A run never starts over by itself."""
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False, every=100))
    cluster.train(faults="kill:step=8")
    result = Cluster(tmp_path, cluster.run, ranks=1, nodes=1).train(attempt=2)
    assert result.codes == [2]
    assert "another number of ranks" in result.output


def test_a_new_run_in_the_same_place_takes_nothing_of_the_old(corpus: Path, tmp_path: Path) -> None:
    """What `--fresh` does: the folder is moved aside, and what the nodes hold is of another id."""
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False))
    cluster.train(faults="kill:step=6")
    (old,) = [folder.path.name for folder in cluster.pieces(0, "memory")]
    cluster.folder.path.rename(tmp_path / "runs" / "aside")
    result = cluster.train(faults="kill:step=3")
    assert cluster.events("resumed") == [], result.output
    (new,) = [folder.path.name for folder in cluster.pieces(0, "memory")]
    assert new != old
    assert new.rpartition("-")[0] == old.rpartition("-")[0]


def test_no_room_is_said_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {done.stderr.strip()}")
    try:
        cluster = Cluster(tmp_path, tiered_run(corpus, memory_path=str(small)))
        result = cluster.train()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert result.codes == [2, 2], result.output
    assert "the memory tier does not fit on a node" in result.output
    assert result.losses == {}


def test_a_tier_that_fails_leaves_the_others_alone(corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The disk of a node turns read-only, as it were: a file lies where its folder should be."""
    cluster = Cluster(tmp_path, tiered_run(corpus, background=False))
    cluster.train(faults="kill:step=4")
    cluster.lose(1, "disk")
    (cluster.node(1) / "disk").mkdir()
    name = cluster.pieces(0, "disk")[0].path.name
    resumed_before = len(cluster.events("checkpoint"))
    (cluster.node(1) / "disk" / name).mkdir()
    for step in range(4, STEPS, 2):
        (cluster.node(1) / "disk" / name / f"step-{step:08d}").write_text("in the way")
    resumed = cluster.resume(most=1)
    failed = cluster.events("checkpoint-failed")
    assert {record["tier"] for record in failed} == {"local"}
    assert "rank 1" in failed[0]["error"]
    assert {event["tier"] for event in cluster.events("checkpoint")[resumed_before:]} == {"memory", "shared"}
    assert_same_curve(cluster, resumed, undisturbed)


def test_sigterm_saves_to_the_nearest_tier_first(corpus: Path, tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Killed before anything was in the run folder, the run goes on from the step at which it was told to stop."""
    cluster = Cluster(tmp_path, tiered_run(corpus, every=100, memory_every=None, local_every=100))
    cluster.train(faults="term:rank=0,step=7;kill:step=6,point=save.staged")
    resumed = cluster.resume()
    assert resumed_from(cluster) == (6, "local")
    assert_same_curve(cluster, resumed, undisturbed)


def test_a_variable_that_is_not_set(corpus: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiered_run(corpus, local_path="$NO_SUCH_DISK/x"))
    result = cluster.train()
    assert result.codes == [2, 2]
    assert "names a variable that is not set on this node" in result.output


def test_a_run_without_tiers_leaves_no_id(corpus: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tiny_run(corpus, train__steps=2))
    assert cluster.train().codes == [0, 0]
    assert not (cluster.folder.path / "id").exists()
