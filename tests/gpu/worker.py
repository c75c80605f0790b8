"""One rank of a group that trains many cases in one process: its start and its imports are paid once."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.cases import PLANTED
from tests.gpu.machine import wait_for

PATIENCE_S = 400  # for a case of another group that this one goes on from


def main(plan_file: str) -> None:
    """`plan_file`: a list of jobs, the same for every rank of the group; see runner.Job."""
    jobs: list[dict[str, Any]] = json.loads(Path(plan_file).read_text())
    rank = int(os.environ["RANK"])
    for job in jobs:
        done = Path(job["done"]) / f"{job['name']}.{rank}"
        if done.exists():
            continue  # of an earlier group that a case ended
        began = time.monotonic()
        if job.get("after") and not wait_for(Path(job["after"]), PATIENCE_S):
            done.write_text(json.dumps({"code": -1, "why": f"{job['after']} did not come"}))
            continue
        code = train(job, rank)
        done.write_text(json.dumps({"code": code, "seconds": round(time.monotonic() - began, 1)}))
        clean()


def train(job: dict[str, Any], rank: int) -> int:
    from windlass.trainer.callbacks.preemption import Preemption
    from windlass.trainer.main import main as run_trainer

    os.environ.update(job["environment"])
    os.environ["MASTER_PORT"] = agreed_port(Path(job["done"]) / f"{job['name']}.port", rank)
    os.environ["LOCAL_RANK"] = str(rank % int(os.environ["LOCAL_WORLD_SIZE"]))
    preemption = Preemption()
    if "term:" in job["environment"].get("WINDLASS_FAULTS", ""):
        preemption.listen()
    restore = plant_wrong_scale() if job.get("planted") and rank == 1 else None
    try:
        return run_trainer(preemption, [job["run_file"]])
    finally:
        if restore:
            restore()


def agreed_port(file: Path, rank: int) -> str:
    """Of rank 0's choice just before it is used, below those that the kernel gives to connections."""
    if rank == 0:
        draw = random.Random(f"{file}{os.getpid()}")
        while True:
            port = draw.randint(15000, 31000)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    break
        partial = file.with_suffix(".new")
        partial.write_text(str(port))
        partial.rename(file)
    if not wait_for(file, 60):
        raise TimeoutError(f"rank 0 has chosen no port: {file}")
    return file.read_text()


def plant_wrong_scale() -> Any:
    """This rank's gradient is a little too large, its loss is not."""
    from windlass.trainer.step import Stepper

    right = Stepper.backward

    def wrong(self: Any, batch: Any, total_labels: float, **options: Any) -> Any:
        return right(self, batch, total_labels / PLANTED, **options) / PLANTED

    Stepper.backward = wrong  # type: ignore[method-assign]

    def restore() -> None:
        Stepper.backward = right  # type: ignore[method-assign]

    return restore


def clean() -> None:
    """Leave nothing of a case to the next one."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    handlers = logging.getLogger("windlass")
    for handler in list(handlers.handlers):
        handlers.removeHandler(handler)
        handler.close()
    torch._dynamo.reset()
    gc.enable()
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # as ranks do: gloo's threads abort a process that is torn down in the usual way
