"""What this machine has for the tests: GPUs, an NCCL whose ranks may share one, MPS."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARY = "WINDLASS_TEST_NCCL"  # path of a libnccl.so.2 from 2.30 on, where torch's own is older
ON_CPU = "WINDLASS_TEST_ON_CPU"  # try the tests themselves, without a GPU
SHARING = (2, 30)  # NCCL before it refuses two ranks on one GPU


def backend() -> str:
    return "gloo" if os.environ.get(ON_CPU) else "nccl"


def gpu_count() -> int:
    if os.environ.get(ON_CPU):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_not(ranks: int) -> str | None:
    """Why so many ranks cannot be tested here; None where they can."""
    gpus = gpu_count()
    if os.environ.get(ON_CPU):
        return None
    if gpus == 0:
        return "no GPU on this machine"
    if gpus >= ranks or os.environ.get(LIBRARY):
        return None
    import torch

    version = torch.cuda.nccl.version()
    if version[:2] < SHARING:
        numbers = ".".join(map(str, version))
        return f"{ranks} ranks on {gpus} GPU(s) need NCCL 2.30, torch has {numbers}; {LIBRARY} may name another"
    return None


def environment(rank: int, ranks: int, port: int, *, local: int | None = None) -> dict[str, str]:
    """Of one rank; `local` ranks count as a node."""
    local = local or ranks
    found = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return found | sharing(ranks)


def sharing(ranks: int) -> dict[str, str]:
    """Settings with which ranks share GPUs; none where each has its own."""
    if os.environ.get(ON_CPU):
        return {"CUDA_VISIBLE_DEVICES": ""}
    if gpu_count() >= ranks:
        return {}
    found = {
        "WINDLASS_SHARE_GPUS": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "4",
    }
    library = os.environ.get(LIBRARY)
    return found | ({"LD_PRELOAD": library} if library else {})


@contextmanager
def side_by_side(folder: Path, ranks: int) -> Iterator[str]:
    """With MPS ranks on one GPU run side by side; without it they take turns. Says which it is."""
    control = shutil.which("nvidia-cuda-mps-control")
    if os.environ.get(ON_CPU):
        yield "on the CPU, over gloo"
        return
    if gpu_count() >= ranks:
        yield "a GPU for every rank"
        return
    if control is None or os.geteuid() != 0:
        yield "ranks take turns on the GPU: no MPS"
        return
    folder.mkdir(parents=True, exist_ok=True)
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in own.values():
        Path(path).mkdir(exist_ok=True)
    os.environ.update(own)
    started = subprocess.run([control, "-d"], capture_output=True, text=True, check=False)
    try:
        yield "ranks share the GPU through MPS" if started.returncode == 0 else f"no MPS: {started.stderr.strip()}"
    finally:
        subprocess.run([control], input="quit\n", text=True, capture_output=True, timeout=30, check=False)
        for name in own:
            os.environ.pop(name, None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(path: Path, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
