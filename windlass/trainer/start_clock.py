"""Where the time until the first step goes: one line of the log, by what a start is made of."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartClock:
    """Seconds since the process began, cut at marks."""

    def __init__(self) -> None:
        self._begin = self._last = process_begin()
        self._parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """`part` ended now."""
        now = time.time()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def describe(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts.items())
        return f"first step done {self._last - self._begin:.1f} s after the start: {parts}"


def process_begin() -> float:
    """When this process was started; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))


clock = StartClock()
