"""Try something again while that can help. Callers decide by each failure how long to pause, or to give up."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
PauseAfter = Callable[[Exception, int], float | None]


def retried(
    action: Callable[[], Value], *, pause_after: PauseAfter, sleep: Callable[[float], object] = time.sleep
) -> Value:
    """`action()`; after a failure again, once the seconds that `pause_after(error, failures)` returns have passed.

    The error is raised if that is None. `pause_after` may also raise a better one.
    """
    failures = 0
    while True:
        try:
            return action()
        except Exception as error:
            failures += 1
            pause = pause_after(error, failures)
            if pause is None:
                raise
            sleep(pause)


def doubling(first_s: float, failures: int, longest_s: float = math.inf) -> float:
    """The pause after so many failures in a row: it doubles each time, up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s)


def within(
    patience_s: float,
    *,
    first_s: float,
    longest_s: float,
    worth_retrying: Callable[[Exception], bool],
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = random.random,
) -> PauseAfter:
    """Pauses after failures that are worth it, until `patience_s` have passed since now."""
    begun = clock()

    def pause_after(error: Exception, failures: int) -> float | None:
        # Full jitter: ranks that failed together must not come back together.
        pause = doubling(first_s, failures, longest_s) * draw()
        return pause if worth_retrying(error) and clock() + pause <= begun + patience_s else None

    return pause_after
