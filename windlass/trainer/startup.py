"""The start of a rank: where its time goes, memory kept for the next step, and what an earlier kill left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

COMPILING_S = 300.0  # an empty library may be one that is being linked now; none takes so long


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


KEPT = 256 << 20  # bytes; larger tensors are rare on a CPU, and are handed back
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of malloc.h


def keep_freed_memory() -> bool:
    """Keep memory that tensors on the CPU gave back: the next step needs it again.

    The C library hands large freed blocks back to the kernel, which then clears the same pages again in every step:
    with a tiny model 3 to 5 % of the time. False where it has no such switch (only GNU's has it), or refuses.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # In this order: the second without the first would hand back even more.
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(KEPT)) == 1 for name in (MMAP_THRESHOLD, TRIM_THRESHOLD))


def drop_unfinished_kernels() -> list[Path]:
    """Delete libraries that a compiler had opened and not written when it was killed, from torch's cache.

    torch takes a file that is there for a finished one, so that every later start would fail ("file too short").
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    dropped = []
    for library in Path(cache_dir()).glob("*/*.so"):
        with contextlib.suppress(OSError):  # another rank was faster
            status = library.stat()
            if status.st_size == 0 and time.time() - status.st_mtime > COMPILING_S:
                library.unlink()
                dropped.append(library)
    return dropped
