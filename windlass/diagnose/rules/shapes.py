"""What a rule is: a class of failure, where it is looked for, and the words that tell it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Where = Literal[
    "raised",  # the exception that ended the root rank: its type and message
    "line",  # a line that a dying process or its launcher wrote, from its beginning
    "near",  # a line shortly before a failure that says little itself
    "refusal",  # the answer to a submission, of a controller's attempt to create pods, or a condition of the job
    "pull",  # why an image could not be pulled
    "start",  # an event or waiting reason of a pod whose containers have not started
    "ended",  # how a container or pod was ended from outside
    "node",  # a condition or event of a node of the job, or a line of its kernel log
    "slurm",  # a state and reason of Slurm
]

# How much a statement weighs as the root: what fails by itself goes before what fails because others did.
OWN, SOFT, WEAK, ECHO = 30, 20, 15, 5


@dataclass(frozen=True)
class Rule:
    name: str  # the class
    where: Where
    head: re.Pattern[str] | None  # of the exception's type, the event's or container's reason, Slurm's state
    body: re.Pattern[str] | None  # of the message; searched, so `^` where it must begin so
    confidence: float = 0.9
    strength: int = OWN
    test: Callable[[str], bool] | None = None  # over the message, where words alone do not decide
    frames: re.Pattern[str] | None = None  # of the files and code of an exception's traceback
    of: frozenset[str] = frozenset()  # for `near`: the classes that it makes more precise

    def matches(self, head: str, body: str, frames: str = "") -> bool:
        if self.head is not None and not self.head.fullmatch(head):
            return False
        if self.body is not None and not self.body.search(body):
            return False
        if self.frames is not None and not self.frames.search(frames):
            return False
        return self.test is None or self.test(body)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL) if pattern else None


def raised(
    name: str,
    types: str | None,
    message: str | None = None,
    *,
    confidence: float = 0.9,
    strength: int = OWN,
    test: Callable[[str], bool] | None = None,
    frames: str | None = None,
) -> Rule:
    head = re.compile(types) if types else None
    return Rule(name, "raised", head, _compiled(message), confidence, strength, test, _compiled(frames))


def line(name: str, pattern: str, *, confidence: float = 0.85, strength: int = OWN) -> Rule:
    """`pattern` is matched from the beginning of the line's message: a phrase inside a sentence does not count."""
    return Rule(name, "line", None, _compiled(rf"^(?:{pattern})"), confidence, strength)


def near(name: str, of: str, pattern: str, *, confidence: float = 0.8) -> Rule:
    return Rule(name, "near", None, _compiled(pattern), confidence, of=frozenset(of.split()))


def refusal(name: str, pattern: str, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "refusal", None, _compiled(pattern), confidence)


def pull(name: str, pattern: str | None, *, reasons: str | None = None, confidence: float = 0.9) -> Rule:
    return Rule(name, "pull", _compiled(reasons), _compiled(pattern), confidence)


def start(name: str, reasons: str, pattern: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "start", _compiled(reasons), _compiled(pattern), confidence)


def ended(name: str, reasons: str, pattern: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "ended", _compiled(reasons), _compiled(pattern), confidence)


def node(name: str, pattern: str, *, confidence: float = 0.85) -> Rule:
    return Rule(name, "node", None, _compiled(pattern), confidence)


def slurm(name: str, states: str, reasons: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "slurm", _compiled(states), _compiled(reasons), confidence)
