"""Examples to tokens: messages through the tokenizer's own template, with a mark on every token that is a completion.

A marked token has the top bit of its 32 set, so that the marks travel wherever the tokens do.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from windlass.common.files import json_digest
from windlass.data.tokenizers.templates import ChatTemplateError, Template
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.spec.data import DataSection

TRAINED = 1 << 31  # the bit of a token that is trained on
MARKS_VERSION = 3  # of the rule in `mark`: examples that were marked by another rule are tokenized again
Span = tuple[int, int]  # characters [begin, end) of a text


@dataclass(frozen=True)
class ExampleTokenizer(Tokenizer):
    """A tokenizer of chat or instruction examples, each given as JSON."""

    form: str = "chat"  # or "instruction", or "preference"
    train_on: str = "all"
    template_name: str = "default"

    marks_loss = True

    @cached_property
    def fingerprint(self) -> str:
        template = self.chat_templates.get(self.template_name) if self.form != "instruction" else None
        return json_digest([super().fingerprint, self.form, self.train_on, template, MARKS_VERSION])

    @cached_property
    def _exact(self) -> Any:
        """The tokenizer without its post-processor: that one adds no token here, but may trim spaces off offsets."""
        from tokenizers import Tokenizer as FastTokenizer

        definition = {**json.loads(self.definition), "post_processor": None, "truncation": None, "padding": None}
        return FastTokenizer.from_str(json.dumps(definition))

    @cached_property
    def _template(self) -> Template:
        templates = self.chat_templates
        if templates and self.template_name not in templates:
            raise UserError(
                f"the tokenizer {self.name} has no chat template {self.template_name!r}",
                evidence=f"it has {', '.join(templates)}",
                fix=f"data.chat_template={next(iter(templates))}",
            )
        if not templates:
            raise UserError(
                f"the tokenizer {self.name} has no chat template",
                evidence="neither tokenizer_config.json nor chat_template.jinja holds one",
                cause="a model that was not trained on chats has none; its templates are a convention of its makers",
                fix="data.tokenizer=… of the chat model of the same family, or data.format=instruction",
            )
        return Template(templates[self.template_name], self._named_tokens(), self.name)

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

    @property
    def ends_answers(self) -> bool:
        """Whether something follows the text of an answer that the model can learn to stop with."""
        if self.form != "chat":
            return True
        try:
            asked_and_answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
            text, spans = self.rendered({"messages": asked_and_answered})
        except ChatTemplateError:
            return True  # of a template that does not take even this, records will tell
        return not "".join(text[begin:end] for begin, end in spans).rstrip().endswith(PROBE)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        if self.form == "preference":
            return [self.encode_pair(json.loads(text)) for text in texts]
        rendered = [self.rendered(json.loads(text)) for text in texts]
        encoded = self._exact.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        documents = []
        for encoding, (_, spans) in zip(encoded, rendered, strict=True):
            ids = mark(encoding.ids, encoding.offsets, spans)
            if self.form == "instruction":
                ids = [*self.prefix, *ids, self.require_eos() | TRAINED]
            documents.append(ids)
        return documents

    def encode_pair(self, pair: dict[str, Any]) -> list[int]:
        """The chosen example, then the rejected one. All that follows a prompt is marked, and so the first marks end
        where the second example begins: its first token, which nothing predicts, has none.
        """
        ids: list[int] = []
        for example in (pair["chosen"], pair["rejected"]):
            is_chat = "messages" in example
            if is_chat:
                text, spans = completions(self._template, {**pair, **example}, last_only=True)
            else:
                text, spans = example["prompt"] + example["completion"], [(len(example["prompt"]), 0)]
            encoding = self._exact.encode(text, add_special_tokens=False)
            half = mark(encoding.ids, encoding.offsets, [(spans[0][0], len(text))])
            if not is_chat:
                half = [*self.prefix, *half, self.require_eos() | TRAINED]
            ids += [half[0] & ~TRAINED, *half[1:]]
        return ids

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
        template_name=data.chat_template,
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
    messages, text, blocks = shown(template, example)
    tools = example.get("tools")
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [place for place in (turns[-1:] if last_only else turns) if messages[place].get("weight") != 0]
    if blocks:
        spans = blocks if wanted == turns else blocks_of(template, messages, tools, text, blocks, turns, wanted)
    else:
        spans = [turn(template, messages, tools, place, text, last_only=last_only) for place in wanted]
    require_shown(template, [messages[place] for place in wanted], "".join(text[begin:end] for begin, end in spans))
    return text, spans


def shown(template: Template, example: dict[str, Any]) -> tuple[list[dict[str, Any]], str, list[Span]]:
    """The messages as the template takes them, and what it makes of them.

    OpenAI writes the arguments of a tool call as a text of JSON. Most templates take an object, and would quote that
    text once more; some take the text alone.
    """
    objects, tools = with_arguments(example["messages"], as_text=False), example.get("tools")
    texts = with_arguments(objects, as_text=True)
    try:
        text, blocks = template.render(objects, tools)
    except ChatTemplateError:
        if texts == objects:
            raise
    else:
        given = [call["function"].get("arguments") for message in objects for call in calls_of(message)]
        printed = [arguments for arguments in given if isinstance(arguments, dict)]
        if not any(repr(arguments) in text and json.dumps(arguments) not in text for arguments in printed):
            return objects, text, blocks
    return texts, *template.render(texts, tools)


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    objects = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [call for call in objects if isinstance(call.get("function"), dict)]


def with_arguments(messages: list[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """The messages with the arguments of their tool calls as texts of JSON, or as the objects that these stand for."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        given = function["arguments"]
        if as_text and isinstance(given, dict):
            given = json.dumps(given, ensure_ascii=False)
        elif not as_text and isinstance(given, str):
            try:
                parsed = json.loads(given)
            except (ValueError, RecursionError):
                parsed = None
            given = parsed if isinstance(parsed, dict) else given
        return {**call, "function": {**function, "arguments": given}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def require_shown(template: Template, messages: list[dict[str, Any]], trained: str) -> None:
    """A template leaves out what it does not know: the model would learn to say nothing there."""
    for message in messages:
        names = [str(call["function"].get("name")) for call in calls_of(message)]
        lines = text_of(message.get("content")).strip().splitlines()
        expected = names or [line.strip() for line in lines[-1:]]
        lost = next((words for words in expected if words not in trained), None)
        if lost is not None:
            what = "the tool calls" if names else "the text"
            raise ChatTemplateError(
                f"the chat template of {template.name} leaves out {what} of the assistant",
                evidence=f"{lost[:80]!r} of {json.dumps(message, ensure_ascii=False)[:160]}",
                cause="it is not made for such messages, and the model would learn an empty answer",
                fix="a tokenizer whose template shows them, or leave such records out",
            )


def text_of(content: Any) -> str:
    """The text of a message, which may be given in parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return str(content or "")


def blocks_of(
    template: Template,
    messages: list[dict[str, Any]],
    tools: Any,
    text: str,
    blocks: list[Span],
    turns: list[int],
    wanted: list[int],
) -> list[Span]:
    """The generation blocks of some of the turns. A turn may have several: its text, then its end."""
    try:
        begins = {place: len(prompt(template, messages, tools, place, text)) for place in turns}
    except ChatTemplateError:
        if len(blocks) != len(turns):
            raise
        return [blocks[turns.index(place)] for place in wanted]
    spans = []
    for place in wanted:
        end = next((begins[turn] for turn in turns if turn > place), len(text))
        spans += [block for block in blocks if block[1] > begins[place] and block[0] < end]
    return spans


def prompt(template: Template, messages: list[dict[str, Any]], tools: Any, place: int, text: str) -> str:
    """What comes before one of the assistant's messages: those before it, and the template's prompt for its turn."""
    if not place:
        return ""
    before, _ = template.render(messages[:place], tools, prompting=True)
    if not text.startswith(before):
        raise rewrites(template, messages, place, "leave such records out, or train on every turn: data.train_on=all")
    return before


def turn(
    template: Template, messages: list[dict[str, Any]], tools: Any, place: int, text: str, *, last_only: bool
) -> Span:
    """Where one assistant's message is, from what the template makes of the messages up to it and with it.

    What comes before must be rendered the same whatever follows, else the place would be a guess.
    """
    before, _ = template.render(messages[:place], tools, prompting=True)
    upto, _ = template.render(messages[: place + 1], tools)
    if not text.startswith(before):
        before = head(template, messages[:place], tools, before, text)
    if place + 1 == len(messages):
        upto = text
    if not text.startswith(upto):
        upto = without_end(template, messages[: place + 1], tools) or upto
    if not (upto.startswith(before) and text.startswith(upto)):
        fix = "put {% generation %} … {% endgeneration %} around the assistant's text in the template"
        if not last_only:
            fix = "data.train_on=last    trains on the last turn of every record"
        raise rewrites(template, messages, place, fix)
    return len(before), len(upto)


PROBE = "\U0010fff2\U0010fffe"  # an answer that shares no character with any template


def head(template: Template, messages: list[dict[str, Any]], tools: Any, prompted: str, text: str) -> str:
    """What comes before an answer, where the template's prompt says more: that the answer begins with a thought, say.

    The part of the prompt is taken that any answer comes after; not what this one happens to share with it.
    """
    plain, _ = template.render(messages, tools)
    try:
        probed, _ = template.render([*messages, {"role": "assistant", "content": PROBE}], tools)
    except ChatTemplateError:
        return plain
    pairs = enumerate(zip(prompted, probed, strict=False))
    length = next((place for place, (expected, actual) in pairs if expected != actual), len(plain))
    shared = prompted[:length]
    return shared if shared.startswith(plain) and text.startswith(shared) else plain


def without_end(template: Template, messages: list[dict[str, Any]], tools: Any) -> str | None:
    """The messages as others follow them, where a template ends the whole chat by a token: up to the next prompt."""
    prompted, _ = template.render(messages[:-1], tools, prompting=True)
    plain, _ = template.render(messages[:-1], tools)
    if not prompted.startswith(plain):
        plain = plain.removesuffix(template.end)
    following, _ = template.render(messages, tools, prompting=True)
    next_prompt = prompted.removeprefix(plain)
    if not (next_prompt and prompted.startswith(plain) and following.endswith(next_prompt)):
        return None
    return following.removesuffix(next_prompt)


def rewrites(template: Template, messages: list[dict[str, Any]], place: int, fix: str) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template of {template.name} renders a message differently when others follow it",
        evidence=f"message {place + 1} of {json.dumps(messages, ensure_ascii=False)[:120]}…",
        cause="so the assistant's turns cannot be told apart",
        fix=fix,
    )
