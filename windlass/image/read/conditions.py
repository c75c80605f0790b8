"""Whether a command of a shell runs: if, case, && and ||, as far as the values they compare are known. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Truth = bool | None  # None: not known before the build

OPENING, CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
SEPARATORS = re.compile(r"&&|\|\||;;|\(\)|[;&|()]")
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def both(one: Truth, other: Truth) -> Truth:
    return False if one is False or other is False else None if one is None or other is None else True


def negated(one: Truth) -> Truth:
    return None if one is None else not one


def either(one: Truth, other: Truth) -> Truth:
    return negated(both(negated(one), negated(other)))


@dataclass
class Block:
    """A condition, loop or group that is open."""

    kind: str
    runs: Truth = True  # the branch that is read
    taken: Truth = False  # a branch before it
    condition: bool = False  # its condition is read, not yet what it guards
    value: str = ""  # of a case
    pattern: Truth = False  # of a case: whether one so far fits
    before: Truth = True  # the list that a group stands in
    counts: bool = True  # whether the failure of a group ends the build


@dataclass
class Flow:
    """Where a shell is: its open blocks, and the list of commands joined by && and ||."""

    blocks: list[Block] = field(default_factory=list)
    status: Truth = True  # of the list so far
    result: Truth = True  # of the list before it, which may be a condition
    ended: Truth = False  # by `exit 0`

    def enter(self, words: Sequence[str], before: str, counts: bool, value: Callable[[str], str]) -> list[str]:
        """Take the words of the grammar off a command: if, then, else, case, {."""
        rest = list(words)
        if before not in ("&&", "||", "|"):
            self.result, self.status = self.status, True
        while rest and not self.in_pattern:
            word, top = rest[0], self.blocks[-1] if self.blocks else None
            if word in ("if", "while", "until"):
                self.blocks.append(Block(word, True if word == "if" else None, condition=True))
            elif word == "elif" and top:
                top.taken = either(top.taken, top.runs)
                top.runs, top.condition = negated(top.taken), True
            elif word == "then" and top:
                top.runs, top.condition = both(negated(top.taken), self.result), False
            elif word == "else" and top:
                top.runs = negated(either(top.taken, top.runs))
            elif word == "do" and top:
                top.condition = False
            elif word == "case" and len(rest) > 2:
                self.blocks.append(Block("case", value=value(rest[1]), condition=True))
                return rest[3:]
            elif word == "for":
                self.blocks.append(Block("for"))
                return []
            elif word in (*CLOSING, "}"):
                self.leave()
            elif word == "{":
                self.group("{", before, counts)
            else:
                break
            rest = rest[1:]
        return rest

    def group(self, kind: str, before: str, counts: bool) -> None:
        self.blocks.append(Block(kind, self._reached(before), before=self.status, counts=counts))
        self.status = True

    def leave(self) -> None:
        if self.blocks:
            block = self.blocks.pop()
            self.status = block.before if block.kind in ("{", "(") else True

    @property
    def in_pattern(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].kind == "case" and self.blocks[-1].condition

    def match(self, words: Sequence[str], after: str) -> None:
        """The patterns of a case, up to their bracket."""
        case = self.blocks[-1]
        if words[:1] == ["esac"]:
            self.leave()
            return
        for word in words:
            known = None if "$" in case.value + word else fnmatchcase(case.value, word)
            case.pattern = either(case.pattern, True if word == "*" else known)
        if after == ")":
            case.runs = both(negated(case.taken), case.pattern)
            case.taken, case.pattern, case.condition = either(case.taken, case.pattern), False, False

    def next_pattern(self) -> None:
        if self.blocks and self.blocks[-1].kind == "case":
            self.blocks[-1].condition = True

    def runs(self, words: Sequence[str], before: str, counts: bool, value: Callable[[str], str]) -> Truth:
        """Whether a command runs, and its failure counts; the list goes on with what it returns."""
        reached = self._reached(before)
        condition = any(block.condition for block in self.blocks)
        result = outcome(words, value)
        if result is None and not condition and not _is_test(words):
            result = True  # else the build ends here
        if before == "||":
            self.status = either(self.status, result)
        elif before == "|":
            self.status = result if condition else self.status
        else:
            self.status = both(self.status, result)
        if words[:1] == ["exit"] and words[1:] in ([], ["0"]) and not any(one.kind == "(" for one in self.blocks):
            self.ended = either(self.ended, reached)
        elif not counts or condition or not all(block.counts for block in self.blocks):
            return both(reached, None)
        return reached

    def _reached(self, before: str) -> Truth:
        here: Truth = negated(self.ended)
        for block in self.blocks:
            here = both(here, block.runs)
        if before == "&&":
            return both(here, self.status)
        return both(here, negated(self.status)) if before == "||" else here


def failure_counts(tokens: Sequence[str], at: int) -> bool:
    """Whether no `||` takes the failure of a list, or group, that goes on at a token; `|| exit 1` does not."""
    depth = 0
    for number in range(at, len(tokens)):
        token = tokens[number]
        depth += (token in ("(", "{")) - (token in (")", "}"))
        if depth < 0 or (depth == 0 and token in (";", ";;", "&")):
            return True
        if depth == 0 and token == "||":
            handler = tokens[number + 1 :]
            if handler[:1] in (["{"], ["("]):
                end = next((n for n, word in enumerate(handler) if word in ("}", ")")), len(handler))
                return "exit" in handler[:end] or "false" in handler[:end]
            return handler[:1] in (["exit"], ["false"], ["return"])
    return True


def outcome(words: Sequence[str], value: Callable[[str], str]) -> Truth:
    """What a test returns: `[ "$A" = x ]`, `test -n "$A"`, `[[ $A == x* ]]`, `true`."""
    if words[:1] == ["!"]:
        return negated(outcome(words[1:], value))
    program = value(words[0]) if words else ""
    if program in ("true", ":", "false"):
        return program != "false"
    if program not in ("[", "[[", "test"):
        return None
    given = [value(word) for word in (words[1:-1] if program != "test" else words[1:])]
    if any("$" in word or "\x01" in word or "\x02" in word for word in given):
        return None
    return _compared(given, program == "[[")


def _compared(given: list[str], by_pattern: bool) -> Truth:
    if given[:1] == ["!"]:
        return negated(_compared(given[1:], by_pattern))
    if len(given) == 1:
        return given[0] != ""
    if len(given) == 2 and given[0] in ("-z", "-n"):
        return (given[1] == "") == (given[0] == "-z")
    if len(given) != 3:
        return None
    left, sign, right = given
    if sign in ("=", "==", "!="):
        same = fnmatchcase(left, right) if by_pattern else left == right
        return same == (sign != "!=")
    if sign in NUMBERS and left.isdigit() and right.isdigit():
        return NUMBERS[sign](int(left), int(right))
    return None


def _is_test(words: Sequence[str]) -> bool:
    plain = [word for word in words if word != "!"]
    quiet = plain[:1] == ["grep"] and any(re.fullmatch(r"-\w*q\w*|--quiet", word) for word in plain[1:])
    return plain[:1] in (["["], ["[["], ["test"]) or plain[:2] == ["command", "-v"] or quiet
