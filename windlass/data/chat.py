"""Examples to tokens: messages through the tokenizer's own template, with a mark on every token that is a completion.

A marked token has the top bit of its 32 set, so that the marks travel wherever the tokens do.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from windlass.data.templates import ChatTemplateError, Template
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.spec.data import DataSection

TRAINED = 1 << 31  # the bit of a token that is trained on
MARKS_VERSION = 2  # of the rule in `mark`: examples that were marked by another rule are tokenized again
Span = tuple[int, int]  # characters [begin, end) of a text


@dataclass(frozen=True)
class ExampleTokenizer(Tokenizer):
    """A tokenizer of chat or instruction examples, each given as JSON."""

    form: str = "chat"  # or "instruction"
    train_on: str = "all"

    marks_loss = True

    @cached_property
    def fingerprint(self) -> str:
        template = self.chat_template if self.form == "chat" else None
        facts = [super().fingerprint, self.form, self.train_on, template, MARKS_VERSION]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def _exact(self) -> Any:
        """The tokenizer without its post-processor: that one adds no token here, but may trim spaces off offsets."""
        from tokenizers import Tokenizer as FastTokenizer

        definition = {**json.loads(self.definition), "post_processor": None, "truncation": None, "padding": None}
        return FastTokenizer.from_str(json.dumps(definition))

    @cached_property
    def _template(self) -> Template:
        text = self.chat_template
        if text is None:
            raise UserError(
                f"the tokenizer {self.name} has no chat template",
                evidence="neither tokenizer_config.json nor chat_template.jinja holds one",
                cause="a model that was not trained on chats has none; its templates are a convention of its makers",
                fix="data.tokenizer=… of the chat model of the same family, or data.format=instruction",
            )
        return Template(text, self._named_tokens(), self.name)

    def _named_tokens(self) -> dict[str, str]:
        """The special tokens that a template may name."""
        named: dict[str, str] = {}
        for key, value in self.config.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                named[key] = token
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return named | {key: token for key, token in given.items() if token is not None}

    def check(self) -> None:
        """Raise a UserError where no example could be encoded."""
        if self.form == "chat":
            self._template  # noqa: B018

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        rendered = [self.rendered(json.loads(text)) for text in texts]
        encoded = self._exact.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        documents = []
        for one, (_, spans) in zip(encoded, rendered, strict=True):
            ids = mark(one.ids, one.offsets, spans)
            if self.form == "instruction":
                ids = [*self.prefix, *ids, self.require_eos() | TRAINED]
            documents.append(ids)
        return documents

    def rendered(self, example: dict[str, Any]) -> tuple[str, list[Span]]:
        """The text of an example and where its completions are."""
        if self.form == "instruction":
            prompt, completion = example["prompt"], example["completion"]
            return prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        return completions(self._template, example, last_only=self.train_on == "last")


def encoder(tokenizer: Tokenizer, data: DataSection) -> Tokenizer:
    """The tokenizer that makes the tokens of a run: its special tokens added, and examples marked."""
    tokenizer = tokenizer.with_added(data.special_tokens)
    if data.format == "text":
        return tokenizer
    example = ExampleTokenizer(
        name=tokenizer.name,
        definition=tokenizer.definition,
        config=tokenizer.config,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        form=data.format,
        train_on=data.train_on,
    )
    example.check()
    return example


def mark(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The ids, marked where a token holds a character of a span, or a part of one.

    So a token that begins in the prompt and ends in the completion (` yes` after a prompt with a space at its end) is
    trained on. A token of no width is one of several that share a character: the bytes of one out of the vocabulary.
    """
    filled = [span for span in spans if span[0] < span[1]]
    begins = [begin for begin, _ in filled]
    marked = []
    for number, (begin, end) in zip(ids, offsets, strict=True):
        span = bisect_left(begins, max(end, begin + 1)) - 1  # the last one that begins before the token ends
        marked.append(number | TRAINED if span >= 0 and begin < filled[span][1] else number)
    return marked


def completions(template: Template, example: dict[str, Any], *, last_only: bool) -> tuple[str, list[Span]]:
    """The rendered chat and where the assistant's turns are in it."""
    messages, tools = example["messages"], example.get("tools")
    text, spans = template.render(messages, tools)
    if not spans:
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [
            turn(template, messages, tools, place, text, last_only=last_only)
            for place in (turns[-1:] if last_only else turns)
        ]
    return text, spans[-1:] if last_only else spans


def turn(
    template: Template, messages: list[dict[str, Any]], tools: Any, place: int, text: str, *, last_only: bool
) -> Span:
    """Where one assistant's message is, from what the template makes of the messages up to it and with it.

    What comes before must be rendered the same whatever follows, else the place would be a guess.
    """
    before, _ = template.render(messages[:place], tools, prompting=True)
    upto, _ = template.render(messages[: place + 1], tools)
    if not text.startswith(before):  # a template without a prompt for the assistant's turn
        before, _ = template.render(messages[:place], tools)
    if place + 1 == len(messages):
        upto = text
    if not (upto.startswith(before) and text.startswith(upto)):
        raise ChatTemplateError(
            f"the chat template of {template.name} renders a message differently when others follow it",
            evidence=f"message {place + 1} of {json.dumps(messages, ensure_ascii=False)[:120]}…",
            cause="so the assistant's turns cannot be told apart, and no {% generation %} block marks them",
            fix="put {% generation %} … {% endgeneration %} around the assistant's text in the template"
            if last_only
            else "data.train_on=last    trains on the last turn of every record",
        )
    return len(before), len(upto)
