"""Render a run as a command for this machine. Pure: run and machine facts in, a request out."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Self

from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from windlass.errors import UserError
from windlass.runfolder import RUNS_VARIABLE
from windlass.spec import Run
from windlass.targets.launch.machine import Machine
from windlass.targets.launch.torchrun import FAULTS_VARIABLE, FOLDER_VARIABLE, Place, torchrun
from windlass.targets.protocol import with_ranks


@dataclass(frozen=True)
class LocalRequest:
    """One command, the environment it gets in addition to the user's, and how its end is answered."""

    argv: tuple[str, ...]
    folder: Path
    working_directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 3
    grace_seconds: int = 120

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        command = " \\\n  ".join([*variables, shlex.join(self.argv)])
        return f"cd {shlex.quote(str(self.working_directory))}\n{command}"

    def as_dict(self) -> dict[str, Any]:
        return {"target": "local", **to_jsonable_python(asdict(self))}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{key: part for key, part in value.items() if key != "target"})


def settle(run: Run, machine: Machine, environment: Mapping[str, str] | None = None) -> Run:
    """The run with its ranks counted: one per GPU, or CPU processes where there is no GPU or none is wanted.

    Threads of a rank: what the run file says, else the user's OMP_NUM_THREADS, else its share of the cores.
    """
    requested = run.resources
    num_gpus, num_processes = requested.gpus_per_node, requested.processes_per_node
    if num_gpus is None:
        num_gpus = min(len(machine.gpus), num_processes or len(machine.gpus))
        if num_gpus and num_processes and num_processes > num_gpus:
            raise UserError(
                f"resources.processes_per_node is {num_processes} but this machine has {num_gpus} GPU(s)",
                cause="on GPUs there is one rank per GPU",
                fix=f"resources.processes_per_node={num_gpus}    or, to train on the CPU: resources.gpus_per_node=0",
            )
    num_ranks = num_gpus or num_processes or 1
    users = (environment or {}).get("OMP_NUM_THREADS", "")
    threads = (
        requested.threads_per_process or (int(users) if users.isdecimal() else 0) or max(1, machine.cores // num_ranks)
    )
    return with_ranks(run, num_gpus, threads)


def render(run: Run, place: Place, *, faults: str | None = None) -> LocalRequest:
    """The torchrun command that trains a settled run."""
    folder = place.runs / run.name
    port = run.target.port
    rendezvous = ["--standalone"] if port is None else ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {
        "OMP_NUM_THREADS": str(run.resources.threads_per_process or 1),
        RUNS_VARIABLE: os.path.abspath(place.working_directory / place.runs),
        # the real path: a run is found again through any link that leads to it
        FOLDER_VARIABLE: os.path.realpath(place.working_directory / folder),
        # a SIGTERM to torchrun itself; the supervisor's own stop goes to the ranks, since torch 2.11 does not read this
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(run.checkpoint.grace_seconds),
        "PYTHONUNBUFFERED": "1",  # what a rank said before it was killed is in the log
    }
    if faults:
        environment[FAULTS_VARIABLE] = faults
    return LocalRequest(
        argv=torchrun(
            place.python,
            *rendezvous,
            "--nproc-per-node",
            str(run.resources.processes_per_node or 1),
            run_file=str(folder / "run.yaml"),
        ),
        folder=folder,
        working_directory=place.working_directory,
        environment=environment,
        max_restarts=run.target.max_restarts,
        grace_seconds=run.checkpoint.grace_seconds,
    )
