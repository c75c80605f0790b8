"""Read a run's own text files before anything is started: what tokenizing would stumble over is found here."""

from __future__ import annotations

import json
from pathlib import Path

from windlass.common.hub import is_hub_id
from windlass.data.build.cache import check_cache
from windlass.data.build.worker import encode, has_label
from windlass.data.sequences.packing import nothing_fits
from windlass.data.sequences.windows import all_held_out, too_little
from windlass.data.sources.reading import Skipped, documents, file_pieces
from windlass.data.sources.source import FileSource, compression
from windlass.data.tokenizers.chat import ExampleTokenizer, encoder
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.spec import Run

SCAN_BYTES = 128 << 20  # read in a second or two
COMPRESSED = 4  # bytes that a compressed one stands for
TOKENIZED_AT_ONCE = 16
RENDERED = 1000  # chats whose template is tried


def scan(source: FileSource, run: Run, *, training: bool) -> list[str]:
    """Raise a UserError for the first record that cannot be read; warnings for what was not looked at."""
    if run.target.kind == "local":
        check_cache()  # elsewhere it is not this machine's
    left, unread_bytes, skipped = SCAN_BYTES, 0, Skipped()
    probe = Probe(run, source.name, training=training)
    for file in source.files:
        if not isinstance(file, Path):
            unread_bytes += file.size
            continue
        for piece in file_pieces(file, source.text_field, skip_bad=source.skip_bad):
            cost = piece.size * (COMPRESSED if compression(piece.path) else 1)
            if cost > left:
                unread_bytes += piece.size
                continue
            left -= cost
            for text in documents(piece, skipped):
                probe.add(text)
    warnings = []
    if unread_bytes:
        warnings.append(
            f"{unread_bytes / 1e6:,.0f} MB of {source.name} were not looked at beforehand: "
            "a bad record there ends the run when its text is tokenized"
        )
    else:
        probe.require_enough()
    if skipped.count:
        reasons = "; ".join(skipped.reasons)
        warnings.append(f"{skipped.count:,} bad records of {source.name} are left out: {reasons}")
    return warnings


class Probe:
    """Tokenizes until it is clear that there is enough to train on; then it only counts."""

    def __init__(self, run: Run, name: str, *, training: bool) -> None:
        data = run.data
        self.name, self.data, self.length = name, data, data.sequence_length or 0
        self.wanted = 2 if training and data.holdout else 1
        self.num_tokens = self.num_documents = 0
        self.enough = not (data.tokenizer and not is_hub_id(data.tokenizer) and self.length)
        self.tokenizer: Tokenizer | None = None if self.enough else encoder(load_tokenizer(data.tokenizer or ""), data)
        self.waiting: list[str] = []

    def add(self, text: str) -> None:
        self.num_documents += 1
        refuses = isinstance(self.tokenizer, ExampleTokenizer) and self.data.bad_records == "refuse"
        if refuses and self.enough and self.num_documents <= RENDERED:
            assert isinstance(self.tokenizer, ExampleTokenizer)
            self.tokenizer.rendered(json.loads(text))
        if not self.enough:
            self.waiting.append(text)
            if len(self.waiting) >= TOKENIZED_AT_ONCE:
                self._tokenize()

    def _tokenize(self) -> None:
        assert self.tokenizer is not None
        self.tokenizer.require_eos()
        room = self.length + 1
        _, encoded = encode(self.tokenizer, self.waiting, Skipped() if self.data.bad_records == "skip" else None)
        for ids in encoded:
            self.num_tokens += len(ids)
            fits = self.data.too_long == "truncate" or len(ids) <= room
            if self.tokenizer.marks_loss and fits and has_label(ids[:room]):
                self.enough = True
        if not self.tokenizer.marks_loss and self.num_tokens > self.wanted * self.length:
            self.enough = True
        self.waiting = []

    def require_enough(self) -> None:
        """Raise a UserError where all of the text was seen and is too little."""
        if self.waiting and not self.enough:
            self._tokenize()
        if self.enough or self.tokenizer is None or not self.num_documents:
            return
        if self.tokenizer.marks_loss:
            raise nothing_fits(self.name, self.length, self.num_documents, self.data.too_long)
        if self.num_tokens <= self.length:
            raise too_little(self.name, self.num_tokens, self.length)
        raise all_held_out(self.name, (self.num_tokens - 1) // self.length, self.length, self.data.holdout)
