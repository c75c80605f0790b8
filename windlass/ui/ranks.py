"""How far each rank comes behind the others, for a heat map: who is slow, since when, on which host. Bounded."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.common.files import real, whole, words

MOST_COLUMNS = 256  # of the heat map; beyond, two become one that keeps the slower time
MOST_RANKS = 1 << 14
MOST_NAMED = 8
SLOW = 0.1  # of a step


@dataclass
class Column:
    """Some steps: by rank, the share of a step that the others waited for it; ranks that are not listed: none."""

    last_step: int
    step_s: float
    behind: dict[int, float] = field(default_factory=dict)

    def take(self, later: Column) -> None:
        self.last_step, self.step_s = later.last_step, later.step_s
        for rank, share in later.behind.items():
            self.behind[rank] = max(share, self.behind.get(rank, 0.0))


class RankTimes:
    """Records of the kind `ranks` in metrics.jsonl: of large runs they list only the slowest."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.hosts: dict[int, str] = {}
        self.num_ranks = 0
        self._stride = 1
        self._in_column = 0  # records that the last column holds

    def add(self, record: Mapping[str, Any]) -> None:
        step, rows = whole(record.get("step")), record.get("ranks")
        if step is None or not isinstance(rows, list):
            return
        column = Column(step, 0.0)
        for row in rows[:MOST_RANKS]:
            rank = whole(row.get("rank")) if isinstance(row, dict) else None
            if rank is None or not 0 <= rank < MOST_RANKS:
                continue
            seconds = real(row.get("step_s")) or 0.0
            column.step_s = max(column.step_s, seconds)
            column.behind[rank] = min(1.0, (real(row.get("behind_s")) or 0.0) / seconds) if seconds > 0 else 0.0
            self.hosts[rank] = words(row.get("host")) or "?"
            self.num_ranks = max(self.num_ranks, rank + 1)
        self._append(column)

    def _append(self, column: Column) -> None:
        while self.columns and self.columns[-1].last_step >= column.last_step:  # trained again after a restart
            self.columns.pop()
            self._in_column = self._stride
        if self.columns and self._in_column < self._stride:
            self.columns[-1].take(column)
            self._in_column += 1
            return
        self.columns.append(column)
        self._in_column = 1
        if len(self.columns) > MOST_COLUMNS:
            for earlier, later in zip(self.columns[0::2], self.columns[1::2], strict=False):
                earlier.take(later)
            self.columns = self.columns[0::2]
            self._stride *= 2
            self._in_column = self._stride  # the last one may hold less; a new one begins

    def heat_map(self, num_ranks: int | None = None) -> dict[str, Any]:
        """A byte for each rank, column by column, and the ranks that stand out. `num_ranks`: of the whole run."""
        ranks = min(MOST_RANKS, max(self.num_ranks, num_ranks or 0)) if self.columns else 0
        cells = bytearray()
        for column in self.columns:
            row = bytearray(ranks)
            for rank, share in column.behind.items():
                row[rank] = round(share * 255)
            cells += row
        return {
            "ranks": ranks,
            "steps": [column.last_step for column in self.columns],
            "step_s": [column.step_s for column in self.columns],
            "cells": base64.b64encode(bytes(cells)).decode(),
            "hosts": {str(rank): host for rank, host in self.hosts.items()},
            "slow": self.slow_ranks(),
        }

    def slow_ranks(self) -> list[dict[str, Any]]:
        """The ranks that the others wait for now, the slowest first."""
        if not self.columns:
            return []
        newest = self.columns[-1]
        slow = sorted(((share, rank) for rank, share in newest.behind.items() if share >= SLOW), reverse=True)
        return [
            {"rank": rank, "host": self.hosts[rank], "share": round(share, 3), "seconds": share * newest.step_s,
             "since": self._since(rank)}
            for share, rank in slow[:MOST_NAMED]
        ]  # fmt: skip

    def _since(self, rank: int) -> int:
        """The step from which on it was slow without a pause."""
        since = self.columns[-1].last_step
        for column in reversed(self.columns):
            if column.behind.get(rank, 0.0) < SLOW:
                break
            since = column.last_step
        return since
