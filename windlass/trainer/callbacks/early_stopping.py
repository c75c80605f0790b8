"""What validations say about going on: which was the best, whether its checkpoint is kept, and when to stop."""

from __future__ import annotations

from typing import Any

from windlass.checkpoint import CheckpointFolder
from windlass.checkpoint.browsing import Row, views
from windlass.checkpoint.pruning import best_of, validations
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.checkpointing.saving import Checkpointer
from windlass.trainer.distributed.ranks import Ranks


class Judge:
    """Hears every validation, on all ranks alike. What it knows goes into every manifest: a resume goes on from there,
    also on a machine that has no metrics of the run, and hears those that came between the save and the kill.
    """

    def __init__(
        self, run: Run, folder: RunFolder, ranks: Ranks, *, step: int, earlier: dict[str, Any] | None = None
    ) -> None:
        self.stopping, self.keeps = run.train.early_stopping, run.checkpoint.keep_best
        self.best_step: int | None = None
        self.best_loss = float("inf")
        self.without_best = 0  # validations since the best one
        self.last_step = 0  # of the newest validation that counts
        if earlier:
            self.best_step, self.best_loss = int(earlier["best_step"]), float(earlier["best_loss"])
            self.without_best, self.last_step = int(earlier["without_best"]), int(earlier["last_step"])
        for validated, loss in ranks.broadcast(validations(folder) if ranks.is_first else None).items():
            if validated <= step:
                self.hear(validated, loss)

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

    def hear(self, step: int, loss: float) -> bool:
        """Take a validation in; whether it is the best so far. One that is repeated after a resume counts once."""
        if step <= self.last_step:
            return False
        self.last_step = step
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


def best_step(folder: RunFolder) -> int:
    """The step with the best validation loss among the complete checkpoints of a run, in its folder or its store."""
    rows: dict[int, Row] = {}
    for tier in ("store", "shared") if folder.load_run().checkpoint.store else ("shared",):
        try:
            rows |= {row.step: row for view in views(folder, tier) for row in view.rows() if row.complete}
        except (UserError, OSError):  # a store that cannot be asked: what is here must do
            if tier == "shared":
                raise
    best = best_of(folder, rows)
    if best is None:
        raise UserError(
            f"no checkpoint of {folder.name} was validated",
            evidence=f"checkpoints of steps {', '.join(map(str, sorted(rows))) or 'none'}",
            fix="--step N; checkpoint.keep_best=true saves after the best validation",
        )
    return best
