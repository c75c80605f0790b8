"""Run the real trainer for a benchmark, and read what it reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of


def train(folder: Path, run: dict[str, Any], *, threads: int) -> RunFolder:
    """Train `run` in one process of its own; its run folder."""
    found, command, environment = trainer_command(folder, run, threads=threads)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{run['name']} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return found


def trainer_command(folder: Path, run: dict[str, Any], *, threads: int) -> tuple[RunFolder, list[str], dict[str, str]]:
    """The run folder that `run` will have, and the command and environment that train it."""
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
    return RunFolder(folder / "runs" / name), [sys.executable, "-m", "windlass.trainer", str(file)], environment


def step_records(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for _, record in sorted(steps_of(folder).items())]


def events(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(folder.history) if record["event"] == name]
