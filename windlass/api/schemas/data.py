"""What `windlass data` and `windlass ckpt` print."""

from __future__ import annotations

from typing import Literal

from windlass.api.schemas import Printed


class Checkpoint(Printed):
    """A checkpoint in one tier."""

    tier: str
    step: int
    path: str
    complete: bool
    """False: a save that was cut off, or is under way; it is never resumed from."""
    bytes: int
    created: float | None
    """Seconds since 1970."""
    world_size: int | None
    tokens: int | None


class ListedCheckpoint(Checkpoint):
    """A checkpoint in one tier, with its validation."""

    validation_loss: float | None
    best: bool


class Damage(Printed):
    file: str
    reason: str


class VerifiedCheckpoint(Printed):
    """A checkpoint whose files were read."""

    tier: str
    step: int
    complete: bool
    removed: bool
    """By a run that saves, while it was read."""
    damages: list[Damage]


class FetchedCheckpoint(Printed):
    """A checkpoint that is in a folder now."""

    step: int
    path: str


class Pruned(Printed):
    """Checkpoints that were deleted, or with --dry-run would be."""

    deleted: list[Checkpoint]
    expired: list[Checkpoint]
    leftovers: int
    """What saves that were cut off had left, cleared."""


class Exported(Printed):
    """A Hugging Face folder."""

    path: str
    step: int
    kind: str
    """model or adapter."""
    dtype: str
    bytes: int


class PushedExport(Exported):
    """A Hugging Face folder that is on the Hub now."""

    repository: str
    url: str
    revision: str
    private: bool
    """Whether --private was given."""
    commit: str


class PushRequest(Printed):
    """What --push would send, and where."""

    path: str
    step: int
    kind: str
    dtype: str
    bytes: int | None
    """Of the weights; null: not known before an adapter is exported."""
    repository: str
    url: str
    revision: str
    private: bool
    exists: bool
    """Whether the repository does; else it would be made."""


class FetchedData(Printed):
    """Records of a dataset that are here now; with --shards as tokens."""

    out: str
    dataset: str
    records: int
    seconds: float
    bytes: int | None = None
    parts: int | None = None
    tokens: int | None = None
    shards: int | None = None


class TokenizedData(Printed):
    """Token shards that were made."""

    folder: str
    tokens: int
    documents: int
    shards: int
    dtype: str
    tokenizer: str
    vocab_size: int
    left_out: dict[str, int]
    """Documents that are not in them, by the reason."""
    validation: str | None
    """The folder of the validation shards."""
    seconds: float


class LengthBar(Printed):
    low: int
    high: int
    count: int


class Lengths(Printed):
    unit: Literal["tokens", "characters"]
    mean: float
    smallest: int
    median: int
    ninetieth: int
    largest: int
    histogram: list[LengthBar]


class InspectedData(Printed):
    """What shards or text files hold."""

    path: str
    kind: str
    num_documents: int
    num_tokens: int | None
    lengths: Lengths
    samples: list[str]
    facts: dict[str, int | str | None]


class UsedSource(Printed):
    """What a run takes from one of its sources."""

    source: str
    share: float
    num_sequences: int | None
    """None: a stream."""
    sequences_read: int
    epochs: float | None


class Sequence(Printed):
    """The text of a training sequence."""

    id: str
    source: str
    num_tokens: int
    num_trained: int
    documents: list[tuple[int, str]]
    """The number of each document of the source, and its text as far as it is in the sequence."""
