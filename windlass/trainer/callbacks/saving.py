"""Save when a tier is due, and at the end of a run or when it is preempted."""

from __future__ import annotations

import time

from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.state import TrainState


class Saving(Callback):
    def on_start(self, state: TrainState) -> None:
        state.checkpointer.begin(state.checkpoint, state.tensors)

    def is_due(self, state: TrainState) -> bool:
        return state.step < state.run.train.steps and state.checkpointer.due(state.step)

    def after_step(self, state: TrainState) -> None:
        if self.is_due(state):
            state.stall_s += state.save(wait=False)
        state.faults.reach("step.end", state.step)

    def on_end(self, state: TrainState) -> None:
        if state.preempted or state.run.checkpoint.at_end:
            state.save(wait=True)
        state.checkpointer.finish()

    def on_close(self, state: TrainState) -> None:
        sigterm_at = None
        if state.preempted:
            state.save(wait=True)  # the last validation may have been cut off, of a run that saves nothing at its end
            sigterm_at = state.preemption.since or time.monotonic()
        state.only_local = state.checkpointer.close(state.step, sigterm_at=sigterm_at)
