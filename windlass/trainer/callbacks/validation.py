"""Validation loss over the same sequences each time, every rank with the same number of batches."""

from __future__ import annotations

import math

import torch

from windlass.data.sequences.sequences import Sequences
from windlass.errors import ExitCode, UserError
from windlass.spec import Run
from windlass.trainer.batches import Batches
from windlass.trainer.callbacks.preemption import Preemption
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.metrics import Reporter
from windlass.trainer.step import Stepper


class Validator:
    def __init__(
        self, sequences: Sequences, run: Run, ranks: Ranks, faults: Faults, preemption: Preemption, *, micro: int
    ) -> None:
        self.sequences, self.run, self.ranks = sequences, run, ranks
        self.faults, self.preemption = faults, preemption
        there = sequences.num_sequences
        self.num_sequences = min(run.train.validation_sequences, there or run.train.validation_sequences)
        self.batch_size = min(micro * ranks.world_size, self.num_sequences)
        self.micro = -(-self.batch_size // ranks.world_size)
        self.loss = math.nan  # of the last validation that came to its end

    def due(self, step: int) -> bool:
        every = self.run.train.validate_every
        return bool(every) and step % (every or 1) == 0

    @torch.no_grad()
    def validate(self, stepper: Stepper, reporter: Reporter, step: int) -> bool:
        """Report the loss; False if all ranks agreed to stop before it was known."""
        self.sequences.restore(0, None)  # a stream begins anew: the same sequences every time
        stepper.model.eval()
        loss_sum, num_right, num_labels, seen = 0.0, 0.0, 0.0, 0
        try:
            for number in range(-(-self.num_sequences // self.batch_size)):
                self.faults.reach("validation.batch", step)
                size = min(self.batch_size, self.num_sequences - seen)
                batches = Batches(
                    self.sequences, self.run, self.ranks, global_batch=self.batch_size, micro=self.micro, num_micro=1
                )
                batches.positions = [position for position in batches.positions if position < size]
                batch = batches.read(number)
                measured = stepper.measure(batch.micro_batches[0])
                sums = self.ranks.sum([*measured, batch.num_labels, self.preemption.told])
                if sums[3]:
                    return False
                loss_sum, num_right, num_labels = loss_sum + sums[0], num_right + sums[1], num_labels + sums[2]
                seen += size
        finally:
            stepper.model.train()
        mean = loss_sum / max(num_labels, 1.0)
        if not math.isfinite(mean):
            raise UserError(
                f"the validation loss after step {step} is {mean}",
                cause="training has diverged: most often the learning rate is too high",
                fix="lower train.learning_rate and begin again with --fresh",
                exit_code=ExitCode.FAILED,
            )
        self.loss = mean
        reporter.validation(step, mean, seen, int(num_labels), accuracy=num_right / max(num_labels, 1.0))
        return True
