"""A dataset of the user's own: anything with a length, whose items are token ids. Its order is windlass'."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from windlass.common import own_code
from windlass.data.sequences.sequences import Part, Sequence
from windlass.data.sequences.windows import Numbered
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import UserError
from windlass.spec import Run

SAMPLED = 16  # items that a fingerprint is made of


@dataclass(frozen=True)
class OwnDataset(Numbered):
    """Items of a dataset, each one sequence. The order is the same after a resume as long as an item is the same
    whenever it is asked for.
    """

    items: Any
    vocab_size: int
    tokenizer: tuple[str, str]  # name and fingerprint

    @property
    def description(self) -> str:
        return f"{self.name}, {self.num_sequences:,} items, sequences of {self.sequence_length:,}"

    def sequence(self, index: int) -> Sequence:
        """An item as a sequence: a shorter one is filled up with tokens that do not count."""
        item = self.items[index]
        tokens = np.asarray(item["tokens"] if isinstance(item, dict) else item, dtype=np.int64).reshape(-1)
        mask = item.get("loss") if isinstance(item, dict) else None
        counts = np.ones(len(tokens), dtype=bool) if mask is None else np.asarray(mask, dtype=bool).reshape(-1)
        room = self.sequence_length + 1
        if not 2 <= len(tokens) <= room or len(counts) != len(tokens):
            raise UserError(
                f"item {index} of {self.name} has {len(tokens):,} tokens and {len(counts):,} marks of what counts",
                cause=f"2 to data.sequence_length + 1 = {room:,} tokens make a sequence and its last target",
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise UserError(
                f"item {index} of {self.name} has the token {int(tokens.max())}",
                cause=f"the tokenizer {self.tokenizer[0]} has {self.vocab_size:,}",
            )
        filling = room - len(tokens)
        return Sequence(
            id=f"item:{index}",
            tokens=np.pad(tokens, (0, filling)),
            document_starts=np.zeros(1, dtype=np.int64),
            loss=None if mask is None and not filling else np.pad(counts, (0, filling)),
        )

    def fingerprint(self) -> str:
        """Of its length and of some of its items, spread evenly."""
        digest = hashlib.sha256(str(self.num_sequences).encode())
        sampled = min(SAMPLED, self.num_sequences)
        for number in range(sampled):
            sequence = self.sequence(self.first + number * self.num_sequences // sampled)
            digest.update(sequence.tokens.tobytes() + (b"" if sequence.loss is None else sequence.loss.tobytes()))
        return digest.hexdigest()


def open_own(path: str, run: Run, part: Part, *, tokenizer: str) -> OwnDataset:
    """Import and make a run's own dataset: `my.module:name` is called with the run and with train or validation."""
    key = "data.source" if part == "train" else "data.validation_source"
    make = own_code.load(path, key)
    items = make(run, part) if callable(make) else make
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
        raise UserError(
            f"{path} is no dataset that a run can go on in: {type(items).__name__} has no length, or no items by index",
            cause="a step is found again by its number, which takes items that can be asked for by theirs",
            fix="give it __len__ and __getitem__; a stream goes through `windlass data tokenize`",
        )
    if not len(items):
        raise UserError(f"{path} holds no items")
    assert run.data.sequence_length
    loaded = load_tokenizer(tokenizer).with_added(run.data.special_tokens)
    return OwnDataset(
        items=items,
        name=path,
        sequence_length=run.data.sequence_length,
        vocab_size=int(getattr(items, "vocab_size", loaded.vocab_size)),
        tokenizer=(loaded.name, loaded.fingerprint),
        num_sequences=len(items),
        seed=run.train.seed if run.data.shuffle and part == "train" else None,
    )
