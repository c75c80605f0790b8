"""Follow the validations: keep the checkpoint of the best, and end the run when they stop improving."""

from __future__ import annotations

from typing import Any

from windlass.checkpoint.pruning import validations
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.state import TrainState


class BestCheckpoint(Callback):
    """After every validation: save if it is the best so far and `checkpoint.keep_best` asks for it; or stop."""

    def __init__(self, state: TrainState) -> None:
        earlier = state.checkpoint.manifest.validation if state.checkpoint else None
        self.validations = EarlyStopping(state.run, state.folder, state.ranks, step=state.step, earlier=earlier)
        self.checkpointer, self.keeps = state.checkpointer, state.run.checkpoint.keep_best
        self.checkpointer.describe_validations = self.describe
        self.protect()  # before the first upload: its retention must know the best
        state.validated_step = self.validations.last_step
        self.stop_if_enough(state)

    def on_start(self, state: TrainState) -> None:
        if self.validations.observe(state.validated_step, state.validation_loss):
            self.protect()
        self.stop_if_enough(state)

    def after_step(self, state: TrainState) -> None:
        if self.validations.observe(state.validated_step, state.validation_loss) and self.keeps:
            self.protect()
            state.save(wait=False, shared=True)
            state.restart_clock()
        self.stop_if_enough(state)

    def stop_if_enough(self, state: TrainState) -> None:
        if self.validations.should_stop:
            state.stop(ExitCode.OK, self.validations.reason)

    def describe(self) -> dict[str, Any] | None:
        """For the manifest of a save that begins."""
        self.protect()
        return self.validations.as_dict()

    def protect(self) -> None:
        """Let retention spare the best checkpoint, and the one before it until the best is written."""
        best = self.validations.best_step
        if not self.keeps or best is None:
            return
        protected = self.checkpointer.protected
        protected.add(best)
        written = [step for step in protected if self.checkpointer.published(step)]
        for former in [step for step in protected if written and step < max(written)]:  # a later one was better
            protected.discard(former)


class EarlyStopping:
    """Observes every validation, on all ranks alike. What it knows goes into every manifest: a resume goes on from
    there, also on a machine without the run's metrics, and adds those between the save and the kill.
    """

    def __init__(
        self, run: Run, folder: RunFolder, ranks: Ranks, *, step: int, earlier: dict[str, Any] | None = None
    ) -> None:
        self.spec = run.train.early_stopping
        self.best_step: int | None = None
        self.best_loss = float("inf")
        self.without_best = 0  # validations since the best one
        self.last_step = 0  # of the newest validation that counts
        if earlier:
            self.best_step, self.best_loss = int(earlier["best_step"]), float(earlier["best_loss"])
            self.without_best, self.last_step = int(earlier["without_best"]), int(earlier["last_step"])
        for validated, loss in ranks.broadcast(validations(folder) if ranks.is_first else None).items():
            if validated <= step:
                self.observe(validated, loss)

    def as_dict(self) -> dict[str, Any] | None:
        """For a manifest; None before the first validation."""
        if self.best_step is None:
            return None
        return {
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "without_best": self.without_best,
            "last_step": self.last_step,
        }

    def observe(self, step: int, loss: float) -> bool:
        """Count a validation; whether it is the best so far. One that is repeated after a resume counts once."""
        if step <= self.last_step:
            return False
        self.last_step = step
        margin = self.spec.min_delta if self.spec else 0.0
        if loss < self.best_loss - margin:
            self.best_step, self.best_loss, self.without_best = step, loss, 0
            return True
        self.without_best += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether the run should end here."""
        return self.spec is not None and self.without_best >= self.spec.patience

    @property
    def reason(self) -> str:
        return f"no validation since step {self.best_step} was better than its {self.best_loss:.4f}"
