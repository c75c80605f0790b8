"""A callback is one class: its hooks are called in their order on every rank, and it can end the run with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train

pytestmark = pytest.mark.train


def add_callback(rank: int) -> None:
    """Runs in every rank before it trains."""
    from windlass.errors import ExitCode
    from windlass.trainer import loop
    from windlass.trainer.callbacks.callback import Callback
    from windlass.trainer.state import TrainState

    class StopAtThree(Callback):
        def __init__(self, state: TrainState) -> None:
            self.calls: list[str] = []

        def on_start(self, state: TrainState) -> None:
            self.calls.append(f"start {state.step}")

        def before_step(self, state: TrainState) -> None:
            self.calls.append(f"before {state.step + 1}")

        def after_step(self, state: TrainState) -> None:
            self.calls.append(f"after {state.step}")
            if state.step == 3:
                state.stop(ExitCode.OK, "three are enough")
                state.stop(ExitCode.PREEMPTED, "the first reason stands")

        def on_end(self, state: TrainState) -> None:
            self.calls.append("end")

        def on_close(self, state: TrainState) -> None:
            (state.folder.path / f"calls-{rank}").write_text(", ".join(self.calls))

    loop.CALLBACKS = (*loop.CALLBACKS, StopAtThree)


def test_a_callback_is_called_at_every_hook_and_may_end_the_run(corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus, train__steps=9), ranks=2, prelude=add_callback)
    assert result.codes == [0, 0], result.output
    (finished,) = result.events("finished")
    assert (finished["step"], finished["early"]) == (3, "three are enough")
    calls = "start 0, before 1, after 1, before 2, after 2, before 3, after 3, end"
    assert [(result.folder.path / f"calls-{rank}").read_text() for rank in range(2)] == [calls, calls]
