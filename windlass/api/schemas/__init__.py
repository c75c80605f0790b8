"""What every command prints with `--json`. The schemas of docs/output.schema.json are made from these models.

Tests validate whatever a command prints against its model, so a key that is added to a command is added here. Keys may
be added at any time. A key that goes, another type, or a new word in a list of words raises SCHEMA_VERSION.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1

State = Literal["waiting", "running", "finished", "failed", "preempted", "stopped", "unknown"]


class Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def printed(value: Any) -> Any:
    """A model as its command prints it: keys that may be left out are, where nothing set them."""
    if isinstance(value, Printed):
        fields = type(value).model_fields.items()
        named = {name: field.alias or name for name, field in fields if name in value.model_fields_set}
        return {key: printed(getattr(value, name)) for name, key in named.items()}
    if isinstance(value, BaseModel):  # the run file: every key of it
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: printed(inner) for key, inner in value.items()}
    return [printed(inner) for inner in value] if isinstance(value, list | tuple) else value


class Error(Printed):
    """Why a command failed."""

    error: str
    """What happened."""
    code: str
    """A word that programs may branch on (exit-codes.md lists them)."""
    evidence: str | None
    cause: str | None
    fix: str | None
    """The command or the change that mends it."""
    exit_code: int
    """See exit-codes.md."""
