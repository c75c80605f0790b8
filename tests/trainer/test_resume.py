"""kill -9 at any moment, then start again: the curve is that of a run nobody killed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, resume, start, train
from windlass.checkpoint import CheckpointFolder
from windlass.runfolder import RunFolder
from windlass.trainer.distributed.faults import POINTS

pytestmark = pytest.mark.train

STEPS, EVERY = 12, 3


def killable_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    return tiny_run(corpus, train__steps=STEPS, checkpoint__every=EVERY, **changes)


def assert_nothing_torn(folder: RunFolder) -> None:
    """Whatever counts as a checkpoint is one, to the byte."""
    for checkpoint in CheckpointFolder(folder.checkpoints).complete():
        assert list(checkpoint.damages()) == []


def assert_same_curve(resumed: Result, whole: Result) -> None:
    assert sorted(whole.losses) == list(range(1, STEPS + 1))
    assert resumed.losses == whole.losses
    assert resumed.grad_norms == whole.grad_norms
    assert_nothing_torn(resumed.folder)


def random_moments(count: int) -> list[tuple[int, float, tuple[int, ...]]]:
    """(steps to wait for, seconds after that, ranks to kill); zero steps: while the ranks start up."""
    draw = random.Random(20)
    victims = [(0,), (1,), (0, 1)]
    moments = []
    for _ in range(count):
        step = draw.randrange(STEPS)
        moments.append((step, draw.uniform(0, 0.08 if step else 0.9), draw.choice(victims)))
    return moments


@pytest.mark.parametrize(("step", "delay", "victims"), campaign(random_moments(20), always=4))
def test_kill_at_a_random_moment(
    step: int, delay: float, victims: tuple[int, ...], corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    run = killable_run(corpus)
    whole = undisturbed(run)
    job = start(tmp_path, run, ranks=2)
    if step:
        job.wait_for(lambda: job.step() >= step)
    time.sleep(delay)
    for rank in victims:
        job.signal(rank, signal.SIGKILL)
    killed = job.result()
    assert_nothing_torn(killed.folder)
    assert_same_curve(resume(tmp_path, run, ranks=2), whole)


def test_kill_after_an_awaited_save_leaves_its_step_in_the_metrics(
    corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    run = killable_run(corpus, checkpoint__background=False)
    killed = train(tmp_path, run, ranks=2, faults="kill:rank=0,step=6,point=save.published")
    assert sorted(killed.losses) == list(range(1, 7))
    assert_same_curve(resume(tmp_path, run, ranks=2), undisturbed(run))


FIRST_RANK_ONLY = ("save.manifest", "save.retention")
SAVING = [point for point in POINTS if point.startswith("save.")]
# Every stage, on one rank or the other; then both.
CHOSEN = [(point, 0 if point in FIRST_RANK_ONLY else index % 2) for index, point in enumerate(SAVING)]
BOTH = [(point, rank) for point in SAVING for rank in (0, 1) if not (rank and point in FIRST_RANK_ONLY)]
STAGES = list(dict.fromkeys([*CHOSEN, *BOTH]))


@pytest.mark.parametrize(("point", "rank"), campaign(STAGES, always=len(CHOSEN)))
def test_kill_at_a_stage_of_a_save(
    point: str, rank: int, corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    run = killable_run(corpus, checkpoint__keep=1)
    whole = undisturbed(run)
    killed = train(tmp_path, run, ranks=2, faults=f"kill:rank={rank},step=6,point={point}")
    assert killed.codes[rank] == -signal.SIGKILL
    assert_nothing_torn(killed.folder)
    resumed = resume(tmp_path, run, ranks=2)
    (event,) = resumed.events("resumed")
    if rank == 1 and point == "save.written":
        assert event["step"] in (3, 6), "rank 0 has all it needs to publish, but may hear of the death first"
    else:
        assert event["step"] == (6 if POINTS.index(point) >= POINTS.index("save.published") else 3)
    assert_same_curve(resumed, whole)
    assert [checkpoint.step for checkpoint in CheckpointFolder(resumed.folder.checkpoints).all()] == [STEPS]


@pytest.mark.campaign
@pytest.mark.campaign_only  # the stages of a save, above, are the short form
def test_kill_while_a_file_is_being_written(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    """From outside, with tensors on their way to the disk: a model of 60 MB of state."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5, "head_dim": 64}
    run = tiny_run(corpus, model={"preset": "llama3.2-tiny", "config": shape}, train__steps=7, checkpoint__every=3)
    whole = undisturbed(run)
    job = start(tmp_path, run, ranks=2)
    torn = job.folder.checkpoints / "step-00000006"
    job.wait_for(lambda: any(file.stat().st_size for file in torn.glob("*.distcp")), interval=0.0005)
    for rank in (0, 1):
        job.signal(rank, signal.SIGKILL)
    killed = job.result()
    assert list(torn.glob("*.distcp"))
    assert not (torn / "manifest.json").exists()
    assert_nothing_torn(killed.folder)
    resumed = resume(tmp_path, run, ranks=2)
    assert [event["step"] for event in resumed.events("resumed")] == [3]
    assert (resumed.losses, resumed.grad_norms) == (whole.losses, whole.grad_norms)


# To every kind of spread, with more ranks and with fewer; then more of the same.
SPREADS = [
    ((4, "full"), (3, "full")),
    ((2, "full"), (2, "ddp")),
    ((4, "hybrid"), (2, "full")),
    ((1, "none"), (4, "hybrid")),
    ((2, "full"), (1, "none")),
    ((2, "full"), (4, "full")),
    ((2, "ddp"), (2, "full")),
]


@pytest.mark.parametrize(("before", "after"), campaign(SPREADS, always=5), ids=lambda one: f"{one[1]}-{one[0]}")
def test_go_on_in_another_spread(
    before: tuple[int, str],
    after: tuple[int, str],
    corpus: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    def spread(ranks: int, sharding: str) -> tuple[dict[str, Any], int]:
        parallel = {"sharding": sharding} | ({"shard_group": 2} if sharding == "hybrid" else {})
        return killable_run(corpus, checkpoint__background=False, parallel=parallel), ranks

    whole = undisturbed(killable_run(corpus, checkpoint__background=False), 2)
    run, ranks = spread(*before)
    train(tmp_path, run, ranks=ranks, faults="kill:step=8")
    run, ranks = spread(*after)
    resumed = resume(tmp_path, run, ranks=ranks, most=1)
    (event,) = resumed.events("resumed")
    assert (event["step"], event["world_size"]) == (6, ranks)
    assert list(resumed.losses.values()) == pytest.approx(list(whole.losses.values()), rel=1e-5)
    assert list(resumed.grad_norms.values()) == pytest.approx(list(whole.grad_norms.values()), rel=1e-4)


def test_more_steps_after_the_end(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    """With a schedule that does not depend on the end, as if the larger number had been asked for at once."""
    run = killable_run(corpus, train__schedule="constant")
    short = train(tmp_path, run, ranks=2, overrides=["train.steps=7"])
    assert short.codes == [0, 0]
    assert short.events("finished")[0]["step"] == 7
    longer = resume(tmp_path, run, ranks=2, most=1)
    assert longer.events("resumed")[0]["step"] == 7
    assert_same_curve(longer, undisturbed(run))


def test_a_finished_run_started_again_does_nothing(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, train__steps=2)
    train(tmp_path, run)
    again = train(tmp_path, run, attempt=2)
    assert again.codes == [0]
    assert len(again.records("step")) == 2
    assert [event["step"] for event in again.events("finished")] == [2, 2]
