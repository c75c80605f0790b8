"""Plans: what a tool that costs or deletes would do, agreed to by its id, done once."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from windlass.agent.calling import call
from windlass.agent.results import Result
from windlass.errors import UserError

SECONDS_VALID = 3600.0

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")


class Proposal(Result, Generic[T]):
    """What would be done. Show it to whoever pays, and call `tool` with `plan_id` if they agree."""

    plan_id: str
    tool: str
    """The tool that takes the id."""
    command: list[str]
    """What it will run."""
    seconds_valid: float
    effect: T
    """What was found out beforehand: costs, what is sent, what is lost."""


@dataclass
class Plan:
    tool: str
    command: list[str]
    contents: str
    """Digest of the files that were read: a plan is for what they said then."""
    files: Sequence[Path]
    made: float
    result: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Plans:
    """The plans of one server. A plan that was carried out gives its result again, and does nothing twice."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}

    def propose(self, tool: str, command: Sequence[object], effect: T, files: Sequence[str] = ()) -> Proposal[T]:
        words = [str(word) for word in command]
        paths = [Path(name) for name in files]
        plan_id = secrets.token_hex(8)
        self.plans[plan_id] = Plan(tool, words, _digest(paths), paths, time.monotonic())
        return Proposal(
            plan_id=plan_id, tool=tool, command=["windlass", *words], seconds_valid=SECONDS_VALID, effect=effect
        )

    def carry_out(self, tool: str, plan_id: str, model: type[R]) -> R:
        """Run the plan's command; `model` is what it prints."""
        plan = self.plans.get(plan_id)
        if plan is None or plan.tool != tool:
            raise UserError(
                f"there is no plan {plan_id!r} for {tool}",
                cause="a plan's id comes from the tool that plans it, in the same session",
                fix=f"plan it again; its answer has the id for {tool}",
                error_code="no-such-plan",
            )
        with plan.lock:
            if plan.result is None:
                _must_be_valid(plan)
                plan.result = call(model, *plan.command)
            result: R = plan.result
            return result


def _must_be_valid(plan: Plan) -> None:
    if time.monotonic() - plan.made > SECONDS_VALID:
        raise UserError("the plan is too old", fix="plan it again", error_code="plan-expired")
    if any(not path.is_file() for path in plan.files) or _digest(plan.files) != plan.contents:
        raise UserError(
            "the plan is for other contents",
            evidence=f"changed since: {', '.join(map(str, plan.files))}",
            fix="plan it again",
            error_code="plan-changed",
        )


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
