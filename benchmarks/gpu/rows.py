"""One contestant at one point: what was measured, or why nothing was."""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "torchtitan", "torchao")


@dataclass(frozen=True)
class Row:
    contestant: str
    point: str
    error: str | None = None  # if it is set, the numbers below are not
    step_s: tuple[float, ...] = ()  # timed steps, or windows of `steps_per_time` steps each
    steps_per_time: int = 1
    median_s: float = 0.0
    min_s: float = 0.0
    max_s: float = 0.0
    tokens_per_s: float = 0.0  # at the median
    mfu: float | None = None
    peak_gib: float = 0.0
    first_step_s: float | None = None  # from the start of its process to the end of its first step
    loss: float | None = None  # of the last step
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # what the program that started the contestant saw

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(
    contestant: str,
    point: str,
    step_s: Sequence[float],
    *,
    tokens: int,
    flops_per_token: float,
    peak_flops: float | None,
    peak_gib: float,
    loss: float,
    first_step_s: float | None = None,
    steps_per_time: int = 1,
) -> Row:
    median = statistics.median(step_s)
    speed = tokens / median
    return Row(
        contestant=contestant,
        point=point,
        step_s=tuple(round(one, 6) for one in step_s),
        steps_per_time=steps_per_time,
        median_s=median,
        min_s=min(step_s),
        max_s=max(step_s),
        tokens_per_s=speed,
        mfu=speed * flops_per_token / peak_flops if peak_flops else None,
        peak_gib=peak_gib,
        loss=loss,
        first_step_s=first_step_s,
        versions=versions(),
    )


def failed(contestant: str, point: str, error: str) -> Row:
    return Row(contestant=contestant, point=point, error=error, versions=versions())


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
