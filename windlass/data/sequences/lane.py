"""One lane of a stream: the files handed to it, one after another, packed into windows, with a small position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.data.sequences.sequences import Sequence
from windlass.data.sources.hub import DocumentFiles
from windlass.data.tokenizers.tokenizer import Tokenizer

DOCUMENTS_AT_ONCE = 16  # tokenized together; what is read ahead is read again after a restore


@dataclass
class Piece:
    """A tokenized document that windows are cut from."""

    entry: int  # of the file list that the document's file is
    document: int  # of that file
    tokens: NDArray[np.int64]
    used: int  # tokens that are behind us


@dataclass(frozen=True)
class LanePosition:
    """Where a lane's next window begins, and what it was handed so far."""

    num_windows: int  # read since the run began
    document: int  # of the first entry
    token: int  # of that document
    entries: tuple[int, ...]  # of the file list, handed to the lane and not behind it yet


START = LanePosition(num_windows=0, document=0, token=0, entries=())


class Lane:
    """Windows of `sequence_length` + 1 tokens, each beginning with the last token of the one before.

    Which files a lane reads is not its own decision: it asks for one (`prepare`) and is handed it (`take`).
    """

    def __init__(
        self,
        number: int,
        files: DocumentFiles,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        file_of: Callable[[int], int],
        start: LanePosition = START,
    ) -> None:
        self.number = number
        self.num_windows = start.num_windows
        self._files = files
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._file_of = file_of  # an entry of the file list → the file
        self._start = start
        self._handed = deque(start.entries)  # in the order of reading; the first may be partly behind us
        self._unread = deque(start.entries)
        self._open: Iterator[tuple[int, int, str]] | None = None
        self._pieces: deque[Piece] = deque()
        self._buffered = 0

    @property
    def position(self) -> LanePosition:
        if not self._pieces:
            # Nothing but whole files that hold no text lies between the beginning and here.
            entries = tuple(self._handed)
            untouched = entries[:1] == self._start.entries[:1]
            document, token = (self._start.document, self._start.token) if untouched else (0, 0)
            return LanePosition(self.num_windows, document, token, entries)
        first = self._pieces[0]
        while self._handed[0] != first.entry:
            self._handed.popleft()
        return LanePosition(self.num_windows, first.document, first.used, tuple(self._handed))

    def take(self, entry: int) -> None:
        """A file of the file list is this lane's to read."""
        self._handed.append(entry)
        self._unread.append(entry)

    def prepare(self, num_windows: int) -> bool:
        """Read what so many windows need, as far as the lane's files go; whether that was enough."""
        needed = num_windows * self._length + 1 if num_windows else 0
        while self._buffered < needed:
            if not self._fill():
                return False
        return True

    def next_window(self) -> Sequence:
        first = self._pieces[0]
        name = f"lane:{self.number}:{self.num_windows}:{first.entry // self._files.num_files}"
        tokens = np.empty(self._length + 1, dtype=np.int64)
        starts: list[int] = []
        filled = 0
        for piece in self._pieces:
            if piece.used == 0:
                starts.append(filled)
            part = piece.tokens[piece.used : piece.used + len(tokens) - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            if filled == len(tokens):
                break
        self._advance(self._length)
        self.num_windows += 1
        return Sequence(name, tokens, np.array(starts, dtype=np.int64))

    def _advance(self, count: int) -> None:
        self._buffered -= count
        while count:
            piece = self._pieces[0]
            step = min(count, len(piece.tokens) - piece.used)
            piece.used += step
            count -= step
            if piece.used == len(piece.tokens):
                self._pieces.popleft()

    def _fill(self) -> bool:
        """Tokenize some more documents of the lane's files; False where there are none."""
        if self._open is None:
            if not self._unread:
                return False
            self._open = self._documents(self._unread.popleft())
        some = list(_first(self._open, DOCUMENTS_AT_ONCE))
        if len(some) < DOCUMENTS_AT_ONCE:
            self._open = None  # the file is read to its end
        encoded = self._tokenizer.encode_batch([text for _, _, text in some])
        start = self._start
        for (entry, document, _), tokens in zip(some, encoded, strict=True):
            # Only the document that the lane started in may be partly used.
            used = start.token if start.entries[:1] == (entry,) and document == start.document else 0
            if used < len(tokens):
                self._pieces.append(Piece(entry, document, tokens, used))
                self._buffered += len(tokens) - used
        return True

    def _documents(self, entry: int) -> Iterator[tuple[int, int, str]]:
        """The documents of a file that are not empty, from where the lane started if it started there."""
        skip = self._start.document if self._start.entries[:1] == (entry,) else 0
        for document, text in enumerate(self._files.documents(self._file_of(entry), skip), start=skip):
            if text:
                yield entry, document, text


def _first(items: Iterable[tuple[int, int, str]], count: int) -> Iterator[tuple[int, int, str]]:
    for number, item in enumerate(items, start=1):
        yield item
        if number == count:
            return
