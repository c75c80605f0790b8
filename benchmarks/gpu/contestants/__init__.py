"""Who is measured: each contestant is a function from a job to a row, run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.points import Point
from benchmarks.gpu.rows import Row


@dataclass(frozen=True)
class Job:
    """One contestant at one point."""

    contestant: str
    point: Point
    steps: int
    warmup: int
    folder: Path  # to write into; removed afterwards
    overrides: tuple[str, ...] = ()  # of windlass's run file


CONTESTANTS = (
    "windlass",
    "torchtitan",
    "transformers",
    "windlass-fp8",
    "torchtitan-fp8",
    "windlass-sdpa",
    "torchtitan-autocast",
    "transformers-compiled",
    "windlass-full",
    "windlass-full-plain",
    "windlass-full-fast",
    "windlass-full-fp8",
    "windlass-full-fp8-fast",
    "windlass-nf4",
    "windlass-recompute",
    "windlass-nf4-recompute",
    "peft",
    "peft-compiled",
)
DEFAULT_CONTESTANTS = CONTESTANTS[:3]


def runner(contestant: str) -> Callable[[Job], Row]:
    """Imported here, so that no contestant pays for another's imports."""
    family = contestant.partition("-")[0]
    if family == "windlass":
        from benchmarks.gpu.contestants.own import run
    elif family == "torchtitan":
        from benchmarks.gpu.contestants.titan import run
    else:
        from benchmarks.gpu.contestants.plain import run
    return run
