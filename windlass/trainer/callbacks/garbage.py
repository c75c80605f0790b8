"""Collect Python's garbage at chosen moments: a rank that pauses when it likes makes all others wait."""

from __future__ import annotations

import gc

from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.state import TrainState


class GarbageCollection(Callback):
    def after_step(self, state: TrainState) -> None:
        if state.step == 2:
            gc.collect()
            gc.freeze()
            gc.disable()
        elif state.pausing:
            gc.collect(1)
