"""Faults on demand, to see a run survive them: off unless $WINDLASS_FAULTS names some.

Syntax: `ACTION:key=value,…[;…]`, for example `kill:rank=1,step=60` or `term:step=6,point=save.written`.
Actions: kill, term, stop (SIGKILL, SIGTERM, SIGSTOP to itself), sleep (`seconds`), nan (the rank's loss becomes NaN),
oom (the error that torch raises when a GPU's memory is full).
Keys: rank (default: every rank), step, point (a named moment; default `step.begin`), seconds.
A fault fires once in the life of a run folder, so that the attempt after it is left alone.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.errors import UserError

VARIABLE = "WINDLASS_FAULTS"
ACTIONS = ("kill", "term", "stop", "sleep", "nan", "oom")
POINTS = (
    "step.begin",
    "step.loss",
    "step.end",
    "validation.batch",
    "save.staged",
    "save.written",
    "save.manifest",
    "save.published",
    "save.retention",
    "memory.written",
    "memory.replicated",
    "memory.published",
    "local.written",
    "local.published",
    "managed.written",
    "managed.published",
    "upload.begin",
    "upload.file",
    "upload.manifest",
    "upload.published",
    "upload.retention",
    "restore.begin",
)


@dataclass(frozen=True)
class Fault:
    action: str
    rank: int | None
    step: int | None
    point: str
    seconds: float
    marker: str


def parse_faults(text: str) -> list[Fault]:
    faults = []
    for index, part in enumerate(filter(None, map(str.strip, text.split(";")))):
        action, _, rest = part.partition(":")
        keys = {key: value for key, _, value in (pair.partition("=") for pair in rest.split(",") if pair)}
        unknown = set(keys) - {"rank", "step", "point", "seconds"}
        point = keys.get("point", "step.loss" if action == "nan" else "step.begin")
        if action not in ACTIONS or unknown or point not in POINTS:
            raise UserError(
                f"the fault {part!r} is not understood",
                evidence=f"actions {', '.join(ACTIONS)}\nkeys rank, step, point, seconds\npoints {', '.join(POINTS)}",
                fix="--inject kill:rank=1,step=60",
            )
        try:
            faults.append(
                Fault(
                    action=action,
                    rank=int(keys["rank"]) if "rank" in keys else None,
                    step=int(keys["step"]) if "step" in keys else None,
                    point=point,
                    seconds=float(keys.get("seconds", 1.0)),
                    marker=f".fault-{index}",
                )
            )
        except ValueError as error:
            raise UserError(
                f"the fault {part!r} is not understood", evidence=str(error), fix="--inject kill:rank=1,step=60"
            ) from None
    return faults


class Faults:
    """The faults one rank may meet."""

    def __init__(self, rank: int, markers: Path, text: str | None = None) -> None:
        self.rank = rank
        self.markers = markers
        self.reached = ("start", 0)  # the last point and step; other ranks learn it
        self.faults = parse_faults(os.environ.get(VARIABLE, "") if text is None else text)

    def reach(self, point: str, step: int) -> bool:
        """Say that this rank is at `point` of `step`; True if its loss shall be NaN."""
        self.reached = (point, step)
        poisoned = False
        for fault in self.faults:
            if fault.point != point or fault.rank not in (None, self.rank) or fault.step not in (None, step):
                continue
            if not self._first_time(fault):
                continue
            if fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            elif fault.action == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            elif fault.action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault.action == "sleep":
                time.sleep(fault.seconds)
            elif fault.action == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected).")
            else:
                poisoned = True
        return poisoned

    def _first_time(self, fault: Fault) -> bool:
        self.markers.mkdir(parents=True, exist_ok=True)
        try:
            (self.markers / f"{fault.marker}-{self.rank}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
