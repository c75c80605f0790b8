"""SIGTERM: remembered at once, acted on by all ranks together at the next step; a second one ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

NOTICE = b"SIGTERM: all ranks save and stop at the next step; a second SIGTERM ends this rank at once\n"
# A scheduler that signals every process of a job reaches a rank twice, directly and through its launcher.
ONE_REQUEST_SECONDS = 2.0


class Preemption:
    """Whether this rank was told to stop. Ranks agree on it through the sums they exchange every step anyway."""

    def __init__(self) -> None:
        self.requested = False
        self.since: float | None = None  # when, by the monotonic clock

    def listen(self) -> None:
        """Hear SIGTERM from now on.

        A thread counts: while the main one waits for other ranks in a collective, Python runs no signal handler, and
        just then a second SIGTERM has to work.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._count, args=(reading,), name="preemption", daemon=True).start()

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True

    def _count(self, reading: int) -> None:
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        first = time.monotonic()
        self.requested, self.since = True, first
        os.write(2, NOTICE)  # not through logging, which may be in the middle of a line
        while signal.SIGTERM not in os.read(reading, 64) or time.monotonic() < first + ONE_REQUEST_SECONDS:
            pass
        os._exit(128 + signal.SIGTERM)
