"""Versions asked of the libraries that a process has loaded, not of package metadata."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import re
from typing import Any

PLACES = (
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*",
    "/opt/aws-ofi-nccl/lib*",
    "/opt/amazon/efa/lib*",
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
)


def loaded_versions() -> dict[str, str | None]:
    import torch

    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": cuda_runtime() or getattr(getattr(torch, "version", None), "cuda", None),
        "nccl": nccl_version(),
        "cudnn": cudnn_version(torch),
        "libfabric": libfabric_version(),
        "ofi": ofi_plugin()[1],
    }
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available():
        found["gpu"] = f"{cuda.device_count()} × {cuda.get_device_name(0)}"
    return found


def same_version(found: str | None, asked: str) -> bool:
    """2.15 is met by 2.15.0+cu132; 2.15.0 is not met by 2.15.1; cpu is met by no CUDA at all."""
    if found is None:
        return asked in ("cpu", "none")
    have, wanted = (text.split("+")[0].split(".") for text in (found, asked))
    return have[: len(wanted)] == wanted


def cuda_runtime() -> str | None:
    number = ctypes.c_int()
    for path in mapped("libcudart"):
        if ctypes.CDLL(path).cudaRuntimeGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return None


def nccl_version() -> str | None:
    number = ctypes.c_int()
    for path in mapped("libnccl.so"):
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            return _dotted(number.value)
    return None


def cudnn_version(torch: Any) -> str | None:
    try:
        value = torch.backends.cudnn.version()
    except (AttributeError, RuntimeError):
        return None
    return _dotted(value) if value else None


def libfabric_version() -> str | None:
    for path in find_libraries("libfabric.so*"):
        try:
            value = ctypes.CDLL(path).fi_version()
        except (OSError, AttributeError):
            continue
        return f"{value >> 16}.{value & 0xFFFF}"
    return None


def ofi_plugin() -> tuple[str | None, str | None]:
    """The file of NCCL's EFA plugin, and the version that is written in it."""
    for path in find_libraries("libnccl-net*.so*"):
        with open(path, "rb") as file:
            found = re.search(rb"aws-ofi-nccl[ /_-]v?(\d+\.\d+\.\d+)", file.read())
        return path, found.group(1).decode() if found else None
    return None, None


def find_libraries(pattern: str) -> list[str]:
    folders = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part] + list(PLACES)
    found = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, pattern)))]
    return list(dict.fromkeys(map(os.path.realpath, found)))


def mapped(name: str) -> list[str]:
    """Libraries of this process whose file name begins so."""
    with open("/proc/self/maps") as file:
        paths = [line.split(None, 5)[5].strip() for line in file if "/" in line]
    return sorted({path for path in paths if os.path.basename(path).startswith(name)})


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
