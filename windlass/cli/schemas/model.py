"""What every printed object shares, and the error that any command may print."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


State = Literal["waiting", "running", "finished", "failed", "preempted", "stopped", "unknown"]


class Printed(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


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
