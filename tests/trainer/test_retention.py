"""Which checkpoints a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    campaign([(2, None, [8, 10]), (1, 4, [4, 8, 10]), (10, None, [2, 4, 6, 8, 10])], always=2),
)
def test_the_newest_and_the_permanent_ones_stay(
    keep: int, keep_every: int | None, left: list[int], corpus: Path, tmp_path: Path
) -> None:
    run = tiny_run(corpus, train__steps=10, checkpoint={"every": 2, "keep": keep, "keep_every": keep_every})
    result = train(tmp_path, run, ranks=2)
    checkpoints = CheckpointFolder(result.folder.checkpoints)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == left
    assert not [damage for checkpoint in checkpoints.complete() for damage in checkpoint.damages()]
    assert [event["step"] for event in result.events("checkpoint")] == [2, 4, 6, 8, 10]


def test_nothing_more_at_the_end(corpus: Path, tmp_path: Path) -> None:
    """A save that is under way when the last step is done is still finished."""
    run = tiny_run(corpus, train__steps=5, checkpoint={"every": 4, "at_end": False})
    result = train(tmp_path, run, ranks=2, faults="sleep:step=4,point=save.written,seconds=1")
    assert result.codes == [0, 0], result.output
    (only,) = CheckpointFolder(result.folder.checkpoints).all()
    assert only.step == 4
    assert list(only.damages()) == []
