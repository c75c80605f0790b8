"""What the GPU says about itself. Reads only: its clocks and limits are never changed."""

from __future__ import annotations

import shutil
import subprocess

FIELDS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def gpu_state() -> dict[str, str]:
    """The first GPU's state by field; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else {}


def describe(state: dict[str, str]) -> str:
    if not state:
        return "no NVIDIA GPU"
    return (
        f"{state['name']}, driver {state['driver_version']}, "
        f"SM clock {state['clocks.sm']} at rest, {state['clocks.max.sm']} at most, memory {state['clocks.mem']}, "
        f"power limit {state['power.limit']}, {state['temperature.gpu']} °C"
    )
