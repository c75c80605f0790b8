"""metrics.jsonl is an interface: every step, every field, documented; TensorBoard shows the same numbers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.trainer.reporting import StepMetrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_field_is_documented() -> None:
    text = DOCUMENT.read_text()
    missing = [field.name for field in fields(StepMetrics) if f"`{field.name}`" not in text]
    assert not missing


@pytest.mark.train
def test_every_step_is_written_and_tensorboard_agrees(corpus: Path, tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the tensorboard extra is not installed"
    )
    run = tiny_run(corpus, train__tensorboard=True, train__log_every=5, data__holdout=0.1, train__validate_every=4)
    result = train(tmp_path, run, ranks=2)
    assert result.codes == [0, 0], result.output
    records = result.records("step")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert set(records[0]) == {"kind", *(field.name for field in fields(StepMetrics))}
    assert records[-1]["tokens"] == 8 * 8 * 32
    assert [record["step"] for record in result.records("validation")] == [4, 8]

    board = events.EventAccumulator(str(result.folder.path / "tensorboard"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("train/loss")}
    assert shown == pytest.approx(result.losses, rel=1e-6)
    assert [event.step for event in board.Scalars("validation/loss")] == [4, 8]
