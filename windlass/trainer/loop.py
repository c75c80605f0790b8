"""The training loop, top to bottom."""

from __future__ import annotations

import torch

from windlass.common import own_code
from windlass.errors import ExitCode
from windlass.plan.resolution import learning_rate
from windlass.trainer.batches import Batches
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.callbacks.early_stopping import BestCheckpoint
from windlass.trainer.callbacks.garbage import GarbageCollection
from windlass.trainer.callbacks.hang import HangWatch
from windlass.trainer.callbacks.history import History
from windlass.trainer.callbacks.metrics import ExpertShares, Metrics
from windlass.trainer.callbacks.profiling import FirstStepProfile, Profile
from windlass.trainer.callbacks.saving import Saving
from windlass.trainer.callbacks.stragglers import Stragglers
from windlass.trainer.callbacks.validation import Validation
from windlass.trainer.checkpointing.tiers import Progress
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.structure import named_seed
from windlass.trainer.state import Attempt, StepResult, begin
from windlass.trainer.step import sum_over_ranks

# In the order in which their hooks are called; callbacks/callback.py says how to add one.
CALLBACKS: tuple[type[Callback], ...] = (
    Metrics,  # first: a step that is not finite must never be saved or validated
    HangWatch,  # after the metrics, which may wait for the GPU, and before what may take as long as it likes
    Stragglers,
    ExpertShares,
    FirstStepProfile,  # after the metrics, which may wait for the GPU: the first step is then really over
    Profile,
    Saving,  # before validations, which take long: a kill in one loses no steps
    History,  # the start is recorded once tiers are open, the end once the last upload is over
    GarbageCollection,  # while a save is written
    Validation,  # the last one after the last save, for the same reason
    BestCheckpoint,  # looks at the validation of this step
)


def train(attempt: Attempt) -> ExitCode:
    """Train a resolved run to its last step, or until all ranks agree to stop."""
    state = begin(attempt)
    run, prepared, ranks, faults = state.run, state.prepared, state.ranks, state.faults
    own = [own_code.load(path, "train.callbacks") for path in run.train.callbacks]
    callbacks = [callback(state) for callback in (*CALLBACKS, *own)]
    for callback in callbacks:
        callback.on_start(state)
    end = state.step if state.stopping else run.train.steps
    batches = Batches.for_training(prepared.sequences, run, ranks, prepared.layout, state.position)
    state.restart_clock()

    for batch in batches.from_step(state.step, end):
        before, step = state.position, state.step + 1
        faults.reach("step.begin", step)
        sums: list[float] = [batch.num_labels, batch.num_terms, state.preemption.requested]
        labels, terms, stop_requested = ranks.sum(sums)  # one exchange for all
        if stop_requested:
            state.stop(ExitCode.PREEMPTED, "SIGTERM")
            break
        for callback in callbacks:
            callback.before_step(state)
        seed_dropout(run.train.seed, step, ranks)
        labels = max(labels / ranks.tensor, 1.0)
        terms = max(terms / ranks.tensor, 1.0)
        losses = state.stepper.backward(batch, terms, poisoned=faults.reach("step.loss", step))
        loss = sum_over_ranks(losses, ranks)
        rate = learning_rate(before.step, run.train)
        grad_norm = state.optimizer.apply(rate, loss)
        sequences = before.sequences + run.train.global_batch
        state.position = Progress(step, before.tokens + int(labels), batch.state, sequences=sequences)
        state.result = StepResult(before, state.position, batch, losses, loss, grad_norm, labels, rate)

        state.pausing = any(callback.is_due(state) for callback in callbacks)
        for callback in callbacks:
            callback.after_step(state)
        if state.stopping:
            break

    for callback in callbacks:
        callback.on_end(state)
    for callback in callbacks:
        callback.on_close(state)
    return state.stopping.exit_code if state.stopping else ExitCode.OK


def seed_dropout(seed: int, step: int, ranks: Ranks) -> None:
    """Random draws inside a step depend on the step and the rank alone, so there is no generator state to save."""
    seed_here = torch.default_generator.manual_seed if ranks.device.type == "cpu" else torch.manual_seed
    seed_here(named_seed(seed, f"{step}:{ranks.rank}"))  # torch's own walks the stack for GPUs that are not there
