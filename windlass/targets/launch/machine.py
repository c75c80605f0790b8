"""What this machine has and which one it is: GPUs, cores, memory, disk space and identity, found without torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from windlass.errors import UserError

NO_SPACE = "No space left on device"
FULL_BYTES = 2**16  # a disk with less than this free takes no more records


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    gpus: tuple[Gpu, ...]
    cores: int
    memory_bytes: int


@dataclass(frozen=True)
class HostIdentity:
    """Where a process runs. A host name may change, or be shared by two machines; the rest does not."""

    host: str
    machine: str | None  # of /etc/machine-id: the same after a restart, but also in clones of one disk image
    boot: str | None  # new with every start of the kernel, and never the same on two machines
    pids: str | None  # the namespace in which a process number means something: containers have their own

    def sees_processes_of(self, other: HostIdentity) -> bool:
        """Whether a process number of `other` names the same process here."""
        if other.boot and self.boot:
            return other.boot == self.boot and (not other.pids or not self.pids or other.pids == self.pids)
        return other.host == self.host  # written before boots were recorded

    def was_restarted_since(self, other: HostIdentity) -> bool:
        """Whether `other` is this machine before its last restart; clones of it have other names."""
        known = bool(other.boot and self.boot and other.machine)
        return known and other.boot != self.boot and other.machine == self.machine and other.host == self.host


@cache
def this_host() -> HostIdentity:
    pids = None
    with contextlib.suppress(OSError):
        pids = os.readlink("/proc/self/ns/pid")
    return HostIdentity(
        host=socket.gethostname(),
        machine=_hashed(_line("/etc/machine-id") or _line("/var/lib/dbus/machine-id")),
        boot=_line("/proc/sys/kernel/random/boot_id"),
        pids=pids,
    )


def _hashed(identity: str | None) -> str | None:
    """machine-id(5) asks that the number itself be kept on the machine."""
    return hashlib.sha256(f"windlass {identity}".encode()).hexdigest()[:16] if identity else None


def _line(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except (OSError, ValueError):
        return None


def this_machine() -> Machine:
    return Machine(gpus=_gpus(), cores=_cores(), memory_bytes=_memory())


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
    gpus = []
    for line in answer.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            gpus.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    if visible is None:
        return tuple(gpus)
    chosen = [part.strip() for part in visible.split(",")]
    if all(part.isdigit() for part in chosen):
        return tuple(gpus[int(part)] for part in chosen if int(part) < len(gpus))
    return tuple(gpus[: len(chosen)])  # by UUID


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
    """Memory this process may use: the machine's, or the least limit of its control groups where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [group_limit(group) for group in memory_groups()]
    return min([total, *(limit for limit in limits if limit is not None)])


def group_limit(group: Path) -> int | None:
    """The memory limit of a control group of version 2 or 1; None where it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": none
            limit = int((group / name).read_text())
            return limit if limit < 2**60 else None
    return None


def memory_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Folders of the control groups that account for this process's memory: version 2, or version 1's controller."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        # inside a container the path may be the host's: then what is mounted at the root is the container's own group
        group = base / path.lstrip("/")
        while True:
            if group.is_dir():
                yield group
            if group == base:
                break
            group = group.parent


def free_bytes(path: Path) -> int:
    """Free space of the file system that `path`, which need not exist yet, would be on."""
    return shutil.disk_usage(nearest_existing(path)).free


def is_full(path: Path) -> bool:
    return free_bytes(path) < FULL_BYTES


def full_disk(path: Path, reports: Iterable[str] = ()) -> str | None:
    """That the disk of a run folder is full, in words: it has no room, or somebody's report says that it had none."""
    full = is_full(path) or any(NO_SPACE in report for report in reports)
    return f"the disk of {path} is full" if full else None


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def folder_can_be_made(folder: Path) -> None:
    parent = nearest_existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"the run folder {folder} cannot be made",
            evidence=f"{parent} is {'not writable' if parent.is_dir() else 'not a folder'}",
            fix="set WINDLASS_RUNS to a folder of your own",
        )


def space_is_there(folder: Path, bytes_needed: int | None) -> None:
    free = free_bytes(folder)
    if bytes_needed is not None and bytes_needed > free:
        raise UserError(
            f"the checkpoints of this run need {_size(bytes_needed)}, {_size(free)} are free",
            evidence=f"file system of {folder}",
            fix="set WINDLASS_RUNS to a larger disk    or, where one checkpoint fits, checkpoint.keep=1",
        )


def _size(number: int) -> str:
    """Bytes in a unit in which they are not nothing."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
