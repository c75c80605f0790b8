"""`windlass doctor`: whether this machine can train, row by row, with the fix beside what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from windlass.cli.jobs import json_option
from windlass.errors import ExitCode
from windlass.runfolder import runs_root
from windlass.targets.launch.machine import Machine, free_bytes, this_machine

GIB = 2**30
LEAST_FREE_DISK = 5 * GIB
LEAST_SHM = 64 * 2**20
ASK_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count(),
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
}))
"""


@dataclass(frozen=True)
class Row:
    name: str
    state: Literal["ok", "warning", "missing"]
    text: str
    fix: str | None = None


@click.command(short_help="Say whether this machine can train.")
@json_option
def doctor(as_json: bool) -> int:
    """Say whether this machine can train.

    Exit code 1 only where training cannot work at all: a row is missing.
    """
    from windlass.cli.output import print_json, print_table, styled

    rows = list(examine())
    healthy = all(row.state != "missing" for row in rows)
    if as_json:
        print_json({"can_train": healthy, "rows": [asdict(row) for row in rows]})
    else:
        colours = {"ok": "green", "warning": "yellow", "missing": "red"}
        print_table(
            ["WHAT", "", "FOUND", "FIX"],
            [[row.name, styled(row.state, colours[row.state]), row.text, row.fix or ""] for row in rows],
        )
    return ExitCode.OK if healthy else ExitCode.FAILED


def examine() -> Iterator[Row]:
    machine = this_machine()
    yield _python()
    yield from _torch(machine)
    yield from _packages()
    yield _gpus(machine)
    yield Row("cores", "ok", str(machine.cores))
    yield Row("memory", "ok", f"{machine.memory_bytes / GIB:.1f} GiB")
    yield _disk()
    yield _shared_memory()
    yield _compiler()
    yield _port()


def _python() -> Row:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Row("python", "ok", f"{version}, {sys.executable}")


def _torch(machine: Machine) -> Iterator[Row]:
    """Asked in a process of its own: a torch that cannot be loaded must not take the doctor with it."""
    if importlib.util.find_spec("torch") is None:
        yield Row("torch", "missing", "not installed", "pip install 'windlass[train]'")
        return
    answer = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines() or ["no output"]
        yield Row("torch", "missing", lines[-1], "pip install --force-reinstall torch")
        return
    facts = json.loads(answer.stdout.strip().splitlines()[-1])
    yield Row("torch", "ok", f"{facts['version']}, CUDA {facts['cuda'] or 'none'}")
    if not facts["gloo"]:
        yield Row("gloo", "missing", "this torch has no gloo", "pip install torch, from PyPI")
    if machine.gpus and not facts["gpus"]:
        yield Row(
            "torch on GPU", "warning", "nvidia-smi sees GPUs, torch does not", "a torch build for this CUDA driver"
        )


def _packages() -> Iterator[Row]:
    needed = {"transformers": "train", "safetensors": "train"}
    useful = {"datasets": "train", "pyarrow": "train", "tensorboard": "tensorboard"}
    for name, extra in {**needed, **useful}.items():
        if importlib.util.find_spec(name) is None:
            fix = f"pip install 'windlass[{extra}]'"
            yield Row(name, "missing" if name in needed else "warning", "not installed", fix)
        else:
            from importlib.metadata import version

            yield Row(name, "ok", version(name))


def _gpus(machine: Machine) -> Row:
    if not machine.gpus:
        return Row("GPUs", "ok", "none: training runs on the CPU")
    first = machine.gpus[0]
    return Row("GPUs", "ok", f"{len(machine.gpus)} × {first.name}, {first.memory_bytes / GIB:.0f} GiB")


def _disk() -> Row:
    runs = runs_root()
    free = free_bytes(runs)
    text = f"{free / GIB:.1f} GiB free for {runs}/"
    if free < LEAST_FREE_DISK:
        return Row("disk", "warning", text, "set WINDLASS_RUNS to a folder on a larger disk")
    return Row("disk", "ok", text)


def _shared_memory() -> Row:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Row("/dev/shm", "warning", "not there, or not writable", "mount -t tmpfs tmpfs /dev/shm")
    size = shutil.disk_usage(path).total
    if size <= LEAST_SHM:
        return Row("/dev/shm", "warning", f"{size / 2**20:.0f} MiB", "docker run --shm-size=8g")
    return Row("/dev/shm", "ok", f"{size / GIB:.1f} GiB")


def _compiler() -> Row:
    """torch.compile builds C++ on the CPU and a small C launcher on GPUs."""
    wanted = os.environ.get("CXX")
    compiler = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return Row("compiler", "warning", "none, so no torch.compile", "apt-get install g++, or train.compile=false")
    return Row("compiler", "ok", compiler)


def _port() -> Row:
    """Ranks meet on a port of this machine."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Row("ports", "ok", f"free ones there, {probe.getsockname()[1]} for example")
    except OSError as error:
        return Row("ports", "missing", str(error), "let processes listen on 127.0.0.1")
