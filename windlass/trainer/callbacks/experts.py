"""Which experts of a mixture are used: reported as often as steps are logged."""

from __future__ import annotations

from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.state import TrainState


class ExpertShares(Callback):
    def after_step(self, state: TrainState) -> None:
        every, last = state.run.train.log_every, state.run.train.steps
        if state.balance is not None and (state.step % every == 0 or state.step == last):
            state.reporter.experts(state.step, state.balance.shares())
