"""Records that are examples rather than texts: chats and instructions, checked where they are read.

Where a text field's name goes, such a source carries a selector: `@chat:messages` or `@instruction:prompt:completion`.
The text of a record is then the JSON of its example, which windlass.data.tokenizers.chat turns into tokens.
"""

from __future__ import annotations

import json
from typing import Any

from windlass.errors import UserError
from windlass.spec.data import DataSection

MARK = "@"
ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT: {"conversations": [{"from": "human", "value": "…"}, …]}
SHAREGPT_FIELD = "conversations"
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


ALPACA_PROMPT, ALPACA_INPUT = "instruction", "input"


class BadRecordError(UserError):
    """One record that cannot be read; data.bad_records=skip leaves it out."""

    def __init__(self, what: str, *, fix: str | None = None, **more: Any) -> None:
        skip = (
            "data.bad_records=skip, or windlass data tokenize … --bad-records skip    leaves them out and counts them"
        )
        super().__init__(what, fix=f"{fix}\n{skip}" if fix else skip, **more)


def require_unicode(text: str, where: str) -> str:
    """Half of a surrogate pair can be written in JSON, and is no character that a tokenizer could read."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        escaped_byte = 0xDC80 <= code <= 0xDCFF  # how `surrogateescape` writes a byte that is no UTF-8
        raise BadRecordError(
            f"{where} is not UTF-8 text" if escaped_byte else f"{where} holds half a character, U+{code:04X}",
            evidence=f"after {text[max(0, error.start - 40) : error.start]!r}",
            cause=None if escaped_byte else "a text was cut inside a surrogate pair before it was written",
            fix="iconv -f cp1252 -t utf-8 OLD > NEW" if escaped_byte else None,
        ) from None
    return text


def selector(data: DataSection) -> str:
    """What to take from every record of a run's data."""
    match data.format:
        case "chat":
            return f"{MARK}chat:{data.messages_field}"
        case "instruction":
            return f"{MARK}instruction:{data.prompt_field}:{data.completion_field}"
        case "preference":
            return f"{MARK}preference:{data.prompt_field}:{data.chosen_field}:{data.rejected_field}"
        case _:
            return data.text_field


def is_selector(field: str) -> bool:
    return field.startswith((f"{MARK}chat:", f"{MARK}instruction:", f"{MARK}preference:"))


BESIDE = {"chat": (SHAREGPT_FIELD, "system", "tools"), "instruction": (ALPACA_INPUT,), "preference": ("tools",)}


def columns(field: str) -> list[str]:
    """The columns that a selector looks at, of those that a table has."""
    kind, *names = field.removeprefix(MARK).split(":")
    return list(dict.fromkeys([*names, *BESIDE[kind]]))


def example_text(record: Any, field: str, where: str) -> str:
    """The example of a record as JSON; a UserError that names the place where the record is none."""
    kind, *names = field.removeprefix(MARK).split(":")
    if not isinstance(record, dict):
        raise BadRecordError(f"{where} is {type(record).__name__}, not a JSON object with the field {names[0]!r}")
    if kind == "preference":
        return require_unicode(json.dumps(preference(record, names, where), ensure_ascii=False), where)
    if kind == "chat" and names[0] not in record and SHAREGPT_FIELD in record:
        names = [SHAREGPT_FIELD]
    for name in names:
        if name not in record:
            part = "messages" if kind == "chat" else "prompt" if name == names[0] else "completion"
            raise missing_field(record, name, where, kind, part)
    if kind == "chat":
        messages = with_roles(without_nulls(parsed(record[names[0]])), record)
        example: dict[str, Any] = {"messages": check_messages(messages, where)}
        if record.get("tools"):
            example["tools"] = without_nulls(parsed(record["tools"]))
    else:
        require_no_input(record, names, where)
        example = {"prompt": record[names[0]], "completion": record[names[1]]}
        for part, value in example.items():
            if not isinstance(value, str):
                raise BadRecordError(f"{where}: the {part} is {type(value).__name__}, not a text")
        if not example["completion"].strip():
            raise empty_completion(where)
    return require_unicode(json.dumps(example, ensure_ascii=False), where)


