"""What happens beside training is a callback: validation, saving, metrics, and whatever a user adds.

To add one, write a subclass of `Callback` in a file of its own here and name it in `CALLBACKS` of loop.py, at the place
in the order that it needs. The hooks of a step:

    class PrintLoss(Callback):
        def after_step(self, state: TrainState) -> None:
            print(state.step, state.last_loss)

Every rank has every callback and calls its hooks at the same moment, so a hook may use `state.ranks`; what it decides
must be the same on all ranks. A callback that wants the run to end calls `state.stop(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.trainer.state import TrainState


class Callback:
    """Hooks that do nothing. All callbacks exist before the first `on_start`."""

    def __init__(self, state: TrainState) -> None:
        """The weights are there, nothing is announced and no tier is open for writing yet."""

    def on_start(self, state: TrainState) -> None:
        """Before the first step of this attempt."""

    def before_step(self, state: TrainState) -> None:
        """All ranks will train step `state.step + 1`; its batch is read."""

    def is_due(self, state: TrainState) -> bool:
        """Whether training stands still for this callback after the step just done.

        `state.pausing` says so to all callbacks: the metrics of all steps so far are then written first.
        """
        return False

    def after_step(self, state: TrainState) -> None:
        """Step `state.step` is done: `state.result`. The GPU may still compute it."""

    def on_end(self, state: TrainState) -> None:
        """No more steps: what remains to be done with the weights."""

    def on_close(self, state: TrainState) -> None:
        """Everything is done: write what is still open, and say how it ended."""
