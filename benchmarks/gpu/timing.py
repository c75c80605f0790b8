"""Time the steps of a training loop on the device, with no wait for it in between."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.points import Point
from windlass.trainer.startup import process_begin

Step = Callable[[Tensor], Tensor]  # tokens, one more per row than the sequence length -> the step's mean loss


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def join_world_of_one() -> None:
    """The process group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun would leave it."""
    here = device()
    if here.type == "cuda":
        torch.cuda.set_device(here)
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("nccl" if here.type == "cuda" else "gloo", device_id=here if here.type == "cuda" else None)


@dataclass(frozen=True)
class Timed:
    step_s: list[float]  # each step after the warm-up
    loss: float  # of the last
    first_step_s: float  # from the start of this process to the end of its first step


def time_steps(step: Step, point: Point, *, vocabulary: int, steps: int, warmup: int) -> Timed:
    """Fresh random tokens for every step."""
    begun, first = process_begin(), 0.0
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(vocabulary, (point.batch, point.length + 1), generator=draw) for _ in range(steps)]
    clock = DeviceClock() if device().type == "cuda" else HostClock()
    loss = torch.zeros(())
    if device().type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    for number, batch in enumerate(batches):
        if number == warmup:
            clock.mark()
        loss = step(batch.to(device(), non_blocking=True))
        if number == 0:
            loss.item()
            first = time.time() - begun
        if number >= warmup:
            clock.mark()
    return Timed(clock.seconds(), float(loss), first)


class DeviceClock:
    """CUDA events at step boundaries: host gaps are inside, because the next event waits for the next step's work."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


class HostClock:
    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self._times, self._times[1:], strict=False)]


def peak_gib() -> float:
    """Peak allocated on the GPU; resident on a CPU."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
