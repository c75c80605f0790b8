"""Hold curves against each other and against their bounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu.curves_cases import PEER_FACTOR, Case

GOOD = ("ok", "skipped")
HEADER = (
    "| curve | compared with | largest relative difference | difference of the last means | gradient norm, median "
    "| fell by | bound | verdict | s |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Outcome:
    """What became of one case: its losses, or why there are none."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()  # of the gradient, before clipping
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    name: str
    against: str
    bound: str
    verdict: str = ""  # "ok", "skipped", or what is wrong
    why: str = ""
    relative: float | None = None
    at_step: int | None = None  # where the relative difference is largest
    mean: float | None = None  # signed: above zero it is worse than what it is compared with
    norm: float | None = None  # relative difference of the gradient's norm at the median step
    fell: float | None = None
    seconds: float = 0.0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    @property
    def good(self) -> bool:
        return self.verdict in GOOD

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(case: Case, outcomes: Mapping[str, Outcome]) -> Row:
    """The row of a case whose outcome is there; that of what it is compared with may be missing or failed."""
    outcome, bound = outcomes[case.name], case.bound
    row = Row(case.name, case.against or "", bound.describe(), seconds=outcome.seconds)
    if outcome.skipped:
        return replace(row, verdict="skipped", why=outcome.skipped)
    if outcome.error:
        return replace(row, verdict="failed", why=outcome.error)
    fell = outcome.losses[0] - mean(outcome.losses, bound.last)
    row = replace(row, losses=outcome.losses, norms=outcome.norms, fell=fell)
    broken = [] if fell > bound.fall else ["the fall"]
    if case.against is not None:
        other = outcomes.get(case.against, Outcome(error="not there yet"))
        if not other.losses:
            return replace(row, verdict="not compared", why=f"{case.against}: {other.error or other.skipped}")
        found = distance(outcome, other, bound.last)
        row = replace(row, relative=found.relative, at_step=found.at_step, mean=found.mean, norm=found.norm)
        broken += [] if within(found.relative, bound.relative) else ["a step"]
        broken += [] if within(abs(found.mean), bound.mean) else ["the mean"]
        broken += [] if within(found.norm, bound.norm) else ["the gradient norm"]
        peers = [outcomes.get(name, Outcome(error="not there yet")) for name in case.peers]
        if peers and not any(peer.skipped for peer in peers):
            if not all(peer.losses for peer in peers):
                return replace(row, verdict="not compared", why=f"not all of {', '.join(case.peers)} are there")
            usual = [distance(peer, other, bound.last) for peer in peers]
            limits = {
                "a step": (found.relative, max(peer.relative for peer in usual)),
                "the mean": (abs(found.mean), max(abs(peer.mean) for peer in usual)),
                "the gradient norm": (found.norm, max(peer.norm for peer in usual)),
            }
            broken += [
                f"{what}, beside its peers" for what, (own, most) in limits.items() if not own <= PEER_FACTOR * most
            ]
    return replace(row, verdict="broken" if broken else "ok", why=" and ".join(broken))


@dataclass(frozen=True)
class Distance:
    """How far a curve is from another: the fields of a row."""

    relative: float
    at_step: int
    mean: float
    norm: float


def distance(mine: Outcome, other: Outcome, last: int) -> Distance:
    steps = relative_differences(mine.losses, other.losses)
    worst = max(range(len(steps)), key=steps.__getitem__)
    difference = mean(mine.losses, last) - mean(other.losses, last)
    return Distance(
        steps[worst], worst + 1, difference, statistics.median(relative_differences(mine.norms, other.norms))
    )


def within(value: float, limit: float | None) -> bool:
    return limit is None or value <= limit  # so that a NaN is not


def relative_differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) / abs(other) for one, other in zip(values, others, strict=True)]


def mean(losses: Sequence[float], last: int) -> float:
    tail = losses[-last:]
    return sum(tail) / len(tail)


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEADER, *map(line, rows)])


def line(row: Row) -> str:
    relative = "" if row.relative is None else f"{row.relative:.2e} (step {row.at_step})"
    difference = "" if row.mean is None else f"{row.mean:+.4f}"
    norm = "" if row.norm is None else f"{row.norm:.1e}"
    fell = "" if row.fell is None else f"{row.fell:.3f}"
    said = row.verdict + (f": {row.why.replace('|', '/')[:160]}" if row.why else "")
    cells = [row.name, row.against, relative, difference, norm, fell, row.bound, said, f"{row.seconds:.0f}"]
    return f"| {' | '.join(cells)} |"
