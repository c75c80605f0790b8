"""torchrun, as every target starts it: its command, the variables of a run's processes, and what its log tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windlass.targets.launch.tail import Tail

FOLDER_VARIABLE = "WINDLASS_FOLDER"  # marks every process of a run, so that none is ever lost from sight
ATTEMPT_VARIABLE = "WINDLASS_ATTEMPT"
FAULTS_VARIABLE = "WINDLASS_FAULTS"
SURVIVOR_SECONDS = 5.0  # for the ranks that outlive a failed one to write down what they saw
CLOSING_RANKS = "closing signal SIGTERM"  # torchrun's words, and the next too
WAS_TERMINATED = "death signal, shutting down workers"


@dataclass(frozen=True)
class Place:
    """Where a run finds things: the same on every node."""

    runs: Path  # the folder of run folders
    working_directory: Path
    python: str


def torchrun(python: str, *options: str, run_file: str) -> tuple[str, ...]:
    """The command that starts the ranks of one node."""
    return (python, "-m", "torch.distributed.run", *options, "-m", "windlass.trainer", run_file)


class TorchrunLog:
    """Notices in torchrun's log that a rank failed, and that torchrun therefore ends the others."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._tail = Tail(path, offset=offset)
        self._was_terminated = False  # somebody sent torchrun a SIGTERM: then its ranks are saving

    def shows_failure(self) -> bool:
        """Whether a rank has failed since the last call."""
        has_failed = False
        for line in self._tail.lines():
            self._was_terminated = self._was_terminated or WAS_TERMINATED in line
            has_failed = has_failed or (CLOSING_RANKS in line and not self._was_terminated)
        return has_failed
