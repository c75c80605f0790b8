"""One lane of a stream: its files one after another, packed into windows, with a position small enough to save."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windlass.data.hub import DocumentFiles, empty_source
from windlass.data.sequences import Sequence
from windlass.data.tokenizer import Tokenizer

DOCUMENTS_AT_ONCE = 16  # tokenized together; what is read ahead is read again after a restore
EMPTY_EPOCHS = 1000  # shuffling may deal a lane nothing but empty files for an epoch, not for ever


@dataclass(frozen=True)
class Place:
    """A token of a lane: which epoch, which of the lane's files, which document of it, which token of that."""

    epoch: int
    file: int
    document: int
    token: int


@dataclass
class Piece:
    """A tokenized document that windows are cut from."""

    place: Place  # its first token's
    tokens: NDArray[np.int64]
    used: int  # tokens that are behind us


class Lane:
    """Windows of `sequence_length` + 1 tokens, each beginning with the last token of the one before."""

    def __init__(
        self,
        number: int,
        files: DocumentFiles,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        files_of_epoch: Callable[[int], list[int]],
        shuffled: bool,
        start: Place,
        num_windows: int,
    ) -> None:
        self.number = number
        self.num_windows = num_windows  # read so far, since the run began
        self._files = files
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._files_of_epoch = files_of_epoch
        self._shuffled = shuffled
        self._start = start
        self._texts = self._read(start)
        self._pieces: deque[Piece] = deque()
        self._buffered = 0

    @property
    def place(self) -> Place:
        """Where the next window begins."""
        if not self._pieces:
            return self._start
        first = self._pieces[0]
        return Place(first.place.epoch, first.place.file, first.place.document, first.used)

    @property
    def epoch(self) -> float:
        """How often this lane has been through its files, by whole files."""
        place = self.place
        return place.epoch + place.file / max(1, len(self._files_of_epoch(place.epoch)))

    def next_window(self) -> Sequence:
        while self._buffered < self._length + 1:
            self._fill()
        name = f"lane:{self.number}:{self.num_windows}:{self.place.epoch}"
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

    def _fill(self) -> None:
        """Tokenize some more documents."""
        texts: list[tuple[Place, str]] = []
        for place, text in self._texts:
            texts.append((place, text))
            if len(texts) == DOCUMENTS_AT_ONCE:
                break
        encoded = self._tokenizer.encode_batch([text for _, text in texts])
        for (place, _), tokens in zip(texts, encoded, strict=True):
            # Only the document that the lane started in may be partly used.
            used = self._start.token if place == replace(self._start, token=0) else 0
            if used < len(tokens):
                self._pieces.append(Piece(place, tokens, used))
                self._buffered += len(tokens) - used

    def _read(self, start: Place) -> Iterator[tuple[Place, str]]:
        """The lane's documents from a place on, epoch after epoch, without the empty ones."""
        epoch, first_file, skip = start.epoch, start.file, start.document
        empty_epochs = 0
        while True:
            found = False
            files = self._files_of_epoch(epoch)
            for ordinal in range(first_file, len(files)):
                for document, text in enumerate(self._files.documents(files[ordinal], skip), start=skip):
                    if text:
                        found = True
                        yield Place(epoch, ordinal, document, 0), text
                skip = 0
            whole_epoch = epoch > start.epoch or (start.file, start.document) == (0, 0)
            empty_epochs = 0 if found or not whole_epoch else empty_epochs + 1
            if empty_epochs > (EMPTY_EPOCHS if self._shuffled else 0):
                names = ", ".join(map(str, files[:8]))
                raise empty_source(f"lane {self.number} of {self._files.name} (files {names})")
            epoch, first_file = epoch + 1, 0
