"""What this machine has: GPUs, cores, memory and free disk, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    cores: int
    memory_bytes: int


def this_machine() -> Machine:
    return Machine(gpus=_gpus(), cores=_cores(), memory_bytes=_memory())


def free_bytes(path: Path) -> int:
    """Free space of the file system that `path`, which need not exist yet, would be on."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _gpus() -> tuple[Gpu, ...]:
    """GPUs that a process started here would see: nvidia-smi's, less what CUDA_VISIBLE_DEVICES hides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi")
    if program is None or visible == "":
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != 0:  # the driver is installed but there is no device
        return ()
    found = []
    for line in answer.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            found.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    if visible is None:
        return tuple(found)
    chosen = [part.strip() for part in visible.split(",")]
    if all(part.isdigit() for part in chosen):
        return tuple(found[int(part)] for part in chosen if int(part) < len(found))
    return tuple(found[: len(chosen)])  # by UUID


def _cores() -> int:
    """Cores this process may use: its affinity, and its control group's share of time."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def _memory() -> int:
    """Memory this process may use: the machine's, or its control group's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total
