"""The `data` section of the run file."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from windlass.spec.section import Section


class DataSection(Section):
    """What is read, and how it becomes sequences."""

    source: str = "hf:allenai/c4"
    """`corpus:austen` (shipped) · a folder of token shards (`windlass data tokenize`) · JSONL, text or parquet files
    (a path or a glob; tokenized once into a cache) · `hf:NAME` (a `datasets` source, streamed)."""
    config: str | None = None
    """Configuration of a `hf:` source; `en` for allenai/c4."""
    split: str = "train"
    """Split of a `hf:` source."""
    files: tuple[str, ...] = ()
    """Data files of a `hf:json`, `hf:text` or `hf:parquet` source: paths or URLs."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or `tiny` (shipped). Default: the model's own; `tiny` for the tiny presets."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens per training sequence. Default: 2048, or the model's maximum where that is shorter."""
    document_mask: bool = False
    """Keep packed documents apart: attention and loss stop at document ends, positions restart there."""
    shuffle: bool = True
    """Visit the sequences in a random order drawn from train.seed; a new one every epoch."""
    validation_source: str | None = None
    """Where validation sequences come from; same forms as `source`."""
    validation_split: str = "validation"
    """Split of a `hf:` validation source."""
    holdout: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the sequences kept out of training and used for validation (not for `hf:` sources)."""

    @model_validator(mode="after")
    def one_validation_set(self) -> Self:
        if self.validation_source and self.holdout:
            raise ValueError("give either data.validation_source or data.holdout, and not both")
        return self
