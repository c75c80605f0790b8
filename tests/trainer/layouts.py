"""Train several runs one after the other in one process group: starting ranks is what takes time in a test."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.forking import context
from tests.trainer.harness import Result, free_port
from windlass.runfolder import RunFolder


def train_all(root: Path, runs: dict[str, dict[str, Any]], *, ranks: int, timeout: float = 300) -> dict[str, Result]:
    """Every run, by its name, on the same processes; the first that fails ends them all."""
    for name, run in runs.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(run | {"name": name}))
    environment = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WINDLASS_RUNS": str(root / "runs"),
        "WINDLASS_CACHE": os.environ["WINDLASS_CACHE"],
        "OMP_NUM_THREADS": "1",
    }
    logs = [root / f"console-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_be_rank, args=(own, log, [root / f"{name}.yaml" for name in runs])))
        processes[-1].start()
    for process in processes:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
    codes = [process.exitcode or 0 for process in processes]
    output = "".join(log.read_text(errors="replace") for log in logs)
    return {name: Result(RunFolder(root / "runs" / name), codes, output) for name in runs}


def _be_rank(environment: dict[str, str], log: Path, files: list[Path]) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    train_in_turn(files)
    sys.stdout.flush()
    os._exit(0)


def train_in_turn(files: list[Path]) -> None:
    """What one rank does, with its place among the others in the environment."""
    import torch
    import torch.distributed as dist

    from windlass.plan import check, resolve
    from windlass.spec import load_run
    from windlass.trainer.callbacks.preemption import Preemption
    from windlass.trainer.distributed.faults import Faults
    from windlass.trainer.distributed.peers import PeerWatch
    from windlass.trainer.distributed.ranks import join_ranks
    from windlass.trainer.loop import train
    from windlass.trainer.main import open_folder
    from windlass.trainer.preparation import prepare
    from windlass.trainer.state import Attempt

    ranks = None
    for file in files:
        run = resolve(load_run(str(file), []))
        check(run, int(os.environ["WORLD_SIZE"]))
        ranks = ranks or join_ranks(run)
        torch.use_deterministic_algorithms(ranks.device.type == "cpu")
        ours = dataclasses.replace(ranks, tensor=run.parallel.tensor, context=run.parallel.context)
        folder = RunFolder.of(run)
        prepared = prepare(run, ours)
        open_folder(folder, ours.rank)
        watch, faults = PeerWatch(), Faults(ours.rank, folder.logs)
        watch.begin(ours, limit_s=60, where=lambda faults=faults: faults.reached, on_lost=lambda _lost: os._exit(1))
        train(Attempt(run, prepared, folder, ours, faults, Preemption(), watch))
        dist.barrier(group=ours.host)
        watch.close()


if __name__ == "__main__":
    train_in_turn([Path(name) for name in sys.argv[1:]])
    os._exit(0)
