"""Where the time of a run went, and how its ranks compare: what `windlass show` prints of both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from windlass.cli.output import duration, moment, print_table
from windlass.common.files import parse_record, read_json_lines, real, whole, words
from windlass.goodput.accounting import PARTS, Account, account, read_metrics
from windlass.runfolder import RunFolder

SMALLEST_SHARE = 0.005  # of the time: less is not shown


def goodput_of(folder: RunFolder, *, under_way: bool) -> Account:
    now = time.time() if under_way else None
    return account(read_json_lines(folder.history), read_metrics(folder.metrics), now=now)


def goodput_rows(told: Account) -> list[tuple[str, str]]:
    if told.goodput is None or told.seconds <= 0:
        return []
    parts = told.parts
    lost = [
        f"{name} {parts[name] / told.seconds:.1%}"
        for name in PARTS
        if name != "training" and parts[name] >= SMALLEST_SHARE * told.seconds
    ]
    rows = [("goodput", f"{told.goodput:.1%} of {duration(told.seconds)} trained")]
    return [*rows, ("", ", ".join(lost))] if lost else rows


def compared_ranks(folder: RunFolder) -> dict[str, Any] | None:
    """The newest comparison of the ranks, with since when each slow rank has been slow."""
    try:
        lines = folder.metrics.open("rb")
    except FileNotFoundError:
        return None
    with lines:
        return newest_comparison(record for line in lines if b'"ranks"' in line and (record := parse_record(line)))


def newest_comparison(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    newest: Mapping[str, Any] | None = None
    since: dict[int, Mapping[str, Any]] = {}
    for record in records:
        slow = record.get("slow")
        if record.get("kind") != "ranks" or not isinstance(slow, list) or not isinstance(record.get("ranks"), list):
            continue
        since = {rank: since.get(rank, record) for rank in slow if isinstance(rank, int)}
        newest = record
    if newest is None:
        return None
    rows = []
    for row in newest["ranks"]:
        rank = whole(row.get("rank")) if isinstance(row, dict) else None
        if rank is None:
            continue
        begin = since.get(rank, {})
        numbers = {key: real(row.get(key)) or 0.0 for key in ("step_s", "data_s", "behind_s")}
        row = {"rank": rank, "host": words(row.get("host")) or "?", **numbers}
        rows.append({**row, "slow_since": real(begin.get("time")), "slow_since_step": whole(begin.get("step"))})
    return {
        "step": whole(newest.get("step")) or 0,
        "steps": whole(newest.get("steps")) or 0,
        "slow": list(since),
        "ranks": sorted(rows, key=lambda row: -float(row["behind_s"])),
    }


def print_ranks(compared: Mapping[str, Any] | None) -> None:
    import click

    click.echo()
    if compared is None:
        click.echo("  the ranks were not compared yet: that takes two ranks and half a minute of steps")
        return
    rows = [
        [
            str(row["rank"]),
            row["host"],
            duration(row["step_s"]),
            duration(row["data_s"]),
            duration(row["behind_s"]),
            f"step {row['slow_since_step']}, {moment(row['slow_since'])[-8:]}" if row["slow_since"] else "–",
        ]
        for row in compared["ranks"]
    ]
    print_table(["RANK", "HOST", "STEP", "DATA", "BEHIND", "SLOW SINCE"], rows)
