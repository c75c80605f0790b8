"""Reading values that may be anything: missing, cut off, of a wrong type, huge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

MOST_OBJECTS = 20_000
MOST_TEXT = 20_000  # characters of one message


def clean(text: str) -> str:
    """Text without half surrogates and NULs, which can neither be printed nor encoded."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")


def moment(value: Any) -> float | None:
    """Seconds since 1970 of a time as the API, a log or a record writes it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 < value < 1e11 else None
    if not isinstance(value, str):
        return None
    match = re.match(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?", value)
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        when = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in (None, 'Z') else zone}")
    except ValueError:
        return None
    return when.astimezone(UTC).timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> Sequence[Any]:
    return value[:MOST_OBJECTS] if isinstance(value, list | tuple) else []


def text(value: Any) -> str:
    if isinstance(value, str):
        return clean(value[:MOST_TEXT])
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else ""


def number(value: Any) -> int | None:
    if isinstance(value, Mapping):  # Slurm: {"set": true, "infinite": false, "number": 1}
        return number(value.get("number")) if value.get("set", True) else None
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value.strip()):
        return int(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else None


def at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = mapping(value).get(key)
    return value


def objects(value: Any) -> list[Mapping[str, Any]]:
    """A list of objects, a List object of the API, or one object."""
    if isinstance(value, Mapping):
        inner = value.get("items")
        value = inner if isinstance(inner, list) else [value] if value else []
    return [item for item in items(value) if isinstance(item, Mapping)]
