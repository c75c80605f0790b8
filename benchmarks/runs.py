"""Run the real trainer for a benchmark, and read what it reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from windlass.runfolder import RunFolder, read_json_lines, steps_of


def train(folder: Path, run: dict[str, Any], *, threads: int) -> RunFolder:
    """Train `run` in one process of its own; its run folder."""
    found, process = trainer_process(folder, run, threads=threads)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{run['name']} ended with {process.returncode}:\n{said.decode()}")
    return found


def trainer_process(
    folder: Path, run: dict[str, Any], *, threads: int, output: int = subprocess.PIPE
) -> tuple[RunFolder, subprocess.Popen[bytes]]:
    """The run folder of `run`, and the process that has begun to train it: a group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    name = run["name"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(run))
    environment = {
        **os.environ,
        "WINDLASS_RUNS": str(folder / "runs"),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass.trainer", str(file)],
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return RunFolder(folder / "runs" / name), process


def step_records(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for _, record in sorted(steps_of(folder).items())]


def events(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(folder.history) if record["event"] == name]
