"""`windlass` as a process of its own, in a folder of its own, against the cluster of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.box.cluster import Cluster
from tests.cluster.box.layout import CLAIM
from tests.cluster.box.overlay import REPOSITORY, python
from tests.commands import run_forked
from tests.trainer.harness import train
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of

COMMAND_VARIABLE = "WINDLASS_TEST_COMMAND"  # what pods run in place of the entry: "-m benchmarks.elastic_pod pod"
STEPS, EVERY, HELD_STEP = 12, 3, 8
TRAINING = {
    "model": {"preset": "llama-tiny"},
    "data": {"source": "corpus:austen", "sequence_length": 32},
    "train": {"steps": STEPS, "global_batch": 6, "precision": "fp32"},
    "parallel": {"sharding": "full"},
    "resources": {"gpus_per_node": 0, "threads_per_process": 1, "nodes": 3},
    "checkpoint": {"every": EVERY, "grace_seconds": 60, "background": False},
}


class Bench:
    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {**cluster.environment(), "PYTHONPATH": str(REPOSITORY)}
        self.environment.pop("WINDLASS_RUNS", None)
        self.file = folder / "small.yaml"
        self.write(self.file)

    def write(self, path: Path, **sections: Any) -> Path:
        """A small run on three pods, with `sections` in place of its own."""
        overlay = self.cluster.overlay()
        container = overlay["containers"][0]
        claim = next(
            (one["persistentVolumeClaim"]["claimName"] for one in overlay["volumes"] if one["name"] == "runs"), CLAIM
        )
        # the product mounts the claim itself
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] != "runs"]
        overlay["volumes"] = [one for one in overlay["volumes"] if one["name"] != "runs"]
        options = {
            "namespace": self.namespace,
            "image": container["image"],
            "python": python() if self.cluster.is_box else "python3",
            "storage": f"pvc:{claim}",
            "cpu": "100m",
            "pod": overlay,
        }
        if COMMAND_VARIABLE in os.environ:
            container["command"] = [options["python"], *os.environ[COMMAND_VARIABLE].split()]
        value = {**TRAINING, "target": {"kind": "kubernetes", "kubernetes": options}, **sections}
        path.write_text(yaml.safe_dump(value, sort_keys=False))
        return path

    def windlass(self, *arguments: Any, timeout: float = 900, stdin: str = "") -> subprocess.CompletedProcess[str]:
        if not stdin:
            return run_forked(arguments, cwd=self.folder, env=self.environment, timeout=timeout)
        return subprocess.run(
            self._command(arguments),
            capture_output=True,
            text=True,
            input=stdin,
            timeout=timeout,
            check=False,
            cwd=self.folder,
            env=self.environment,
        )

    def must(self, *arguments: Any, timeout: float = 900, stdin: str = "") -> str:
        answer = self.windlass(*arguments, timeout=timeout, stdin=stdin)
        assert answer.returncode == 0, f"{arguments}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
        return answer.stdout

    def json(self, *arguments: Any) -> Any:
        return json.loads(self.must(*arguments, "--json"))

    def submit(self, name: str, *overrides: Any) -> RunFolder:
        """The job alone: nobody answers its failure by another one."""
        self.must("run", self.file, f"name={name}", "--detach", "--no-retry", *overrides)
        return self.run_folder(name)

    @contextmanager
    def following(self, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
        """A windlass process that goes on beside the test; what it printed is in `following.log`."""
        with (self.folder / "following.log").open("a") as output:
            process = subprocess.Popen(
                self._command(arguments), stdout=output, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
                env=self.environment,
            )  # fmt: skip
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def said(self) -> str:
        return (self.folder / "following.log").read_text()

    def show(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self.json("show", name)
        return value

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)

    def wait_for_step(self, name: str, step: int, seconds: float = 600) -> None:
        """Until the run folder has it: somebody must be following the run."""
        folder = self.run_folder(name)
        self.wait(lambda: max(steps_of(folder), default=0) >= step, f"step {step} of {name}", name, seconds)

    def wait_until_running(self, name: str, step: int = 1, seconds: float = 600) -> None:
        """Asking for it, so that nobody needs to follow."""
        self.wait(lambda: (self.show(name)["step"] or 0) >= step, f"step {step} of {name}", name, seconds)

    def wait(self, condition: Callable[[], Any], what: str, name: str = "", seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds} s: {what}\n{self.evidence(name)}")
            time.sleep(0.5)

    def evidence(self, name: str) -> str:
        """Everything that may explain a failure."""
        pods = self.cluster.kubectl("get", "pods", "-o", "wide", "-n", self.namespace, check=False)
        folder = self.run_folder(name)
        files = [folder.history, *sorted(folder.logs.glob("*.log"))] if name else []
        texts = [f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files if path.is_file()]
        return "\n".join([pods, *texts])

    def _command(self, arguments: Sequence[Any]) -> list[str]:
        return [sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]


def local_losses(folder: Path, ranks: int) -> dict[int, Any]:
    """Losses and gradient norms of the same run on this machine."""
    resources = {"gpus_per_node": 0, "threads_per_process": 1, "processes_per_node": ranks}
    whole = train(folder, {**TRAINING, "name": "whole", "resources": resources}, ranks=ranks, timeout=900)
    assert set(whole.codes) == {0}, whole.output
    return losses(whole.folder)


def losses(folder: RunFolder) -> dict[int, Any]:
    return {step: (one["loss"], one["grad_norm"]) for step, one in sorted(steps_of(folder).items())}


def events(folder: RunFolder, *names: str) -> list[dict[str, Any]]:
    return [one for one in read_json_lines(folder.history) if one["event"] in names]


def hold(seconds: float) -> tuple[str, str]:
    """Rank 0 pauses once before HELD_STEP, so that what a test does comes in the middle of training."""
    return ("--inject", f"sleep:rank=0,step={HELD_STEP},seconds={seconds}")
