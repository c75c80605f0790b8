"""The `data` section of the run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from windlass.spec.section import Section, SettingError

CHARACTERS_HELD = 1 << 29  # of text that a whole stream shuffles at most, in one process if it reads all of it


class MixedSource(Section):
    """One of several sources that are mixed. What is not given here is taken from the section above."""

    source: str
    """The same forms as `data.source`."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Its share of the sequences, relative to the weights of the others."""
    config: str | None = None
    """Configuration of a `hf:` source."""
    split: str | None = None
    """Split of a `hf:` source."""
    revision: str | None = None
    """Commit, tag or branch of a `hf:` dataset."""
    files: tuple[str, ...] = ()
    """Data files of a `hf:json`, `hf:text` or `hf:parquet` source."""
    text_field: str | None = None
    """Field of a record that holds the text."""


class DataSection(Section):
    """What is read, and how it becomes sequences."""

    source: str = "hf:allenai/c4"
    """`corpus:austen` (shipped) · a folder of token shards (`windlass data tokenize`) · JSONL, CSV, text or parquet
    files (a path or a glob; tokenized once into a cache) · either of them as `s3://BUCKET/…` · `hf:NAME` (a `datasets`
    source, streamed) · `python:my.module:dataset` (your own, docs/extending.md)."""
    sources: tuple[MixedSource, ...] = ()
    """Several sources instead of one, mixed by weight: `[{source: shards, weight: 3}, {source: "hf:NAME"}]`."""
    cache_gib: Annotated[float, Field(gt=0.0)] = 200.0
    """Room on every node for blocks of `s3://` shards; those used longest ago go when it is full."""
    config: str | None = None
    """Configuration of a `hf:` source; `en` for allenai/c4."""
    split: str = "train"
    """Split of a `hf:` source."""
    revision: str | None = None
    """Commit, tag or branch of a `hf:` dataset. Default: its newest."""
    files: tuple[str, ...] = ()
    """Data files of a `hf:json`, `hf:text` or `hf:parquet` source: paths or URLs."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    format: Literal["text", "chat", "instruction", "preference"] = "text"
    """What a record is: `text` · `chat`: messages with roles, rendered by the tokenizer's own template · `instruction`:
    a prompt and its completion · `preference`: a prompt, a chosen and a rejected answer, for `train.objective: dpo`. Of
    all but the first only completions are trained on, and examples are packed whole."""
    messages_field: str = "messages"
    """Field of a `chat` record that holds its messages, each with `role` and `content`, or with `from` and `value`
    (ShareGPT; then `conversations` is looked for too). A field `tools`, where there is one, goes to the template."""
    prompt_field: str = "prompt"
    """Field of an `instruction` or `preference` record that holds the prompt; of the latter it may be missing where the
    answers are whole chats."""
    completion_field: str = "completion"
    """Field of an `instruction` record that holds the completion."""
    chosen_field: str = "chosen"
    """Field of a `preference` record that holds the better answer: a text, or messages."""
    rejected_field: str = "rejected"
    """Field of a `preference` record that holds the worse answer."""
    train_on: Literal["all", "last"] = "all"
    """Assistant turns of a `chat` record that are trained on."""
    chat_template: str = "default"
    """Name of the chat template, of a tokenizer that has several."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What becomes of a `chat` or `instruction` record with more tokens than a sequence has room for."""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """What becomes of a record that cannot be read: bad JSON, a missing field, an unknown role, text that is not
    Unicode. `refuse` names it and ends; `skip` leaves it out and counts it."""
    special_tokens: tuple[str, ...] = ()
    """Tokens added to the tokenizer; the model gets a row for each, and trains it, also beside frozen weights."""
    tokenizer: str | None = None
    """Hub id or folder of a tokenizer, or `tiny` (shipped). Default: the model's own; `tiny` for the tiny presets."""
    sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens per training sequence. Default: 2048, or the model's maximum where that is shorter."""
    document_mask: bool | None = None
    """Keep packed documents apart: attention and loss stop at document ends, positions restart there. Default: for
    `chat` and `instruction`."""
    shuffle: bool = True
    """Visit the sequences in a random order drawn from train.seed; a new one every epoch."""
    shuffle_window: Annotated[int, Field(ge=1)] = 1000
    """Documents of a `hf:` source that are shuffled among each other, in each file that is being read; 1: they keep
    their order. A resume reads up to so many again of each."""
    validation_source: str | None = None
    """Where validation sequences come from; same forms as `source`."""
    validation_split: str = "validation"
    """Split of a `hf:` validation source."""
    holdout: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the sequences kept out of training and used for validation (not for `hf:` sources)."""

    @model_validator(mode="after")
    def source_or_sources(self) -> Self:
        if self.sources and "source" in self.model_fields_set:
            raise SettingError(
                "give either data.source or data.sources, and not both",
                "data.sources",
                [],
                "    or leave data.source out",
            )
        return self

    @model_serializer(mode="wrap")
    def without_the_other(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written down can be read again: of source and sources only the one that counts."""
        values: dict[str, Any] = handler(self)
        values.pop("source" if self.sources else "sources", None)
        return values

    @model_validator(mode="after")
    def one_validation_set(self) -> Self:
        if self.validation_source and self.holdout:
            raise SettingError(
                "give either data.validation_source or data.holdout, and not both",
                "data.holdout",
                0,
                "    or data.validation_source=null",
            )
        return self

    @model_validator(mode="after")
    def special_tokens_are_tokens(self) -> Self:
        if not all(self.special_tokens) or len(set(self.special_tokens)) < len(self.special_tokens):
            raise SettingError(
                "data.special_tokens must be texts that differ and are not empty",
                "data.special_tokens",
                [token for token in dict.fromkeys(self.special_tokens) if token],
            )
        return self
