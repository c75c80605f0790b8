"""Sequences out of a stream, the same on any number of readers, with a position of their own that survives any resume.

The dataset's files are dealt to lanes; position p of a global batch is the next window of lane p % lanes. A reader
opens the lanes of its positions and takes each of them through the whole step: a lane's position after a step does not
depend on who reads it, so lanes can be handed to other readers on a resume. Where the number of files is no multiple
of the lanes, some lanes have more files and take longer to begin their next epoch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from windlass.data.hub import DocumentFiles, HubFiles, empty_source
from windlass.data.lane import Lane, Place
from windlass.data.order import Permutation
from windlass.data.sequences import Batch, Sequence
from windlass.data.sources import HubSource
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError

READING_THREADS = 8  # lanes wait for the network, not for each other


def open_stream(source: HubSource, tokenizer: Tokenizer, *, sequence_length: int, seed: int, shuffle: bool) -> Stream:
    """The stream of a `datasets` source; a dataset that is missing, empty or has other fields is an error here."""
    tokenizer.require_eos()
    files = HubFiles(source)
    find_a_document(files)
    return Stream(files, tokenizer, sequence_length=sequence_length, seed=seed if shuffle else None)


def find_a_document(files: DocumentFiles) -> None:
    for file in range(files.num_files):
        if any(files.documents(file, 0)):
            return
    raise empty_source(files.name)


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

    def __init__(self, files: DocumentFiles, tokenizer: Tokenizer, *, sequence_length: int, seed: int | None) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer.name, tokenizer.fingerprint
        count = "1 file" if files.num_files == 1 else f"{files.num_files:,} files"
        self.description = f"{files.name}, {count}, sequences of {sequence_length:,}"
        self._files = files
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._seed = seed
        self._global_batch = 0
        self._lanes: dict[int, Lane] = {}
        self._saved: dict[str, list[int]] | None = None
        self._dealing: Dealing = EveryPosition()
        self._counted: dict[int, tuple[int, int]] = {}  # lane: (step, windows before it)

    def deal(self, dealing: Dealing) -> None:
        """Fill only some of the positions."""
        self._dealing = dealing

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        """Lanes open at their saved places when they are next asked for; without any, they are read up to the step."""
        self._lanes.clear()
        self._saved = dict(state["lanes"]) if state and step else None

    def batch(self, step: int, global_batch: int, positions: list[int]) -> Batch:
        if global_batch != self._global_batch:
            self._lanes.clear()
            self._counted.clear()
            self._global_batch = global_batch
        num_lanes = self.num_lanes
        needed = sorted({position % num_lanes for position in positions})
        with ThreadPoolExecutor(min(READING_THREADS, max(1, len(needed))), "windlass-lane") as threads:
            read = threads.map(lambda lane: self._windows(lane, step), needed)
            windows = {position: window for lane in read for position, window in lane.items()}
        held = [self._lanes[lane] for lane in needed]
        return Batch(
            sequences=[windows[position] for position in positions if position in windows],
            state={"lanes": {str(lane.number): self._state(lane) for lane in held}},
            epoch=sum(lane.epoch for lane in held) / max(1, len(held)),
        )

    @property
    def num_lanes(self) -> int:
        return min(self._global_batch, self._files.num_files)

    def positions_of(self, lane: int) -> range:
        return range(lane, self._global_batch, self.num_lanes)

    def windows_before(self, lane: int, step: int) -> int:
        """Windows of a lane that were read before a step; counted on from the step before where that is known."""
        positions = self.positions_of(lane)
        known = self._counted.get(lane)
        if known and known[0] == step - 1:
            count = known[1] + len(self._dealing.positions(step - 1, positions, self._global_batch))
        else:
            count = self._dealing.before(step, positions, self._global_batch)
        self._counted[lane] = step, count
        return count

    def files_of(self, lane: int, epoch: int) -> list[int]:
        """The files a lane reads in an epoch, in order; over all lanes they are the files of the dataset."""
        places = range(lane, self._files.num_files, self.num_lanes)
        if self._seed is None:
            return list(places)
        order = Permutation(self._files.num_files, seed=self._seed, epoch=epoch, purpose="files")
        return [order[place] for place in places]

    def _windows(self, number: int, step: int) -> dict[int, Sequence]:
        """All windows of one lane in one step, by their positions."""
        before = self.windows_before(number, step)
        lane = self._lanes.get(number)
        if lane is None or lane.num_windows > before:
            lane = self._lanes[number] = self._open_lane(number, step)
        while lane.num_windows < before:  # asked for a later step than the one it is at
            lane.next_window()
        positions = self._dealing.positions(step, self.positions_of(number), self._global_batch)
        return {position: lane.next_window() for position in positions}

    def _open_lane(self, number: int, step: int) -> Lane:
        start, num_windows = Place(0, 0, 0, 0), 0
        if self._saved is not None and step:
            start, num_windows = self._saved_place(number, step)
        return Lane(
            number,
            self._files,
            self._tokenizer,
            sequence_length=self._length,
            files_of_epoch=lambda epoch: self.files_of(number, epoch),
            shuffled=self._seed is not None,
            start=start,
            num_windows=num_windows,
        )

    def _saved_place(self, number: int, step: int) -> tuple[Place, int]:
        assert self._saved is not None
        saved = self._saved.get(str(number))
        if saved is None:
            raise ValueError(f"the restored state has no lane {number}; it has {', '.join(sorted(self._saved))}")
        num_lanes, num_files, num_windows, *place = saved
        expected = (self.num_lanes, self._files.num_files)
        if (num_lanes, num_files) != expected or num_windows > self.windows_before(number, step):
            raise UserError(
                f"the checkpoint's place in {self._files.name} does not fit this run",
                evidence=f"saved with {num_lanes} lanes over {num_files} files; now {expected[0]} over {expected[1]}",
                cause="train.global_batch, the data source or its files have changed since",
                fix="go back to the former values, or start anew: checkpoint.resume=false",
            )
        return Place(*place), num_windows

    def _state(self, lane: Lane) -> list[int]:
        place = lane.place
        return [
            self.num_lanes,
            self._files.num_files,
            lane.num_windows,
            place.epoch,
            place.file,
            place.document,
            place.token,
        ]
