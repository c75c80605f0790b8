"""Rows of whole examples: as many as fit into a sequence, the rest of it padding that counts for nothing."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from windlass.data.sequences.sequences import Sequence
from windlass.data.sequences.windows import Windows
from windlass.data.shards.folder import TokenShards
from windlass.errors import UserError

log = logging.getLogger(__name__)
OPEN_ROWS = 64  # rows that an example may still go into; more would fill rows better and mix the order more
TooLong = Literal["truncate", "drop"]


@dataclass(frozen=True)
class Packing:
    """Which examples share a row; it depends on their lengths alone."""

    lengths: NDArray[np.int64]
    room: int  # tokens of a row
    too_long: TooLong
    unlabelled: NDArray[np.bool_] | None = None  # examples of which only tokens that are not trained on would be left

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def rows(self) -> list[list[int]]:
        lengths = self.lengths if self.unlabelled is None else np.where(self.unlabelled, 0, self.lengths)
        return pack(lengths, self.room, drop=self.too_long == "drop")

    @cached_property
    def num_unlabelled(self) -> int:
        return 0 if self.unlabelled is None else int(self.unlabelled.sum())

    @cached_property
    def num_too_long(self) -> int:
        return int((self.lengths > self.room).sum()) - self.num_unlabelled

    @cached_property
    def fullness(self) -> float:
        kept = self.lengths if self.unlabelled is None else self.lengths[~self.unlabelled]
        kept = kept[kept <= self.room] if self.too_long == "drop" else kept
        return float(np.minimum(kept, self.room).sum()) / (self.room * max(1, len(self.rows)))

    def place(self, example: int) -> tuple[int, int]:
        """The tokens [begin, end) of an example, as far as a row has room for it."""
        begin = int(self.begins[example])
        return begin, begin + min(int(self.lengths[example]), self.room)


@dataclass(frozen=True)
class PackedRows(Windows):
    """The rows [first, first + num_sequences) of packed examples."""

    packing: Packing = field(kw_only=True, compare=False, repr=False)

    @classmethod
    def packed(cls, shards: TokenShards, name: str, sequence_length: int, too_long: TooLong) -> PackedRows:
        lengths, room = shards.document_lengths(), sequence_length + 1
        cut = None if too_long == "drop" else cut_away(shards, lengths, room)
        packing = Packing(lengths, room, too_long, cut)
        if not packing.rows:
            raise nothing_fits(name, sequence_length, shards.num_documents, too_long)
        if packing.num_unlabelled:
            log.warning(
                "%s: %s examples are left out: their prompts alone fill %s tokens",
                name,
                f"{packing.num_unlabelled:,}",
                f"{sequence_length:,}",
            )
        return cls(shards, name=name, sequence_length=sequence_length, num_sequences=len(packing.rows), packing=packing)

    @property
    def description(self) -> str:
        count = "1 sequence" if self.num_sequences == 1 else f"{self.num_sequences:,} sequences"
        packing, long = self.packing, ""
        if packing.num_too_long:
            long = f", {packing.num_too_long:,} too long: {'cut' if packing.too_long == 'truncate' else 'left out'}"
        if packing.num_unlabelled:
            long += f", {packing.num_unlabelled:,} left out: their prompts alone are too long"
        return (
            f"{self.name}, {self.shards.num_documents:,} examples, {count} of {self.sequence_length:,}, "
            f"{packing.fullness:.0%} full{long}{self.left_out}"
        )

    def spans(self, window: int) -> list[tuple[int, int]]:
        return [self.packing.place(example) for example in self.packing.rows[window]]

    def sequence(self, window: int) -> Sequence:
        size = self.sequence_length + 1
        tokens, loss = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
        starts, here = [], 0
        for example in self.packing.rows[window]:
            part, _, trained = self.shards.read_marked(*self.packing.place(example))
            tokens[here : here + len(part)] = part
            loss[here : here + len(part)] = True if trained is None else trained
            loss[here] = False  # nothing comes before it that could predict it
            starts.append(here)
            here += len(part)
        if here < size:
            starts.append(here)  # padding is a document of its own: it sees no example, and none sees it
        return Sequence(f"row:{window}", tokens, np.array(starts, dtype=np.int64), loss)


def cut_away(shards: TokenShards, lengths: NDArray[np.int64], room: int) -> NDArray[np.bool_]:
    """Which examples have no token to train on within a row's room; of those that fit, tokenizing saw to it."""
    untrained = np.zeros(len(lengths), dtype=np.bool_)
    begins = np.cumsum(lengths) - lengths
    for example in np.flatnonzero(lengths > room):
        begin = int(begins[example])
        _, _, trained = shards.read_marked(begin, begin + room)
        untrained[example] = trained is not None and not trained[1:].any()
    return untrained


def nothing_fits(name: str, sequence_length: int, num_examples: int, too_long: TooLong) -> UserError:
    if too_long == "drop":
        return UserError(
            f"{name} holds no example that fits into {sequence_length:,} tokens",
            evidence=f"{num_examples:,} examples, all longer, and data.too_long is drop",
            fix="a longer data.sequence_length, or data.too_long=truncate",
        )
    return UserError(
        f"{name} holds no example with a completion within {sequence_length:,} tokens",
        evidence=f"{num_examples:,} examples, all with prompts that fill a sequence alone",
        cause="of an example that is cut, nothing would be left to train on",
        fix="a longer data.sequence_length",
    )


def pack(lengths: NDArray[np.int64], room: int, *, drop: bool) -> list[list[int]]:
    """Examples into rows: each into the fullest open row that has room; rows in the order of their first example."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for example, whole in enumerate(lengths.tolist()):
        length = min(whole, room)
        if whole < 2 or (drop and whole > room):
            continue
        place = bisect_left(open_rows, (length, -1))
        if place < len(open_rows):
            left, row = open_rows.pop(place)
        else:
            left, row = room, len(rows)
            rows.append([])
            if len(open_rows) >= OPEN_ROWS:
                open_rows.pop(0)  # the fullest
        rows[row].append(example)
        if left - length > 1:
            insort(open_rows, (left - length, row))
    return rows
