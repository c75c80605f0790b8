"""GPUs: memory, dense peaks and bandwidths, with where each number comes from."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from windlass.errors import UserError


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float  # what torch reports as the device's total
    bf16_tflops: float | None  # dense; None: no bf16 units
    fp8_tflops: float | None
    fp32_tflops: float
    bandwidth_tb_s: float
    nvlink_gb_s: float | None  # both directions together; None: PCIe only
    source: str


@cache
def gpus() -> dict[str, Gpu]:
    entries = json.loads(resources.files(__package__).joinpath("gpus.json").read_text())
    return {entry["name"]: Gpu(**entry) for entry in entries}


def gpu(name: str) -> Gpu:
    """A GPU by the name a user types: case, spaces and dashes do not matter."""
    names = {_plain(known): known for known in gpus()}
    if _plain(name) in names:
        return gpus()[names[_plain(name)]]
    near = [known for plain, known in names.items() if plain.startswith(_plain(name))] or [
        names[plain] for plain in difflib.get_close_matches(_plain(name), names, 2, cutoff=0.5)
    ]
    raise UserError(
        f"there is no GPU {name!r} in the catalogue",
        evidence=f"GPUs: {', '.join(gpus())}",
        fix=" or ".join(f"--gpu '{known}'" if " " in known else f"--gpu {known}" for known in near) or None,
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU that CUDA or nvidia-smi names, such as `NVIDIA A100-SXM4-80GB`; None where the catalogue lacks it."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    fitting = [gpu for gpu in gpus().values() if set(re.split(r"[^A-Z0-9]+", gpu.name.upper())) <= words]
    return max(fitting, key=lambda gpu: len(gpu.name), default=None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))
