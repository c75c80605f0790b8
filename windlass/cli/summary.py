"""What a run came to: its numbers, from its folder alone."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from windlass.cli.output import count, duration, number
from windlass.runfolder import RunFolder, read_json_lines, steps_of


@dataclass(frozen=True)
class Summary:
    steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int | None
    tokens_per_s: float | None  # the median step's
    restarts: int
    steps_repeated: int
    seconds_lost: float
    exported: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        rows = [
            ("steps", count(self.steps)),
            ("loss", number(self.loss)),
            ("validation loss", number(self.validation_loss)),
            ("tokens", count(self.tokens)),
            ("tokens/s", count(self.tokens_per_s)),
            ("restarts", str(self.restarts)),
        ]
        if self.restarts:
            rows += [("steps repeated", str(self.steps_repeated)), ("time lost", duration(self.seconds_lost))]
        if self.exported:
            rows.append(("exported", self.exported))
        return rows


def summarize(folder: RunFolder) -> Summary:
    metrics = list(read_json_lines(folder.metrics))
    history = list(read_json_lines(folder.history))
    steps = [one for one in metrics if one.get("kind") == "step"]
    validations = [one for one in metrics if one.get("kind") == "validation"]
    restarts = {one["attempt"] for one in history if one.get("event") == "restart"}
    unique = steps_of(folder)
    last = unique[max(unique)] if unique else {}
    speeds = [one["tokens_per_s"] for one in unique.values() if one.get("tokens_per_s")]
    return Summary(
        steps=last.get("step", 0),
        loss=last.get("loss"),
        validation_loss=validations[-1].get("loss") if validations else None,
        tokens=last.get("tokens"),
        tokens_per_s=statistics.median(speeds) if speeds else None,
        restarts=len(restarts),
        steps_repeated=len(steps) - len(unique),
        seconds_lost=seconds_lost(steps, restarts),
        exported=next((one.get("path") for one in reversed(history) if one.get("event") == "exported"), None),
    )


def seconds_lost(steps: list[dict[str, Any]], restarts: set[int]) -> float:
    """Time from the last new step before each restart to the first new one after it, less that step's own time."""
    lost, furthest = 0.0, None
    for record in steps:
        if furthest is not None and record["step"] <= furthest["step"]:
            continue  # repeated
        attempt, before = record.get("attempt"), furthest.get("attempt") if furthest else None
        if furthest is not None and any(before is not None and before < one <= (attempt or 0) for one in restarts):
            lost += max(0.0, record["time"] - furthest["time"] - (record.get("step_s") or 0.0))
        furthest = record
    return lost


def loss_points(folder: RunFolder) -> list[tuple[float, float]]:
    nan = float("nan")
    return [
        (step, float(nan if record.get("loss") is None else record["loss"]))
        for step, record in sorted(steps_of(folder).items())
    ]


def draw_loss(folder: RunFolder) -> str:
    """The loss curve, as wide as the terminal allows and in characters it can show."""
    import shutil
    import sys

    from windlass.cli.curve import draw_curve

    width = min(100, shutil.get_terminal_size((80, 24)).columns - 2)
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    return draw_curve(loss_points(folder), width=width, title="loss", braille=unicode)
