"""Try a request again while trying can help, for a bounded time, with growing and jittered pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
LONGEST_PAUSE_S = 20.0


class ShortBodyError(OSError):
    """Fewer bytes arrived than were announced."""


def retried(
    action: Callable[[], Value],
    *,
    worth_retrying: Callable[[BaseException], bool],
    patience_s: float,
    first_delay_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = random.random,
) -> Value:
    """`action()`; after a failure worth it again, until `patience_s` have passed since the first try."""
    begun, delay = clock(), first_delay_s
    while True:
        try:
            return action()
        except Exception as error:
            # Full jitter: ranks that failed together must not come back together.
            pause = min(delay, LONGEST_PAUSE_S) * draw()
            if not worth_retrying(error) or clock() + pause > begun + patience_s:
                raise
            sleep(pause)
            delay *= 2
