"""What the first step of an attempt shows: which attention kernels ran, and where the time until then went."""

from __future__ import annotations

import contextlib
import logging

from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.fast.attention import naming_attention
from windlass.trainer.startup import clock
from windlass.trainer.state import TrainState

log = logging.getLogger(__name__)


class FirstStepProfile(Callback):
    def __init__(self, state: TrainState) -> None:
        self.done = False
        self.trace = contextlib.ExitStack()

    def before_step(self, state: TrainState) -> None:
        if not self.done:
            self.trace.enter_context(naming_attention(state.folder, state.ranks))

    def after_step(self, state: TrainState) -> None:
        if self.done:
            return
        self.done = True
        self.trace.close()
        if state.ranks.is_first:
            clock.mark("first step, compiled")
            log.info(clock.describe())
