"""One lane of a stream: the files handed to it, one after another, packed into windows, with a small position.

Documents of a file are shuffled block by block (MosaicML's `py1br`): so many that follow one another are read and used
in an order that follows from the seed. The first block of a file has a size of its own, so that blocks begin elsewhere
in every epoch, and lanes do not all read at once. A resume reads the block under way again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from windlass.data.sequences.order import Permutation
from windlass.data.sequences.sequences import Sequence
from windlass.data.sources.hub import DocumentFiles
from windlass.data.tokenizers.tokenizer import Tokenizer

DOCUMENTS_AT_ONCE = 16  # tokenized together; what is read ahead is read again after a restore


@dataclass(frozen=True)
class DocumentShuffle:
    """In which order a lane uses the documents of a file: in blocks of so many, or of so many characters."""

    seed: int | None  # None: in the file's order
    documents: int
    characters: int

    def size(self, entry: int, first: int) -> int:
        """Documents of the block that begins with `first`, if its text is not too long."""
        if self.seed is None or self.documents == 1:
            return 1
        if first:
            return self.documents
        return 1 + Permutation(self.documents, seed=self.seed, epoch=entry, purpose="first block")[0]

    def order(self, entry: int, first: int, size: int) -> Several[int]:
        if self.seed is None or size == 1:
            return range(size)
        permuted = Permutation(size, seed=self.seed, epoch=entry, purpose=f"documents from {first}")
        return [permuted[place] for place in range(size)]


@dataclass(frozen=True)
class Place:
    """A document of a lane: which of the shuffled documents of a block it is."""

    entry: int  # of the file list
    first: int  # document of that file, with which the block begins
    size: int  # documents of the block
    number: int  # in its shuffled order


@dataclass
class Piece:
    """A tokenized document that windows are cut from."""

    place: Place
    tokens: NDArray[np.int64]
    used: int  # tokens that are behind us


@dataclass(frozen=True)
class LanePosition:
    """Where a lane's next window begins, and what it was handed so far."""

    num_windows: int  # read since the run began
    document: int  # of the first entry, with which the block under way begins
    token: int  # of the document under way
    entries: tuple[int, ...]  # of the file list, handed to the lane and not behind it yet
    block: int = 0  # documents of the block under way; 0: it has not been read
    number: int = 0  # of the document under way, in the block's shuffled order


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
        shuffle: DocumentShuffle,
        start: LanePosition = START,
    ) -> None:
        self.number = number
        self.num_windows = start.num_windows
        self._files = files
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._file_of = file_of  # an entry of the file list → the file
        self._shuffle = shuffle
        self._start = start
        self._handed = deque(start.entries)  # in the order of reading; the first may be partly behind us
        self._unread = deque(start.entries)
        self._open: Iterator[tuple[Place, str]] | None = None
        self._pieces: deque[Piece] = deque()
        self._buffered = 0

    @property
    def position(self) -> LanePosition:
        if not self._pieces:
            # Nothing but whole files that hold no text lies between the beginning and here.
            entries = tuple(self._handed)
            before = self._start if entries[:1] == self._start.entries[:1] else START
            return replace(before, num_windows=self.num_windows, entries=entries)
        place, token = self._pieces[0].place, self._pieces[0].used
        while self._handed[0] != place.entry:
            self._handed.popleft()
        return LanePosition(self.num_windows, place.first, token, tuple(self._handed), place.size, place.number)

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
        name = f"lane:{self.number}:{self.num_windows}:{first.place.entry // self._files.num_files}"
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
        some = list(islice(self._open, DOCUMENTS_AT_ONCE))
        if len(some) < DOCUMENTS_AT_ONCE:
            self._open = None  # the file is read to its end
        for (place, _), tokens in zip(some, self._tokenizer.encode_batch([text for _, text in some]), strict=True):
            used = self._start.token if place == self._started_in else 0
            if used < len(tokens):
                self._pieces.append(Piece(place, tokens, used))
                self._buffered += len(tokens) - used
        return True

    @property
    def _started_in(self) -> Place | None:
        """The one document that may be partly behind us when it is read."""
        start = self._start
        return Place(start.entries[0], start.document, start.block, start.number) if start.entries else None

    def _documents(self, entry: int) -> Iterator[tuple[Place, str]]:
        """The documents of a file that are not empty, from where the lane started if it started there."""
        start = self._start if self._start.entries[:1] == (entry,) else START
        texts = self._files.documents(self._file_of(entry), start.document)
        first, size, behind = start.document, start.block, start.number
        while block := list(islice(texts, size)) if size else self._read_block(texts, entry, first):
            order = self._shuffle.order(entry, first, len(block))
            for number in range(behind, len(block)):
                if text := block[order[number]]:
                    yield Place(entry, first, len(block), number), text
            first, size, behind = first + len(block), 0, 0

    def _read_block(self, texts: Iterator[str], entry: int, first: int) -> list[str]:
        block: list[str] = []
        characters = 0
        for text in islice(texts, self._shuffle.size(entry, first)):
            block.append(text)
            characters += len(text)
            if characters >= self._shuffle.characters:
                break
        return block
