"""What a fault costs a run of two pods: the pods' own coordinator against torchrun's elastic agent.

    python -m benchmarks.elastic [coordinator|torchrun] [FAULT ...]

Every pod is a group of processes on this machine, and is hurt as a pod would be. One that is gone is replaced after
REPLACED_SECONDS, as a job controller would. Seconds lost are those of `windlass show`: from the last new step before
the fault to the first new one after it. docs/coordinator.md has the table and what follows from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from windlass.api.summary import summarize
from windlass.common.files import read_json_lines
from windlass.plan import resolve
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import dump_run, parse_run
from windlass.targets.launch import processes

NODES, STEPS, EVERY, HURT_AT = 2, 30, 2, 5
REPLACED_SECONDS = 5.0
GIVEN_UP_SECONDS = 300.0  # a run that has not ended so long after a fault does not go on by itself
PROGRAMS = {"coordinator": ["windlass.targets.kubernetes.entry"], "torchrun": ["benchmarks.elastic_pod", "pod"]}
MARK = "WINDLASS_SCRATCH"
RUN = {
    "name": "tiny",
    "model": {"preset": "llama-tiny"},
    "data": {"source": "corpus:austen", "sequence_length": 32},
    "train": {"steps": STEPS, "global_batch": 6, "precision": "fp32", "warmup_steps": 0},
    "checkpoint": {"every": EVERY, "grace_seconds": 60},
    "resources": {"nodes": NODES, "gpus_per_node": 0, "processes_per_node": 1, "threads_per_process": 1},
    "target": {"kind": "kubernetes", "kubernetes": {"storage": "pvc:claim"}},
}


class Pods:
    """The pods of one run, which share a run folder."""

    def __init__(self, root: Path, program: str, faults: str) -> None:
        self.root, self.program = root, program
        # a second a step, so that faults come in the middle of training
        self.faults = ";".join([faults, *(f"sleep:rank=0,step={step},seconds=1" for step in range(1, STEPS))])
        root.mkdir(parents=True)
        (root / "run.yaml").write_text(dump_run(resolve(parse_run(RUN))))
        self.folder = RunFolder(root / "runs" / "tiny")
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.names: dict[int, str] = {}  # of the youngest pod of each number
        self.older: dict[str, subprocess.Popen[bytes]] = {}  # pods that live on, or are frozen
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.first_seen: dict[int, float] = {}  # when each rank's process was
        self.closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, node: int) -> None:
        name = self.names[node] = str(self.root / f"pod-{node}-{time.monotonic_ns()}")
        environment = {
            **os.environ,
            MARK: name,
            "WINDLASS_RUN_FILE": str(self.root / "run.yaml"),
            "WINDLASS_CARRIED": str(self.root / "nothing"),
            "WINDLASS_RUNS": str(self.root / "runs"),
            "WINDLASS_SHARED": "1",
            "WINDLASS_MEETING_HOST": "localhost",
            "WINDLASS_MEETING_PORT": str(self.port),
            "WINDLASS_NODES": str(NODES),
            "WINDLASS_NODE_INDEX": str(node),
            "WINDLASS_SUBMISSION": "a",
            "WINDLASS_TOKEN": "secret of the submission",
            "WINDLASS_POD_IP": "127.0.0.1",
            "WINDLASS_FAULTS": self.faults,
            "OMP_NUM_THREADS": "1",
        }
        with open(f"{name}.log", "wb") as log:
            command = [sys.executable, "-m", *PROGRAMS[self.program]]
            self.running[node] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def replace(self, node: int) -> None:
        """As a job controller does; the old pod may live on."""
        time.sleep(REPLACED_SECONDS)
        if self.running[node].poll() is None:
            self.older[self.names[node]] = self.running[node]
        self.start(node)

    def signal(self, name: str, number: int) -> None:
        """To every process of a pod at once."""
        for pid in processes.all_pids():
            if processes.environment(pid).get(MARK) == name:
                processes.send(pid, number)

    def _watch(self) -> None:
        while not self.closed.wait(0.3):
            for pid in processes.all_pids():
                variables = processes.environment(pid)
                if pid not in self.first_seen and variables.get(MARK) in self.names.values() and "RANK" in variables:
                    self.first_seen[pid] = time.time()

    def seconds_to_start(self) -> float | None:
        """From the last step before the fault until every rank has a new process, which then loads and resumes."""
        records = list(read_json_lines(self.folder.metrics))
        last = max((one["time"] for one in records if one.get("attempt") == 1), default=0.0)
        new = sorted(seen for seen in self.first_seen.values() if seen > last)
        return round(new[NODES - 1] - last, 1) if len(new) >= NODES else None

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + GIVEN_UP_SECONDS
        while max(steps_of(self.folder), default=0) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} within {GIVEN_UP_SECONDS:.0f} s")
            time.sleep(0.1)

    def ended(self) -> list[int | None]:
        """Exit codes, once all pods have one or nothing happens any more; pods that broke are replaced."""
        deadline = time.monotonic() + GIVEN_UP_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.running.values()):
            for node, process in list(self.running.items()):
                if (process.poll() or 0) > 128:  # codes that every kind of job answers with a new pod
                    self.replace(node)
            time.sleep(0.2)
        return [process.poll() for _, process in sorted(self.running.items())]

    def close(self) -> None:
        self.closed.set()
        for name in (*self.names.values(), *self.older):
            self.signal(name, signal.SIGKILL)
        for process in (*self.running.values(), *self.older.values()):
            process.wait()


def killed_pod(pods: Pods, node: int = 1) -> None:
    pods.signal(pods.names[node], signal.SIGKILL)
    pods.running[node].wait()
    pods.replace(node)


def killed_first_pod(pods: Pods) -> None:
    killed_pod(pods, node=0)


def lost_power(pods: Pods) -> None:
    """Connections stay open, and nothing comes over them."""
    pods.signal(pods.names[1], signal.SIGSTOP)
    pods.replace(1)


def killed_kubelet(pods: Pods) -> None:
    """The pod is replaced, and trains on where nobody can reach it any more."""
    pods.replace(1)


def drained(pods: Pods) -> None:
    pods.running[1].send_signal(signal.SIGTERM)
    pods.running[1].wait(GIVEN_UP_SECONDS)
    pods.replace(1)


def stranger(pods: Pods) -> None:
    """Another pod of the cluster writes where the rendezvous keeps its state, which every agent unpickles."""
    payload = b64encode(pickle.dumps(Payload(str(_trace(pods))))).decode()
    with contextlib.suppress(RuntimeError):  # the coordinator does not let it in
        store = TCPStore("127.0.0.1", pods.port, is_master=False, timeout=timedelta(seconds=60))
        store.set("torch.rendezvous.a", payload)


class Payload:
    """What a stranger would have the agents run."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.folder,)


