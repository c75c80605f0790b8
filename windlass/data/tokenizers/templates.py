"""Chat templates: the Jinja program that ships with a tokenizer, run in a sandbox, with its generation blocks noted."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from windlass.errors import UserError

# Templates may print a date. The same data must give the same tokens on any day.
FIXED_DATE = datetime(2024, 7, 26)


class ChatTemplateError(UserError):
    """A template that does not do with the messages of a record what training needs."""


class Template:
    """A compiled chat template."""

    def __init__(self, source: str, tokens: dict[str, str], name: str) -> None:
        self.name, self._tokens = name, tokens
        self._template = _compile(source, name)

    @property
    def end(self) -> str:
        return self._tokens.get("eos_token", "")

    def render(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompting: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the messages, and the characters that `{% generation %}` blocks made."""
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompting, **self._tokens
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ChatTemplateError(
                f"the chat template of {self.name} does not take these messages",
                evidence=f"{type(error).__name__}: {error}\n{json.dumps(messages, ensure_ascii=False)[:160]}",
                fix="leave such records out, or change their roles to what the template knows",
            ) from None
        return self._without_marks(text)

    def _without_marks(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        spans, plain, place = [], "", 0
        while (begin := text.find(BEGIN, place)) >= 0:
            end = text.index(END, begin)
            plain += text[place:begin]
            spans.append((len(plain), len(plain) + end - begin - len(BEGIN)))
            plain += text[begin + len(BEGIN) : end]
            place = end + len(END)
        return plain + text[place:], spans


# Put around what a generation block renders, and taken out again: code points that no text holds.
BEGIN, END = "\U0010fff0\U0010fffe", "\U0010fff1\U0010fffe"


def _compile(source: str, name: str) -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chat templates need jinja2", fix="pip install 'windlass[train]'") from None

    class Generation(Extension):
        """`{% generation %}` … `{% endgeneration %}`: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012  jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            return BEGIN + str(caller()) + END

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = FIXED_DATE.strftime
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise UserError(f"the chat template of {name} is not valid", evidence=str(error)) from None