def preference(record: dict[str, Any], names: list[str], where: str) -> dict[str, Any]:
    """The two examples of a preference, each as a chat or an instruction of its own."""
    prompt, *answers = (without_nulls(parsed_messages(record.get(name))) for name in names)
    pair: dict[str, Any] = {}
    for part, name, answer in zip(("chosen", "rejected"), names[1:], answers, strict=True):
        if answer is None:
            raise missing_field(record, name, where, "preference", part)
        if isinstance(answer, str):
            if not isinstance(prompt, str):
                raise BadRecordError(f"{where}: the {part} answer is a text, and the prompt {names[0]!r} is none")
            if not answer.strip():
                raise empty_completion(f"{where}: {name}")
            pair[part] = {"prompt": prompt, "completion": answer}
            continue
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        messages = check_messages([*before, *answer] if isinstance(answer, list) else answer, f"{where}: {name}")
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise BadRecordError(f"{where}: {name} does not end with an answer of the assistant to something")
        pair[part] = {"messages": messages}
    if record.get("tools"):
        pair["tools"] = without_nulls(parsed(record["tools"]))
    return pair


def missing_field(record: dict[str, Any], name: str, where: str, kind: str, part: str) -> BadRecordError:
    return BadRecordError(
        f"{where} has no field {name!r}",
        evidence=f"fields there: {', '.join(map(str, record)) or 'none'}",
        cause=f"data.format is {kind}",
        fix=f"data.{part}_field=…",
    )


def parsed_messages(value: Any) -> Any:
    """Messages may be given as a text of JSON; any other text is a text."""
    return parsed(value) if isinstance(value, str) and value.lstrip().startswith("[{") else value


def require_no_input(record: dict[str, Any], names: list[str], where: str) -> None:
    """Alpaca's prompts are in two fields, `instruction` and `input`; half of one is no prompt."""
    value = record.get(ALPACA_INPUT)
    if names[0] != ALPACA_PROMPT or ALPACA_INPUT in names or not isinstance(value, str) or not value.strip():
        return
    raise UserError(
        f"{where} has an input beside its instruction, which would be left out of the prompt",
        evidence=f"{ALPACA_INPUT}: {value[:80]}",
        cause=f"data.prompt_field is {ALPACA_PROMPT}, and a prompt is one field",
        fix=f'jq -c \'.prompt = ([.instruction, .input] | map(select(. != "")) | join("\\n\\n"))\' OLD > NEW    '
        f"and data.prompt_field=prompt data.completion_field={names[1]}",
    )


def parsed(value: Any) -> Any:
    """Tables without nested columns, CSV above all, hold messages and tools as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def with_roles(messages: Any, record: dict[str, Any]) -> Any:
    """ShareGPT's messages as everybody else's; others as they are."""
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "from" in message and "role" not in message for message in messages
    ):
        return messages
    converted = [
        {"role": SHAREGPT_ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}
        | ({"weight": message["weight"]} if "weight" in message else {})
        for message in messages
    ]
    system = record.get("system")
    return [{"role": "system", "content": system}, *converted] if isinstance(system, str) and system else converted


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(f"{where}: a chat is a list of messages, not {str(messages)[:60]!r}")
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or "role" not in message:
            raise BadRecordError(
                f"{place} has no role", evidence=str(message)[:80], fix='{"role": "user", "content": "…"}'
            )
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise BadRecordError(
                f"{place} has the role {role!r}", evidence=f"roles: {', '.join(ROLES)}", cause=str(message)[:80]
            )
        if content is None and message.get("tool_calls") is None:
            raise BadRecordError(f"{place} has no content", evidence=str(message)[:80])
        if content is not None and not isinstance(content, str | list):
            raise BadRecordError(f"{place} has a content that is no text", evidence=str(message)[:80])
        if role == "assistant" and not message.get("tool_calls") and is_empty(content):
            raise empty_completion(place)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecordError(
            f"{where} has no message of the assistant",
            cause="only the assistant's messages are trained on",
            fix="leave such records out",
        )
    return messages


def is_empty(content: Any) -> bool:
    """Whether a message says nothing; its content is a text or a list of parts."""
    parts = content if isinstance(content, list) else [content]
    return not any(str((part.get("text", part) if isinstance(part, dict) else part) or "").strip() for part in parts)


def empty_completion(where: str) -> UserError:
    return BadRecordError(f"{where} is empty: there is nothing to train on", fix="leave such records out")


def without_nulls(value: Any) -> Any:
    """Tables fill the fields that a record lacks with nulls; a template must not see them."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
