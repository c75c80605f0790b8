"""Validation loss over the same sequences each time, every rank with the same number of batches."""

from __future__ import annotations

import math

import torch

from windlass.errors import ExitCode, UserError
from windlass.trainer.batches import Batches
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.state import TrainState


class Validation(Callback):
    """Every `train.validate_every` steps and at the end; does nothing in a run without validation data."""

    def __init__(self, state: TrainState) -> None:
        self.sequences = state.prepared.validation
        if self.sequences is None:
            return
        requested, world_size = state.run.train.validation_sequences, state.ranks.world_size
        self.num_sequences = min(requested, self.sequences.num_sequences or requested)
        self.batch_size = min(state.prepared.layout.micro * world_size, self.num_sequences)
        self.micro = -(-self.batch_size // world_size)

    def is_due(self, state: TrainState) -> bool:
        every, step = state.run.train.validate_every, state.step
        return self.sequences is not None and bool(every) and step % (every or 1) == 0 and step < state.run.train.steps

    def on_start(self, state: TrainState) -> None:
        """The attempt before may have died in the validation that its last step was due for."""
        if not state.stopping and state.validated_step < state.step and self.is_due(state):
            self.validate(state)

    def after_step(self, state: TrainState) -> None:
        if self.is_due(state):
            self.validate(state)
            state.restart_clock()

    def on_end(self, state: TrainState) -> None:
        if not state.stopping and self.sequences is not None:
            self.validate(state)

    @torch.no_grad()
    def validate(self, state: TrainState) -> None:
        """Report the loss; stop instead if a rank is told to before it is known."""
        assert self.sequences is not None
        self.sequences.restore(0, None)  # a stream begins anew: the same sequences every time
        state.stepper.model.eval()
        loss_sum, num_right, num_terms, num_labels, seen = 0.0, 0.0, 0.0, 0.0, 0
        try:
            for number in range(-(-self.num_sequences // self.batch_size)):
                state.faults.reach("validation.batch", state.step)
                size = min(self.batch_size, self.num_sequences - seen)
                batches = Batches(
                    self.sequences, state.run, state.ranks, global_batch=self.batch_size, micro=self.micro, num_micro=1
                )
                batches.positions = [position for position in batches.positions if position < size]
                batch = batches.read(number)
                measured = state.stepper.measure(batch.micro_batches[0])
                sums = state.ranks.sum([*measured, batch.num_terms, state.preemption.requested, batch.num_labels])
                if sums[3]:
                    state.stop(ExitCode.PREEMPTED, "SIGTERM")
                    return
                loss_sum, num_right, num_terms = loss_sum + sums[0], num_right + sums[1], num_terms + sums[2]
                num_labels += sums[4]
                seen += size
        finally:
            state.stepper.model.train()
        mean = loss_sum / max(num_terms, 1.0)
        if not math.isfinite(mean):
            raise UserError(
                f"the validation loss after step {state.step} is {mean}",
                cause="training has diverged: most often the learning rate is too high",
                fix="lower train.learning_rate and begin again with --fresh",
                exit_code=ExitCode.FAILED,
            )
        state.validated_step, state.validation_loss = state.step, mean
        accuracy = num_right / max(num_terms, 1.0)
        state.reporter.validation(state.step, mean, seen, int(num_labels), accuracy=accuracy)
