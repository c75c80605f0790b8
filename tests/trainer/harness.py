"""Train for real in tests: ranks are processes of their own, forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forking import context
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of


@dataclass
class Result:
    folder: RunFolder
    codes: list[int]  # exit code of each rank; negative: the signal that ended it
    output: str

    @property
    def losses(self) -> dict[int, float]:
        return {step: record["loss"] for step, record in sorted(steps_of(self.folder).items())}

    @property
    def grad_norms(self) -> dict[int, float]:
        return {step: record["grad_norm"] for step, record in sorted(steps_of(self.folder).items())}

    def events(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_json_lines(self.folder.history) if record["event"] == event]

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_json_lines(self.folder.metrics) if record["kind"] == kind]


@dataclass
class Job:
    """A started training; the test may watch it and interfere."""

    folder: RunFolder
    processes: list[Any]
    logs: list[Path]
    deadline: float
    killed: set[int] = field(default_factory=set)

    def signal(self, rank: int, number: int) -> None:
        self.killed.add(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, number)

    def wait_for(self, condition: Callable[[], bool], interval: float = 0.002) -> None:
        while not condition():
            if time.monotonic() > self.deadline:
                raise TimeoutError("the condition did not come true")
            if not any(process.is_alive() for process in self.processes):
                return
            time.sleep(interval)

    def step(self) -> int:
        return max(steps_of(self.folder), default=0)

    def result(self) -> Result:
        """Wait for all ranks. When one died, the others may wait for it: do what torchrun does then, sooner."""
        died_at: float | None = None
        while any(process.is_alive() for process in self.processes):
            now = time.monotonic()
            codes = [process.exitcode for process in self.processes]
            if died_at is None and any(code not in (None, 0, 75) for code in codes):
                died_at = now
            patience = 4 if any(code is not None and code < 0 for code in codes) else 15
            if (died_at and now > died_at + patience) or now > self.deadline:
                for process in self.processes:
                    process.kill()
                if now > self.deadline:
                    raise TimeoutError("ranks did not end:\n" + self.output())
            time.sleep(0.01)
        for process in self.processes:
            process.join()
        return Result(self.folder, [process.exitcode for process in self.processes], self.output())

    def output(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs if log.exists())


def start(
    root: Path,
    run: dict[str, Any],
    *,
    ranks: int = 1,
    faults: str = "",
    overrides: Sequence[str] = (),
    attempt: int = 1,
    timeout: float = 120,
    port: int | None = None,
    nodes: int = 1,
    prelude: Callable[[int], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Start `run` on so many processes with its run folder under `root`; `prelude(rank)` is called in each first.

    Ranks have the environment of the server that they are forked from, and `variables`.
    """
    root.mkdir(parents=True, exist_ok=True)
    name = run.get("name", "run")
    run_file = root / f"{name}.yaml"
    run_file.write_text(yaml.safe_dump({"name": name, **run}))
    port = port or free_port()
    processes, logs = [], []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % (ranks // nodes)),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WINDLASS_RUNS": str(root / "runs"),
            "WINDLASS_FAULTS": faults,
            "WINDLASS_ATTEMPT": str(attempt),
            **{name: os.environ[name] for name in ("WINDLASS_CACHE",) if name in os.environ},
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        log = root / f"console-{rank}.txt"
        process = context.Process(target=be_rank, args=(environment, log, [str(run_file), *overrides], prelude))
        process.start()
        processes.append(process)
        logs.append(log)
    return Job(RunFolder(root / "runs" / name), processes, logs, time.monotonic() + timeout)


def train(root: Path, run: dict[str, Any], **options: Any) -> Result:
    return start(root, run, **options).result()


def resume(root: Path, run: dict[str, Any], *, most: int = 5, **options: Any) -> Result:
    """Start a run again and again, as a launcher does, until it is finished."""
    for attempt in range(2, 2 + most):
        result = train(root, run, attempt=attempt, **options)
        if not any(result.codes):
            return result
    raise AssertionError(f"not finished after {most} resumes, exit codes {result.codes}:\n{result.output}")


def assert_same_on_other_ranks(root: Path, run: dict[str, Any], whole: Result) -> None:
    """Killed on 2 ranks and on 3, a run goes on with 1 and has the losses of one that nobody killed."""
    faults = "kill:rank=0,step=4;kill:rank=0,step=8"
    train(root, run, ranks=2, faults=faults)
    train(root, run, ranks=3, faults=faults, attempt=2)
    last = train(root, run, ranks=1, faults=faults, attempt=3)
    assert last.codes == [0], last.output
    assert [(event["step"], event["world_size"]) for event in last.events("resumed")] == [(2, 3), (6, 1)]
    assert list(last.losses.values()) == pytest.approx(list(whole.losses.values()), rel=1e-5)


def be_rank(
    environment: dict[str, str], log: Path, arguments: list[str], prelude: Callable[[int], None] | None
) -> None:
    """The life of one rank."""
    from windlass.trainer.callbacks.preemption import Preemption
    from windlass.trainer.main import run_and_exit

    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    preemption = Preemption()
    preemption.listen()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = ["windlass.trainer", *arguments]
    if prelude:
        prelude(int(environment["RANK"]))
    run_and_exit(preemption)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
