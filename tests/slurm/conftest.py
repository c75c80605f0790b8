"""One real Slurm for all tests of this folder, and `windlass` beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, why_not
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of

STEPS, EVERY, HELD_STEP = 12, 3, 8


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    slurm = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


class Bench:
    """`windlass` as a process of its own, in a folder of its own, with or without Slurm's configuration."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in environment.items() if name != "WINDLASS_RUNS"}
        self.environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        self.file = folder / "small.yaml"
        self.file.write_text(
            "model: {preset: llama-tiny}\n"
            "data: {source: 'corpus:austen', sequence_length: 32}\n"
            f"train: {{steps: {STEPS}, global_batch: 6, precision: fp32}}\n"
            "parallel: {sharding: full}\n"
            "resources: {gpus_per_node: 0, threads_per_process: 1}\n"
            f"checkpoint: {{every: {EVERY}, grace_seconds: 15, background: false}}\n"
        )

    def windlass(self, *arguments: Any, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=self.folder,
            env=self.environment,
            preexec_fn=as_in_a_terminal,
        )

    def run(self, *arguments: Any) -> dict[str, Any]:
        answer = self.windlass("run", self.file, "--json", *arguments)
        assert answer.stdout, answer.stderr
        return json.loads(answer.stdout) | {"returncode": answer.returncode}

    def submit(self, name: str, *arguments: Any) -> RunFolder:
        """The job alone: nobody answers its failure by another one."""
        alone = ("--on", "slurm", "--detach", "--no-retry")
        answer = self.windlass("run", self.file, f"name={name}", *alone, *arguments)
        assert answer.returncode == 0, answer.stderr
        return self.run_folder(name)

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(Path(self.environment.get("WINDLASS_RUNS", self.folder / "runs")) / name)

    def show(self, name: str) -> dict[str, Any]:
        answer = self.windlass("show", name, "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    def wait_for_step(self, folder: RunFolder, step: int, seconds: float = 120) -> None:
        wait(lambda: max(steps_of(folder), default=0) >= step, f"step {step}", folder, seconds)

    def wait_for_end(self, name: str, seconds: float = 180) -> dict[str, Any]:
        folder = self.run_folder(name)
        wait(lambda: any(events(folder, "exit")), "an end", folder, seconds)
        return self.show(name)


def as_in_a_terminal() -> None:
    """What nohup, or a shell's `&`, lets its children ignore is heeded again: tests send these signals."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def wait(condition, what, folder, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                for path in [folder.history, *folder.logs.glob("*")]
                if path.is_file()
            )
            raise TimeoutError(f"not within {seconds} s: {what}\n{logs}")
        time.sleep(0.1)


def events(folder, *names):
    return [record for record in read_json_lines(folder.history) if record["event"] in names]


def losses(folder):
    return {step: (metrics["loss"], metrics["grad_norm"]) for step, metrics in sorted(steps_of(folder).items())}


def job_of(folder):
    return json.loads((folder.path / "slurm.json").read_text())["job"]


def hold(seconds: float) -> tuple[str, str]:
    """Rank 0 pauses once before HELD_STEP, so that what a test does comes in the middle of training."""
    return ("--inject", f"sleep:rank=0,step={HELD_STEP},seconds={seconds}")


@pytest.fixture
def bench(cluster, tmp_path):
    return Bench(tmp_path, cluster.environment())


@pytest.fixture(scope="session")
def undisturbed(cluster, tmp_path_factory):
    """Losses and gradient norms of the same run on this machine, by number of ranks."""
    known: dict[int, Any] = {}

    def train(ranks: int):
        if ranks not in known:
            local = Bench(tmp_path_factory.mktemp(f"local-{ranks}"), dict(os.environ))
            answer = local.run("name=whole", f"resources.processes_per_node={ranks}")
            assert answer["state"] == "finished", answer
            known[ranks] = losses(local.run_folder("whole"))
        return known[ranks]

    return train
