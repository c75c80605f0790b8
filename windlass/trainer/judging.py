"""What validations say about going on: which was the best, whether its checkpoint is kept, and when to stop."""

from __future__ import annotations

from typing import Any

from windlass.checkpoint import CheckpointFolder
from windlass.errors import UserError
from windlass.runfolder import RunFolder, read_json_lines
from windlass.spec import Run
from windlass.trainer.ranks import Ranks
from windlass.trainer.saving import Checkpointer


class Judge:
    """Hears every validation, on all ranks alike. Nothing of it is saved: a resume hears the earlier ones again."""

    def __init__(self, run: Run, folder: RunFolder, ranks: Ranks, *, step: int) -> None:
        self.stopping, self.keeps = run.train.early_stopping, run.checkpoint.keep_best
        self.best_step: int | None = None
        self.best_loss = float("inf")
        self.without_best = 0  # validations since the best one
        earlier = ranks.broadcast(validations(folder) if ranks.is_first else None)
        for validated, loss in earlier.items():
            if validated <= step:
                self.hear(validated, loss)

    def hear(self, step: int, loss: float) -> bool:
        """Take a validation in; whether it is the best so far. The same one twice counts once."""
        if step == self.best_step:
            return False
        margin = self.stopping.min_delta if self.stopping else 0.0
        if loss < self.best_loss - margin:
            self.best_step, self.best_loss, self.without_best = step, loss, 0
            return True
        self.without_best += 1
        return False

    @property
    def enough(self) -> bool:
        """Whether the run should end here."""
        return self.stopping is not None and self.without_best >= self.stopping.patience

    @property
    def reason(self) -> str:
        return f"no validation since step {self.best_step} was better than its {self.best_loss:.4f}"

    def protect(self, checkpointer: Checkpointer) -> None:
        """Let retention spare the best checkpoint, and the one before it until the best is written."""
        if not self.keeps or self.best_step is None:
            return
        protected, folder = checkpointer.protected, CheckpointFolder(checkpointer.folder.checkpoints)
        protected.add(self.best_step)
        written = [step for step in protected if folder.at(step).complete]
        for former in [step for step in protected if written and step < max(written)]:  # a later one was better
            protected.discard(former)


def validations(folder: RunFolder) -> dict[int, float]:
    """Validation losses by step, in order; of one that was repeated after a resume the later."""
    records: list[dict[str, Any]] = [
        record for record in read_json_lines(folder.metrics) if record.get("kind") == "validation"
    ]
    return dict(sorted({int(record["step"]): float(record["loss"]) for record in records}.items()))


def best_step(folder: RunFolder) -> int:
    """The step with the best validation loss among the complete checkpoints of a run."""
    complete = {one.step for one in CheckpointFolder(folder.checkpoints).complete()}
    losses = {step: loss for step, loss in validations(folder).items() if step in complete}
    if not losses:
        raise UserError(
            f"no checkpoint of {folder.name} was validated",
            evidence=f"checkpoints of steps {', '.join(map(str, sorted(complete))) or 'none'}",
            fix="--step N; checkpoint.keep_best=true saves after the best validation",
        )
    return min(losses, key=lambda step: losses[step])
