"""SIGTERM: a complete checkpoint of the step all ranks agreed on, exit code 75, and nothing lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Job, Result, resume, start, train
from windlass.checkpoint import CheckpointFolder
from windlass.trainer.callbacks.preemption import NOTICE, ONE_REQUEST_SECONDS
from windlass.trainer.distributed.faults import POINTS

pytestmark = pytest.mark.train

STEPS, EVERY, GRACE_S = 12, 3, 20
PREEMPTED, TERMINATED = 75, 128 + signal.SIGTERM


def stoppable_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    return tiny_run(
        corpus,
        train__steps=STEPS,
        train__validate_every=3,
        train__validation_sequences=20,
        data__holdout=0.05,
        checkpoint={"every": EVERY, "keep": 2, "grace_seconds": GRACE_S},
        **changes,
    )


def assert_stopped_with_everything(result: Result) -> int:
    """All ranks left together after a step whose checkpoint is whole; that step."""
    assert result.codes == [PREEMPTED] * len(result.codes), result.output
    (event,) = result.events("preempted")
    assert event["step"] == max(result.losses, default=0)
    newest = CheckpointFolder(result.folder.checkpoints).complete()[-1]
    assert newest.step == event["step"]
    assert list(newest.damages()) == []
    assert not result.events("finished")
    return int(event["step"])


def assert_goes_on(root: Path, run: dict[str, Any], stopped_at: int, whole: Result) -> None:
    resumed = resume(root, run, ranks=2, most=1)
    assert [event["step"] for event in resumed.events("resumed")] == ([stopped_at] if stopped_at else [])
    assert resumed.losses == whole.losses
    assert resumed.grad_norms == whole.grad_norms
    last = {record["step"]: record["loss"] for record in resumed.records("validation")}
    assert last == {record["step"]: record["loss"] for record in whole.records("validation")}


@pytest.mark.parametrize(
    ("ranks", "step", "delay"), campaign([((1,), 5, 0.03), ((0, 1), 7, 0.06), ((0,), 2, 0.0)], always=2)
)
def test_while_training(
    ranks: tuple[int, ...],
    step: int,
    delay: float,
    corpus: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Result],
) -> None:
    run = stoppable_run(corpus)
    whole = undisturbed(run)
    job = start(tmp_path, run, ranks=2)
    job.wait_for(lambda: job.step() >= step)
    time.sleep(delay)
    told = time.monotonic()
    for rank in ranks:
        job.signal(rank, signal.SIGTERM)
    result = job.result()
    assert time.monotonic() - told < GRACE_S
    assert_goes_on(tmp_path, run, assert_stopped_with_everything(result), whole)


# In a step, in a validation, and while one rank or the other saves; then at every point.
CHOSEN = [("step.begin", 1, 5), ("validation.batch", 0, 6), ("save.written", 1, 9), ("save.manifest", 0, 9)]
MOMENTS = [
    *CHOSEN,
    ("step.begin", 0, 1),
    ("validation.batch", 1, 3),
    *(
        (point, 0 if point in ("save.manifest", "save.retention") else index % 2, 9)
        for index, point in enumerate(POINTS)
        if point in ("save.staged", "save.published", "save.retention")
    ),
]


@pytest.mark.parametrize(("point", "rank", "step"), campaign(MOMENTS, always=len(CHOSEN)))
def test_at_a_named_moment(
    point: str, rank: int, step: int, corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    """One rank is told, in its main thread or in the one that writes; all stop."""
    run = stoppable_run(corpus)
    whole = undisturbed(run)
    faults = f"term:rank={rank},step={step},point={point}"
    if point.startswith("save."):  # the thread that writes must come there before the last step is done
        faults += f";sleep:rank=0,step={step + 1},seconds=2"
    result = train(tmp_path, run, ranks=2, faults=faults)
    stopped_at = assert_stopped_with_everything(result)
    if point == "step.begin":
        assert stopped_at == step - 1
    elif point == "validation.batch":
        assert stopped_at == step
    else:
        assert step <= stopped_at < STEPS
    assert_goes_on(tmp_path, run, stopped_at, whole)


def test_before_the_first_step(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    """As soon as the processes exist: the checkpoint of step 0 holds the first weights."""
    run = stoppable_run(corpus)
    job = start(tmp_path, run, ranks=2)
    job.wait_for(lambda: all(log.exists() for log in job.logs))
    for rank in (0, 1):
        job.signal(rank, signal.SIGTERM)
    assert assert_stopped_with_everything(job.result()) == 0
    assert_goes_on(tmp_path, run, 0, undisturbed(run))


def test_after_the_last_step(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    """What is left is a validation: it is made up for by the next start."""
    run = stoppable_run(corpus)
    result = train(tmp_path, run, ranks=2, faults=f"term:rank=1,step={STEPS},point=validation.batch")
    assert assert_stopped_with_everything(result) == STEPS
    assert_goes_on(tmp_path, run, STEPS, undisturbed(run))


def test_in_the_last_validation_of_a_run_that_saves_nothing_at_the_end(corpus: Path, tmp_path: Path) -> None:
    run = stoppable_run(corpus)
    run["checkpoint"] |= {"at_end": False, "every": 100}
    result = train(tmp_path, run, ranks=2, faults=f"term:rank=1,step={STEPS},point=validation.batch")
    assert assert_stopped_with_everything(result) == STEPS


def test_when_nothing_is_left_to_do(corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus, train__steps=3), ranks=2, faults="term:step=3,point=step.end")
    assert result.codes == [0, 0], result.output
    assert [event["step"] for event in result.events("finished")] == [3]


def told_once(job: Job, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        job.signal(rank, signal.SIGTERM)
    job.wait_for(lambda: all(NOTICE.decode() in job.logs[rank].read_text() for rank in ranks))


def test_the_same_request_heard_twice(corpus: Path, tmp_path: Path) -> None:
    """A scheduler signals every process, and the launcher passes it on: that is one request, not two."""
    job = start(tmp_path, stoppable_run(corpus), ranks=2)
    job.wait_for(lambda: job.step() >= 2)
    told_once(job, (0, 1))
    for rank in (0, 1):
        job.signal(rank, signal.SIGTERM)
    assert_stopped_with_everything(job.result())


def test_a_second_one_ends_a_slow_save(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    run = stoppable_run(corpus)
    job = start(tmp_path, run, ranks=2, faults="sleep:step=6,point=save.written,seconds=60")
    torn = job.folder.checkpoints / "step-00000006"
    job.wait_for(lambda: (torn / ".metadata").exists())
    told_once(job, (0, 1))
    time.sleep(ONE_REQUEST_SECONDS)
    told = time.monotonic()
    for rank in (0, 1):
        job.signal(rank, signal.SIGTERM)
    result = job.result()
    assert time.monotonic() - told < 30  # not the 60 of the sleep
    assert result.codes == [TERMINATED] * 2, result.output
    (whole_one,) = CheckpointFolder(result.folder.checkpoints).complete()
    assert whole_one.step == 3
    assert list(whole_one.damages()) == []
    assert_goes_on(tmp_path, run, 3, undisturbed(run))


def test_a_second_one_ends_a_rank_that_waits_for_another(corpus: Path, tmp_path: Path) -> None:
    """In a collective no Python signal handler runs: exactly then the second SIGTERM is needed."""
    job = start(tmp_path, tiny_run(corpus), ranks=2, faults="sleep:rank=1,step=3,seconds=60")
    job.wait_for(lambda: job.step() >= 2)
    time.sleep(0.3)  # rank 0 is in the sum over ranks that begins step 3
    told_once(job, (0,))
    time.sleep(ONE_REQUEST_SECONDS)
    told = time.monotonic()
    job.signal(0, signal.SIGTERM)
    job.processes[0].join(30)
    assert time.monotonic() - told < 30  # not the 60 of the sleep
    assert job.processes[0].exitcode == TERMINATED
    job.signal(1, signal.SIGKILL)
    job.result()
