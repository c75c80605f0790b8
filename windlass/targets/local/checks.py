"""What would fail later on this machine, said before anything is created."""

from __future__ import annotations

import errno
import importlib.util
import socket
from pathlib import Path

from windlass.errors import UserError
from windlass.spec import Run
from windlass.targets.launch.machine import Machine, folder_can_be_made, space_is_there


def check(run: Run, machine: Machine, folder: Path, *, bytes_needed: int | None) -> list[str]:
    """Raise the first thing that cannot work; return what will work, but badly."""
    extras_are_installed(run)
    port_is_free(run.target.port)
    folder_can_be_made(folder)
    space_is_there(folder, bytes_needed)
    return warnings(run, machine)


def one_node(run: Run) -> None:
    if run.resources.nodes > 1:
        raise UserError(
            f"the local target is one machine, but resources.nodes is {run.resources.nodes}",
            fix="resources.nodes=1",
        )


def gpus_are_there(run: Run, machine: Machine) -> None:
    requested, num_gpus = run.resources.gpus_per_node or 0, len(machine.gpus)
    if run.train.fp8 and not num_gpus:
        raise UserError("train.fp8 needs a GPU with fp8 units, and this machine has no GPU", fix="train.fp8=false")
    if requested > num_gpus:
        have = f"{num_gpus or 'no'} GPU{'s' if num_gpus != 1 else ''}"
        raise UserError(
            f"resources.gpus_per_node is {requested} but this machine has {have}",
            evidence="nvidia-smi lists none" if not num_gpus else ", ".join(gpu.name for gpu in machine.gpus),
            fix=f"resources.gpus_per_node={num_gpus}" + ("    trains on the CPU" if not num_gpus else ""),
        )


def extras_are_installed(run: Run) -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"training needs {' and '.join(missing)}, not installed here", fix="pip install 'windlass[train]'"
        )
    if "wandb" in run.train.loggers and importlib.util.find_spec("wandb") is None:
        raise UserError("train.loggers names wandb, which is not installed here", fix="pip install 'windlass[wandb]'")
    if (run.train.tensorboard or "tensorboard" in run.train.loggers) and importlib.util.find_spec(
        "tensorboard"
    ) is None:
        raise UserError(
            "train.tensorboard needs tensorboard, not installed here",
            fix="pip install 'windlass[tensorboard]'    or train.tensorboard=false",
        )


def port_is_free(port: int | None) -> None:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise UserError(
                f"the rendezvous port {port} is taken" if taken else f"the rendezvous port {port} cannot be used",
                evidence=str(error),
                cause="another run or program listens there" if taken else None,
                fix=f"target.port={port + 1 if port < 65535 else port - 1}    or target.port=null: any free one",
            ) from None


def warnings(run: Run, machine: Machine) -> list[str]:
    ranks, threads = run.resources.processes_per_node or 1, run.resources.threads_per_process or 1
    if not run.resources.gpus_per_node and ranks * threads > machine.cores:
        return [f"{ranks} processes of {threads} thread(s) share {machine.cores} cores: training will be slow"]
    return []
