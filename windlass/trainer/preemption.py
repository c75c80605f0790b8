"""SIGTERM: remembered at once, acted on by all ranks together at the next step; a second one ends the process."""

from __future__ import annotations

import os
import signal
from types import FrameType

NOTICE = b"SIGTERM: all ranks save and stop at the next step; a second SIGTERM ends this rank at once\n"


class Preemption:
    """Whether this rank was told to stop. Ranks agree on it through the sums they exchange every step anyway."""

    def __init__(self) -> None:
        self.told = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        if self.told:
            os._exit(128 + signal.SIGTERM)
        self.told = True
        os.write(2, NOTICE)  # not through logging: a handler may interrupt a half-written log line
