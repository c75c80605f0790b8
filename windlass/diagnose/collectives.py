"""What collectives tell: the ranks' watchdogs, and torch's flight recorders, which keep the last ones of every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.diagnose import reading as read
from windlass.diagnose.findings import Evidence, Finding, Weight, evidence_of
from windlass.diagnose.timeline import LogView

WATCHDOG = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
MOST_RANKS_NAMED = 8


@dataclass(frozen=True)
class Recorded:
    """A collective of a group, as one rank's recorder has it."""

    group: str
    number: int
    operation: str  # with its sizes
    is_complete: bool


def by_collectives(views: Sequence[LogView], recorders: Mapping[int, Sequence[Recorded]]) -> Iterator[Finding]:
    """Ranks that did not take the same path, or one that never came."""
    yield from _by_watchdogs(views)
    for group in sorted({item.group for entries in recorders.values() for item in entries}):
        newest = {rank: _newest(entries, group) for rank, entries in recorders.items()}
        present = {rank: entry for rank, entry in newest.items() if entry is not None}
        waiting = {rank: entry for rank, entry in present.items() if not entry.is_complete}
        if not waiting:
            continue
        number = min(entry.number for entry in waiting.values())
        operations = {rank: entry.operation for rank, entry in waiting.items() if entry.number == number}
        if len(set(operations.values())) > 1:
            evidence = tuple(
                _evidence(rank, f"waits in {operation}, number {number} of group {group}")
                for rank, operation in sorted(operations.items())[:MOST_RANKS_NAMED]
            )
            grounds = "the flight recorders of the ranks name different operations under one number"
            yield Finding("collective_mismatch", 0.85, Weight.TRANSPORT, evidence, grounds)
        behind = [rank for rank in recorders if rank not in waiting and _number(newest[rank]) < number]
        for rank in behind[:1]:
            others = ", ".join(map(str, sorted(operations)[:MOST_RANKS_NAMED]))
            operation = next(iter(operations.values()))
            text = f"did not come to {operation}, number {number} of group {group}, in which ranks {others} wait"
            grounds = "the flight recorders say which rank did not come"
            yield Finding("collective_timeout", 0.85, Weight.ABSENT, (_evidence(rank, text),), grounds)


def _by_watchdogs(views: Sequence[LogView]) -> Iterator[Finding]:
    waits: dict[str, dict[str, Evidence]] = {}
    for view in views:
        for line in view.lines[-500:]:
            if match := WATCHDOG.search(line.text):
                evidence = evidence_of(view.name, line.text, line.time, rank=line.rank)
                waits.setdefault(match[1], {}).setdefault(match[2], evidence)
                break
    for operations in waits.values():
        if len(operations) > 1:
            grounds = "the ranks waited in different operations under one number"
            yield Finding("collective_mismatch", 0.75, Weight.TRANSPORT, tuple(operations.values()), grounds)


def _newest(entries: Sequence[Recorded], group: str) -> Recorded | None:
    """Of a rank in a group: the oldest collective that it waits in, or the last one that it ended."""
    own = sorted((entry for entry in entries if entry.group == group), key=lambda entry: entry.number)
    return next((entry for entry in own if not entry.is_complete), own[-1] if own else None)


def _number(entry: Recorded | None) -> int:
    return entry.number if entry is not None else -1


def _evidence(rank: int, text: str) -> Evidence:
    return evidence_of(f"flight recorder of rank {rank}", f"rank {rank} {text}", rank=rank)


def read_recorders(value: Any) -> dict[int, tuple[Recorded, ...]]:
    """The recorders of a bundle: `{"rank0": {"entries": […]}}`, entries as torch dumps them."""
    recorders: dict[int, tuple[Recorded, ...]] = {}
    for name, dump in read.mapping(value).items():
        rank = re.search(r"\d{1,6}", str(name))
        if rank is not None:
            entries = [read.mapping(entry) for entry in read.items(read.at(dump, "entries"))]
            recorders[int(rank[0])] = tuple(_entry(entry) for entry in entries if not entry.get("is_p2p"))
    return recorders


def _entry(entry: Mapping[str, Any]) -> Recorded:
    group = entry.get("process_group")
    names = " ".join(map(read.text, group)) if isinstance(group, list | tuple) else read.text(group)
    operation = f"{read.text(entry.get('profiling_name'))} of {entry.get('input_sizes')}"[:200]
    number = read.number(entry.get("collective_seq_id")) or 0
    return Recorded(names, number, operation, entry.get("state") == "completed")
