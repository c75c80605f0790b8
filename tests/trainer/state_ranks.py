"""Ranks that hold a state in some layout and save or resume it, without a model and without training."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.trainer.harness import context, free_port

Shapes = dict[str, tuple[int, ...]]
LAYOUTS: dict[str, Callable[[int], tuple[tuple[int, ...], list[Placement]]]] = {
    "shard": lambda ranks: ((ranks,), [Shard(0)]),
    "tensor × shard": lambda ranks: ((ranks // 2, 2), [Shard(0), Shard(1)]),
    "replicate": lambda ranks: ((ranks,), [Replicate()]),
}


@dataclass
class StateRanks:
    """One run folder each, as pods without a shared folder have, and one store for all."""

    root: Path
    shapes: Shapes
    store: str
    environment: dict[str, str] = field(default_factory=dict)
    prelude: Callable[[int], None] | None = None
    started: int = 0

    def start(self, verb: str, *, ranks: int, layout: str = "shard", step: int = 1, **checkpoint: Any) -> StateJob:
        self.started += 1
        folder = self.root / f"job-{self.started}"
        port, processes = free_port(), []
        for rank in range(ranks):
            environment = {
                **self.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "WINDLASS_RUNS": str(folder / f"pod-{rank}"),
            }
            section = {"store": self.store, "direct": True, "upload_seconds": 30, **checkpoint}
            arguments = (environment, self.prelude, folder / f"{rank}.json", verb, self.shapes, layout, step, section)
            processes.append(context.Process(target=be_rank, args=arguments))
        for process in processes:
            process.start()
        return StateJob(folder, processes)

    def run(self, verb: str, **options: Any) -> list[dict[str, Any]]:
        return self.start(verb, **options).results()


@dataclass
class StateJob:
    folder: Path
    processes: list[Any]

    def results(self, seconds: float = 150) -> list[dict[str, Any]]:
        """What every rank found."""
        self.end(seconds)
        codes = [process.exitcode for process in self.processes]
        assert codes == [0] * len(codes), codes
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(codes))]

    def end(self, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in self.processes):
                deadline = min(deadline, time.monotonic() + 3)  # the others wait for the one that died
            time.sleep(0.01)
        for process in self.processes:
            process.kill()
            process.join()


def be_rank(
    environment: dict[str, str],
    prelude: Callable[[int], None] | None,
    result: Path,
    verb: str,
    shapes: Shapes,
    layout: str,
    step: int,
    section: dict[str, Any],
) -> None:
    from windlass.plan import resolve
    from windlass.runfolder import RunFolder
    from windlass.spec import parse_run
    from windlass.trainer.checkpointing.resuming import load, newest_whole
    from windlass.trainer.checkpointing.saving import Checkpointer, Progress
    from windlass.trainer.distributed.faults import Faults
    from windlass.trainer.distributed.ranks import join_ranks

    os.environ.update(environment)
    if prelude:
        prelude(int(environment["RANK"]))
    data = {"source": "corpus:austen"}
    run = resolve(
        parse_run({
            "name": "run", "model": {"preset": "llama3.2-tiny"}, "data": data, "checkpoint": section,
            "resources": {"gpus_per_node": 0},
        })
    )  # fmt: skip
    ranks = join_ranks(run)
    folder = RunFolder.of(run)
    folder.logs.mkdir(parents=True, exist_ok=True)
    faults = Faults(ranks.rank, folder.logs)
    checkpointer = Checkpointer(run, folder, ranks, faults, model={"fingerprint": "f"}, order={}, sharding=layout)
    answer: dict[str, Any] = {}
    if verb == "save":
        checkpointer.clear_unfinished()
        checkpointer.save(Progress(step, 10, None), state_of(shapes, layout, ranks.world_size, step=step), wait=True)
    elif verb == "save, then SIGTERM":
        checkpointer.clear_unfinished()
        for at, sigterm_at in ((step, None), (step + 1, time.monotonic())):
            state = state_of(shapes, layout, ranks.world_size, step=at)
            checkpointer.save(Progress(at, 10, None), state, wait=bool(sigterm_at), sigterm_at=sigterm_at)
    else:
        state = state_of(shapes, layout, ranks.world_size, step=None)
        offer = newest_whole(checkpointer)
        while offer is not None and not load(offer, state, checkpointer):
            offer = newest_whole(checkpointer)
        assert offer is not None
        answer["step"] = offer.step
        answer["wrong"] = [name for name, tensor in state.items() if not is_filled(tensor, name, shapes, offer.step)]
    answer["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer["disk"] = sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(answer))


def state_of(shapes: Shapes, layout: str, ranks: int, *, step: int | None) -> dict[str, torch.Tensor]:
    """Every rank makes its own part; without a step, of zeros."""
    mesh_shape, placements = LAYOUTS[layout](ranks)
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            state[name] = torch.zeros(shape) if step is None else values(name, step, shape, [0] * len(shape), shape)
            continue
        size, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        local = torch.zeros(size) if step is None else values(name, step, size, offsets, shape)
        state[name] = DTensor.from_local(
            local, mesh, placements, shape=shape, stride=torch.empty(shape, device="meta").stride()
        )
    return state


def is_filled(tensor: torch.Tensor, name: str, shapes: Shapes, step: int) -> bool:
    shape = shapes[name]
    if not isinstance(tensor, DTensor):
        return torch.equal(tensor, values(name, step, shape, [0] * len(shape), shape))
    size, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return torch.equal(tensor.to_local(), values(name, step, size, offsets, shape))


def values(name: str, step: int, size: Any, offsets: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A box of the tensor: each value depends on its place in the whole, on the name and the step."""
    box = torch.full(tuple(size), float(step + len(name)))
    for axis, (length, offset) in enumerate(zip(size, offsets, strict=True)):
        index = torch.arange(offset, offset + length, dtype=torch.float32) * (axis + 1.5)
        box += index.reshape([-1 if at == axis else 1 for at in range(len(shape))])
    return box


def on_a_node_of_its_own(rank: int) -> None:
    """What a rank sees on a machine that it shares with no other."""
    socket.gethostname = lambda: f"node-{rank}"
