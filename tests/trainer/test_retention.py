"""Which checkpoints a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"), [(2, None, [8, 10]), (1, 4, [4, 8, 10]), (10, None, [2, 4, 6, 8, 10])]
)
def test_the_newest_and_the_permanent_ones_stay(
    keep: int, keep_every: int | None, left: list[int], corpus: Path, tmp_path: Path
) -> None:
    run = tiny_run(corpus, train__steps=10, checkpoint={"every": 2, "keep": keep, "keep_every": keep_every})
    result = train(tmp_path, run, ranks=2)
    checkpoints = CheckpointFolder(result.folder.checkpoints)
    assert [one.step for one in checkpoints.all()] == left
    assert not [damage for one in checkpoints.complete() for damage in one.damages()]
    assert [event["step"] for event in result.events("checkpoint")] == [2, 4, 6, 8, 10]
