"""What the first step of an attempt shows: which attention kernels ran, and where the time until then went.

And traces of chosen steps (`train.profile`), with a snapshot of the GPU's memory.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

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


class Profile(Callback):
    """Records `train.profile.steps` steps from `train.profile.first` on; they take longer than others."""

    def __init__(self, state: TrainState) -> None:
        self.settings = state.run.train.profile
        self.is_on = self.settings is not None and state.ranks.rank in self.settings.ranks
        self.profiler: Any = None

    def before_step(self, state: TrainState) -> None:
        if not self.is_on or self.settings is None or state.step + 1 != self.settings.first:
            return
        on_gpu = state.ranks.device.type == "cuda"
        if on_gpu and self.settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
        self.profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=True,
            profile_memory=self.settings.memory,
            with_stack=self.settings.stacks,
        )
        self.profiler.start()

    def after_step(self, state: TrainState) -> None:
        if self.profiler is None or self.settings is None:
            return
        if state.step >= self.settings.first + self.settings.steps - 1:
            self._write(state)

    def on_end(self, state: TrainState) -> None:
        if self.profiler is not None:  # the run is shorter than what was to be recorded
            self._write(state)

    def _write(self, state: TrainState) -> None:
        assert self.settings is not None
        on_gpu = state.ranks.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(state.ranks.device)
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        folder = state.folder.path / "profile"
        folder.mkdir(exist_ok=True)
        name = f"steps-{self.settings.first}-{state.step}-rank-{state.ranks.rank:04d}"
        profiler.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        order = "cuda_time_total" if on_gpu else "cpu_time_total"
        (folder / f"{name}.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=50))
        if on_gpu and self.settings.memory:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("wrote the trace of steps %d to %d: %s", self.settings.first, state.step, folder / name)
        state.restart_clock()
