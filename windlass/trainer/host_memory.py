"""Keep memory that tensors on the CPU gave back: the next step needs it again.

The C library hands large freed blocks back to the kernel, which then clears the same pages again in every step: with a
tiny model 3 to 5 % of the time.
"""

from __future__ import annotations

import ctypes

KEPT = 256 << 20  # bytes; larger tensors are rare on a CPU, and are handed back
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of malloc.h


def keep_freed_memory() -> bool:
    """False where the C library has no such switch (only GNU's has it), or refuses; nothing is changed then."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # In this order: the second without the first would hand back even more.
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(KEPT)) == 1 for name in (MMAP_THRESHOLD, TRIM_THRESHOLD))
