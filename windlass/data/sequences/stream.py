"""Sequences out of a stream, the same on any number of readers, with a position of their own that survives any resume.

One endless list holds the dataset's files, epoch after epoch, each epoch in an order of its own. Position p of a global
batch is the next window of lane p % lanes; a lane that has read its file to the end is handed the next one of the list.
So every document is read exactly once in each epoch, whatever the lanes and the sizes of files, and no file is begun
again before all have been begun. Within a file documents are shuffled over a window (lane.py).

Which lane is handed which file depends on when the others come to an end. Readers that share a stream therefore tell
each other after every step which of their lanes need a file (`exchange`). A reader that has nobody to ask reads all
lanes itself: the same result, at the price of reading what others read too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from windlass.data.sequences.lane import START, DocumentShuffle, Lane, LanePosition
from windlass.data.sequences.order import permutation
from windlass.data.sequences.sequences import Batch, Sequence
from windlass.data.sources.hub import DocumentFiles, HubFiles, empty_source
from windlass.data.sources.source import HubSource
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.spec.data import CHARACTERS_HELD

log = logging.getLogger(__name__)

# The lanes of all readers that need a file, from those of this one and the number of lanes. Collective: every reader
# calls it equally often.
Exchange = Callable[[Collection[int], int], list[int]]
READING_THREADS = 8  # lanes wait for the network, not for each other
EMPTY_ROUNDS = 1000  # files in a row that a lane may be handed without a text in them, beyond their number


def open_stream(
    source: HubSource, tokenizer: Tokenizer, *, sequence_length: int, seed: int | None, shuffle_window: int
) -> Stream:
    """The stream of a `datasets` source; a dataset that is missing, empty or has other fields is an error here."""
    tokenizer.require_eos()
    files = HubFiles(source)
    if not any(text for file in range(files.num_files) for text in files.documents(file, 0)):
        raise empty_source(files.name)
    return Stream(files, tokenizer, sequence_length=sequence_length, seed=seed, shuffle_window=shuffle_window)


class Dealing(Protocol):
    """Which positions of a global batch a stream fills; `lane` are those that belong to one of its lanes."""

    def positions(self, step: int, lane: range, global_batch: int) -> list[int]: ...

    def before(self, step: int, lane: range, global_batch: int) -> int:
        """How many of the lane's positions it has filled before a step."""
        ...


class EveryPosition:
    """The stream is the run's only source."""

    def positions(self, step: int, lane: range, global_batch: int) -> list[int]:
        return list(lane)

    def before(self, step: int, lane: range, global_batch: int) -> int:
        return step * len(lane)