def _trace(pods: Pods) -> Path:
    return pods.root / "a-stranger-was-here"


def nothing(pods: Pods) -> None:
    """The fault is in the ranks themselves."""


FAULTS: dict[str, tuple[Callable[[Pods], None], str]] = {
    "killed rank": (nothing, "kill:rank=1,step=5"),
    "killed pod": (killed_pod, ""),
    "killed first pod": (killed_first_pod, ""),
    "killed kubelet": (killed_kubelet, ""),
    "lost power": (lost_power, ""),
    "drained pod": (drained, ""),
    "NaN": (nothing, "nan:rank=1,step=5"),
    "stranger": (stranger, ""),
}


def measure(program: str, fault: str, root: Path) -> dict[str, Any]:
    hurt, faults = FAULTS[fault]
    pods = Pods(root, program, faults)
    try:
        for node in range(NODES):
            pods.start(node)
        pods.wait_for_step(HURT_AT - 1)
        hurt(pods)
        codes = pods.ended()
        summary = summarize(pods.folder)
        ends = [one for one in read_json_lines(pods.folder.history) if one["event"] == "exit"]
        return {
            "seconds_lost": round(summary.seconds_lost, 1),
            "seconds_to_start": pods.seconds_to_start(),
            "restarts": summary.restarts,
            "steps": summary.steps,
            "codes": codes,
            "codes_of_replaced": [process.poll() for process in pods.older.values()],
            "code_of_a_stranger_ran": _trace(pods).exists(),
            "reason": ends[-1].get("reason") if ends else "it did not end",
        }
    finally:
        pods.close()


def main() -> int:
    programs = [name for name in sys.argv[1:] if name in PROGRAMS] or list(PROGRAMS)
    faults = [name for name in sys.argv[1:] if name in FAULTS] or list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults:
            for program in programs:
                try:
                    found = measure(program, fault, Path(folder) / fault.replace(" ", "-") / program)
                except (TimeoutError, subprocess.TimeoutExpired) as error:
                    found = {"failed": str(error)}
                print(f"{fault:18} {program:12} {json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
