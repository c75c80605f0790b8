"""Estimates beside what was measured, as a table: python -m tests.plan.measured"""

from __future__ import annotations

from tests.plan.runs import estimates_of, name_of
from tests.plan.test_estimates import MEASURED


def rows() -> list[str]:
    lines = [
        "| run on one H200 | GiB measured | estimated | | tokens/s measured | estimated | |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in MEASURED:
        found = estimates_of(point)
        memory = _compare(point["peak_gib"], found.memory.peak_gib, ".1f")
        lines.append(
            f"| {name_of(point)} | {memory} | {_compare(point['tokens_per_s'], found.speed.tokens_per_s, ',.0f')} |"
        )
    return lines


def _compare(measured: float | None, estimated: float, style: str) -> str:
    if measured is None:
        return f"– | {estimated:{style}} | "
    return f"{measured:{style}} | {estimated:{style}} | {estimated / measured - 1:+.1%}"


if __name__ == "__main__":
    print("\n".join(rows()))