class Stream:
    """An endless sequence of steps over a dataset's files."""

    num_sequences: int | None = None

    def __init__(
        self,
        files: DocumentFiles,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        seed: int | None,  # None: files and documents in their order
        shuffle_window: int = 1,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer.name, tokenizer.fingerprint
        count = "1 file" if files.num_files == 1 else f"{files.num_files:,} files"
        self.description = f"{files.name}, {count}, sequences of {sequence_length:,}"
        self.files = files
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._seed = seed
        self._shuffle_window = shuffle_window
        self._exchange: Exchange | None = None
        self._global_batch = 0
        self._lanes: dict[int, Lane] = {}
        self._is_open = False  # a reader may have no lane of its own
        self._next_step = 0  # that the open lanes are at
        self._next_entry = 0  # of the file list, to be handed out
        self._saved: tuple[int, dict[str, list[Any]]] | None = None  # (step, lanes)
        self.dealing: Dealing = EveryPosition()

    def share(self, exchange: Exchange) -> None:
        """Read only the lanes of this reader's positions, and agree with other readers on who is handed which file."""
        self._exchange = exchange
        self._is_open = False

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Lanes open at their saved places when they are next asked for; without any, they are read up to the step."""
        self._is_open = False
        self._saved = (step, dict(state["lanes"])) if state and step else None

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        if global_batch != self._global_batch:
            self._is_open = False
            self._global_batch = global_batch
        needed = {position % self.num_lanes for position in positions}
        if not self._is_open or step < self._next_step or not needed <= self._lanes.keys():
            self._open_lanes(sorted(needed) if self._exchange else range(self.num_lanes), step)
        windows: dict[int, Sequence] = {}
        while self._next_step <= step:  # more than once: a later step than the one it is at is asked for
            windows = self._read_step(self._next_step)
        return Batch(
            sequences=[windows[position] for position in positions if position in windows],
            state={"lanes": {str(number): self._state(lane) for number, lane in self._lanes.items()}},
            epoch=max(0, self._next_entry - self.num_lanes) / self.files.num_files,
        )

    @property
    def num_lanes(self) -> int:
        return min(self._global_batch, self.files.num_files)

    def positions_of(self, lane: int) -> range:
        return range(lane, self._global_batch, self.num_lanes)

    def file_of(self, entry: int) -> int:
        """The file that an entry of the endless list is."""
        epoch, place = divmod(entry, self.files.num_files)
        return place if self._seed is None else permutation(self.files.num_files, self._seed, epoch, "files")[place]

    def _read_step(self, step: int) -> dict[int, Sequence]:
        """The windows of the open lanes in one step, by their positions."""
        mine = {
            number: self.dealing.positions(step, self.positions_of(number), self._global_batch)
            for number in self._lanes
        }
        asking = dict(mine)
        with ThreadPoolExecutor(min(READING_THREADS, max(1, len(mine))), "windlass-lane") as threads:
            for _ in range(EMPTY_ROUNDS + self.files.num_files):
                ready = threads.map(lambda number: self._lanes[number].prepare(len(mine[number])), asking)
                short = [number for number, enough in zip(list(asking), ready, strict=True) if not enough]
                everywhere = self._exchange(short, self.num_lanes) if self._exchange else short
                for number in sorted(everywhere):
                    if number in self._lanes:
                        self._lanes[number].take(self._next_entry)
                    self._next_entry += 1
                asking = {number: mine[number] for number in short}
                if not everywhere:
                    break
            else:
                raise empty_source(self.files.name)
        self._next_step = step + 1
        return {
            position: self._lanes[number].next_window() for number, positions in mine.items() for position in positions
        }

    def _open_lanes(self, numbers: Collection[int], step: int) -> None:
        self._is_open = True
        positions = dict.fromkeys(numbers, START)
        self._next_step = self._next_entry = 0
        if self._saved is not None and step >= self._saved[0]:
            self._next_step, saved = self._saved[0], self._with_entries(self._saved[1])
            positions = {number: self._saved_position(number, saved) for number in numbers}
            self._next_entry = max(entry for entry, *_ in saved.values())
        shuffle = DocumentShuffle(self._seed, self._shuffle_window, CHARACTERS_HELD // self.num_lanes)
        self._lanes = {
            number: Lane(
                number,
                self.files,
                self._tokenizer,
                sequence_length=self._length,
                file_of=self.file_of,
                shuffle=shuffle,
                start=position,
            )
            for number, position in positions.items()
        }

    def _with_entries(self, saved: dict[str, list[Any]]) -> dict[str, tuple[int, int, int, LanePosition]]:
        """Saved lanes as (next entry of the list, lanes, files, position)."""
        if any(len(values) < 7 or not isinstance(values[6], list) for values in saved.values()):
            return self._from_fixed_lanes(saved)
        return {
            number: (entry, lanes, files, LanePosition(windows, document, token, tuple(entries), *(block or (1, 0))))
            for number, (lanes, files, windows, entry, document, token, entries, *block) in saved.items()
        }  # without a block: of an earlier version, which did not shuffle documents

    def _from_fixed_lanes(self, saved: dict[str, list[Any]]) -> dict[str, tuple[int, int, int, LanePosition]]:
        """Checkpoints of earlier versions, whose lanes had lists of files of their own in every epoch."""
        log.warning(
            "the checkpoint's place in %s is of an earlier version: until the epoch after this one, "
            "some documents are read twice or never",
            self.files.name,
        )
        positions: dict[str, tuple[int, int, int, LanePosition]] = {}
        for number, (lanes, files, windows, epoch, place, document, token) in saved.items():
            entry = epoch * files + int(number) + place * lanes
            positions[number] = (0, lanes, files, LanePosition(windows, document, token, (entry,), block=1))
        following = 1 + max(position.entries[0] for _, _, _, position in positions.values())
        return {number: (following, *rest) for number, (_, *rest) in positions.items()}  # type: ignore[misc]

    def _saved_position(self, number: int, saved: dict[str, tuple[int, int, int, LanePosition]]) -> LanePosition:
        if str(number) not in saved:
            raise ValueError(f"the restored state has no lane {number}; it has {', '.join(sorted(saved))}")
        _, num_lanes, num_files, position = saved[str(number)]
        expected = (self.num_lanes, self.files.num_files)
        before = self.dealing.before(self._next_step, self.positions_of(number), self._global_batch)
        if (num_lanes, num_files) != expected or position.num_windows != before:
            raise UserError(
                f"the checkpoint's place in {self.files.name} does not fit this run",
                evidence=f"saved with {num_lanes} lanes over {num_files} files; now {expected[0]} over {expected[1]}",
                cause="train.global_batch, the data source or its files have changed since",
                fix="go back to the former values, or start anew: checkpoint.resume=false",
            )
        return position

    def _state(self, lane: Lane) -> list[Any]:
        position = lane.position
        return [
            self.num_lanes,
            self.files.num_files,
            position.num_windows,
            self._next_entry,
            position.document,
            position.token,
            list(position.entries),
            position.block,
            position.number,
        ]
