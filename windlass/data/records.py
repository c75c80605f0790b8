"""Records that are examples rather than texts: chats and instructions, checked where they are read.

Where a text field's name goes, such a source carries a selector: `@chat:messages` or `@instruction:prompt:completion`.
The text of a record is then the JSON of its example, which windlass.data.chat turns into tokens.
"""

from __future__ import annotations

import json
from typing import Any

from windlass.errors import UserError
from windlass.spec.data import DataSection

MARK = "@"
ROLES = ("system", "developer", "user", "assistant", "tool")


def selector(data: DataSection) -> str:
    """What to take from every record of a run's data."""
    match data.format:
        case "chat":
            return f"{MARK}chat:{data.messages_field}"
        case "instruction":
            return f"{MARK}instruction:{data.prompt_field}:{data.completion_field}"
        case _:
            return data.text_field


def is_selector(field: str) -> bool:
    return field.startswith((f"{MARK}chat:", f"{MARK}instruction:"))


def columns(field: str, there: list[str]) -> list[str]:
    """The columns of a table that a selector looks at."""
    kind, *names = field.removeprefix(MARK).split(":")
    return [*names, *(["tools"] if kind == "chat" and "tools" in there else [])]


def example_text(record: Any, field: str, where: str) -> str:
    """The example of a record as JSON; a UserError that names the place where the record is none."""
    kind, *names = field.removeprefix(MARK).split(":")
    if not isinstance(record, dict):
        raise UserError(f"{where} is {type(record).__name__}, not a JSON object with the field {names[0]!r}")
    for name in names:
        if name not in record:
            raise UserError(
                f"{where} has no field {name!r}",
                evidence=f"fields there: {', '.join(map(str, record)) or 'none'}",
                cause=f"data.format is {kind}",
                fix=f"data.{'messages' if kind == 'chat' else 'prompt' if name == names[0] else 'completion'}_field=…",
            )
    if kind == "chat":
        example: dict[str, Any] = {"messages": check_messages(without_nulls(record[names[0]]), where)}
        if record.get("tools"):
            example["tools"] = without_nulls(record["tools"])
    else:
        example = {"prompt": record[names[0]], "completion": record[names[1]]}
        for part, value in example.items():
            if not isinstance(value, str):
                raise UserError(f"{where}: the {part} is {type(value).__name__}, not a text")
        if not example["completion"].strip():
            raise empty_completion(where)
    return json.dumps(example, ensure_ascii=False)


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: a chat is a list of messages, not {str(messages)[:60]!r}")
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or "role" not in message:
            raise UserError(f"{place} has no role", evidence=str(message)[:80], fix='{"role": "user", "content": "…"}')
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise UserError(
                f"{place} has the role {role!r}", evidence=f"roles: {', '.join(ROLES)}", cause=str(message)[:80]
            )
        if content is None and message.get("tool_calls") is None:
            raise UserError(f"{place} has no content", evidence=str(message)[:80])
        if content is not None and not isinstance(content, str | list):
            raise UserError(f"{place} has a content that is no text", evidence=str(message)[:80])
        if role == "assistant" and not message.get("tool_calls") and not str(content or "").strip():
            raise empty_completion(place)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"{where} has no message of the assistant",
            cause="only the assistant's messages are trained on",
            fix="leave such records out",
        )
    return messages


def empty_completion(where: str) -> UserError:
    return UserError(f"{where} is empty: there is nothing to train on", fix="leave such records out")


def without_nulls(value: Any) -> Any:
    """Tables fill the fields that a record lacks with nulls; a template must not see them."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value
