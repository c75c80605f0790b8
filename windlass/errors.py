"""What a user can act on, and the exit codes of every command."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of `windlass` and of every rank of the trainer. Documented in docs/exit-codes.md."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    PREEMPTED = 75  # EX_TEMPFAIL: stopped on request with a complete checkpoint; run it again to go on
    RETRY = 75  # of a rank: a peer or a GPU was lost; run it again to go on from the newest checkpoint
    INTERRUPTED = 130


CODES = {ExitCode.BAD_INPUT: "bad-input", ExitCode.PREEMPTED: "preempted", ExitCode.INTERRUPTED: "interrupted"}


class UserError(Exception):
    """Something the user can act on: what happened, the evidence, the cause and the command that fixes it.

    `error_code` is a short word for programs, which may branch on it; the sentences may change. docs/exit-codes.md
    lists the words.
    """

    def __init__(
        self,
        what: str,
        *,
        evidence: str | None = None,
        cause: str | None = None,
        fix: str | None = None,
        exit_code: ExitCode = ExitCode.BAD_INPUT,
        error_code: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.evidence = evidence
        self.cause = cause
        self.fix = fix
        self.exit_code = exit_code
        self.error_code = error_code or self.default_code()

    def default_code(self) -> str:
        return CODES.get(self.exit_code, "failed")

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        for label in ("evidence", "cause", "fix"):
            text = getattr(self, label)
            if text:
                first, *rest = str(text).splitlines() or [""]
                lines.append(f"  {label:<9} {first}")
                lines.extend(f"  {'':<9} {line}" for line in rest)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "error": self.what,
            "code": self.error_code,
            "evidence": self.evidence,
            "cause": self.cause,
            "fix": self.fix,
            "exit_code": int(self.exit_code),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> UserError:
        return cls(
            value["error"],
            evidence=value.get("evidence"),
            cause=value.get("cause"),
            fix=value.get("fix"),
            exit_code=ExitCode(value.get("exit_code", ExitCode.FAILED)),
            error_code=value.get("code"),
        )


class NoAnswerError(UserError):
    """A cluster or scheduler could not be asked, or its answer did not arrive: what it was asked to do may have
    happened or not."""

    def default_code(self) -> str:
        return "no-answer"
