"""What a rule is: a class of failure, where it is looked for, and the words that tell it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Where = Literal[
    "raised",  # the exception that ended a rank: its type and message
    "line",  # a line that a dying process or its launcher wrote, from its beginning
    "near",  # a line shortly before a failure that says little itself
    "refusal",  # the answer to a submission, of a controller's attempt to create pods, or a condition of the job
    "pull",  # why an image could not be pulled
    "start",  # an event or waiting reason of a pod whose containers have not started
    "ended",  # how a container or pod was ended from outside
    "node",  # a condition or event of a node of the job, or a line of its kernel log
    "slurm",  # a state and reason of Slurm
]


@dataclass(frozen=True)
class Rule:
    name: str  # the class
    where: Where
    head: re.Pattern[str] | None  # the exception's type, the event's or container's reason, Slurm's state: all of it
    body: re.Pattern[str] | None  # the message: any part of it, so `^` where it must begin so
    confidence: float = 0.9
    test: Callable[[str], bool] | None = None  # over the message, where words alone do not decide
    frames: re.Pattern[str] | None = None  # the files and code of an exception's traceback
    of: frozenset[str] = frozenset()  # for `near`: the classes that it makes more precise

    def matches(self, head: str, body: str, frames: str = "") -> bool:
        if self.head is not None and not (self.head.fullmatch(head) or self.head.fullmatch(head.rpartition(".")[2])):
            return False
        if self.body is not None and not self.body.search(body):
            return False
        if self.frames is not None and not self.frames.search(frames):
            return False
        return self.test is None or self.test(body)


def words(pattern: str | None, *, at_begin: bool = False, flags: int = re.IGNORECASE) -> re.Pattern[str] | None:
    """A pattern; each of its lines holds alternatives."""
    if pattern is None:
        return None
    lines = "|".join(line.strip() if "\n" in pattern else line for line in pattern.splitlines() if line.strip())
    return re.compile(rf"^(?:{lines})" if at_begin else lines, flags | re.DOTALL)


def raised(
    name: str,
    types: str | None,
    message: str | None = None,
    *,
    confidence: float = 0.9,
    test: Callable[[str], bool] | None = None,
    frames: str | None = None,
) -> Rule:
    """`types` is matched with the whole name of the exception's type, or its last part."""
    return Rule(name, "raised", words(types, flags=0), words(message), confidence, test, words(frames))


def line(name: str, pattern: str, *, confidence: float = 0.85) -> Rule:
    """`pattern` is matched from the beginning of the line's message: a phrase inside a sentence does not count."""
    return Rule(name, "line", None, words(pattern, at_begin=True), confidence)


def by_launcher(signal: str, name: str) -> str:
    """For `line`: how torchrun, accelerate, DeepSpeed, Open MPI and MPICH report a rank that a signal ended."""
    return rf"""
        .{{0,200}}failed \(exitcode: -{signal}\)|.{{0,1000}}died with <Signals\.{name}\b
        \[launch\.py:\d+:\w+\] .{{0,1000}}exits with return code = -{signal}$
        (?:\w+ noticed that process .{{0,300}}exited on )?signal {signal} \(
        YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .{{0,60}}\(signal {signal}\)|= +KILLED BY SIGNAL: {signal} """


def near(name: str, of: str, pattern: str) -> Rule:
    return Rule(name, "near", None, words(pattern), 0.8, of=frozenset(of.split()))


def refusal(name: str, pattern: str, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "refusal", None, words(pattern), confidence)


def pull(name: str, pattern: str | None, *, reasons: str | None = None, confidence: float = 0.9) -> Rule:
    return Rule(name, "pull", words(reasons), words(pattern), confidence)


def start(name: str, reasons: str | None, pattern: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "start", words(reasons), words(pattern), confidence)


def ended(name: str, reasons: str | None, pattern: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "ended", words(reasons), words(pattern), confidence)


def node(name: str, pattern: str) -> Rule:
    return Rule(name, "node", None, words(pattern), 0.85)


def slurm(name: str, states: str, reasons: str | None = None, *, confidence: float = 0.9) -> Rule:
    return Rule(name, "slurm", words(rf"(?:{states}).*"), words(reasons), confidence)
