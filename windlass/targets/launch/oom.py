"""Whether the kernel killed a process for memory: counters of control groups and of the machine, the kernel's log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from windlass.targets.launch.machine import group_limit, memory_groups

GIB = 2**30
KILLED_PROCESS = re.compile(r"[Kk]illed process (\d+)")
KERNEL_LOG = Path("/dev/kmsg")


class OomWatch:
    """What the kernel has killed for memory since this was made. Make it before the ranks are started."""

    def __init__(self, groups: list[Path] | None = None, vmstat: Path = Path("/proc/vmstat")) -> None:
        self.groups = list(memory_groups()) if groups is None else groups
        self.vmstat = vmstat
        self._groups_before = {group: group_kills(group) for group in self.groups}
        self._machine_before = _kills(vmstat)

    def why(self, pids: Collection[int], kernel_log: Path = KERNEL_LOG) -> str | None:
        """Why the kernel killed one of these processes for memory; None where nothing says that it did."""
        for group in self.groups:  # the innermost first
            if group_kills(group) > self._groups_before[group]:
                limit = group_limit(group)
                return (
                    f"the memory limit of its control group{f', {limit / GIB:.1f} GiB,' if limit else ''} was reached"
                )
        named = set(killed_by_kernel(kernel_log))
        if named & set(pids):
            return "the machine ran out of memory"
        if not named and _kills(self.vmstat) > self._machine_before:
            return "the machine ran out of memory at that time"  # the log cannot be read: it may have been another's
        return None


def group_kills(group: Path) -> int:
    """Processes of a control group that were killed for memory: version 2's events, or version 1's control file."""
    return max(_kills(group / "memory.events"), _kills(group / "memory.oom_control"))


def killed_by_kernel(log: Path = KERNEL_LOG) -> Iterator[int]:
    """Process numbers that the kernel's log names as killed for memory; none where it may not be read."""
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(handle, 8192)
            except BrokenPipeError:  # overwritten while it was read: the next one is there
                continue
            except OSError:  # nothing more
                return
            if not record:
                return
            for match in KILLED_PROCESS.finditer(record.decode(errors="replace")):
                yield int(match[1])
    finally:
        os.close(handle)


def _kills(path: Path) -> int:
    """The counter `oom_kill` of a file of `name number` lines; 0 where it is not there."""
    with contextlib.suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0
