"""Read a Dockerfile into instructions and stages, with the lines each came from. Pure.

Continued lines, comments between them, heredocs, parser directives, ARG and ENV values are understood; what a RUN does
is read by `shell`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

VARIABLE = re.compile(
    r"(?P<escaped>\\\$)|\$(?:\{(?P<braced>\w+)(?:(?P<kind>:[-+]|##?|%%?|//?)(?P<word>[^}]*))?\}|(?P<plain>\w+))"
)
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
FLAG = re.compile(r"--([\w-]+)(?:=(\S+))?\s+")
PREDEFINED = {
    "TARGETPLATFORM": "linux/amd64",
    "TARGETARCH": "amd64",
    "TARGETOS": "linux",
    "BUILDPLATFORM": "linux/amd64",
}


@dataclass(frozen=True)
class Heredoc:
    text: str
    first: int  # its first line in the file
    ends: bool = True


@dataclass(frozen=True)
class Instruction:
    """One instruction. Lines count from 1 and include the last."""

    keyword: str
    text: str  # arguments with continuations joined by newlines and comments dropped, flags removed
    flags: Mapping[str, str]
    first: int
    last: int
    heredocs: tuple[Heredoc, ...] = ()
    stage: int = -1  # -1: before the first FROM
    lines: tuple[int, ...] = ()  # the line of the file that each line of `text` came from

    @property
    def words(self) -> str:
        """The arguments on one line."""
        return " ".join(self.text.split())


@dataclass(frozen=True)
class Stage:
    """FROM and what follows it."""

    number: int
    name: str | None
    image: str  # with ARG values put in
    parent: int | None  # the stage that it builds on; None: an image
    platform: str | None
    start: Instruction
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Dockerfile:
    text: str
    instructions: tuple[Instruction, ...]
    stages: tuple[Stage, ...] = field(default=())

    @property
    def last(self) -> Stage | None:
        return self.stages[-1] if self.stages else None

    def stage(self, name: str | None) -> Stage | None:
        """A stage by name or number; the last without one."""
        if name is None:
            return self.last
        return next((stage for stage in reversed(self.stages) if name.lower() in (stage.name, str(stage.number))), None)

    def chain(self, target: str | None = None) -> tuple[Stage, ...]:
        """The stages whose layers an image has, first to last."""
        found: list[Stage] = []
        stage = self.stage(target)
        while stage is not None:
            found.append(stage)
            stage = self.stages[stage.parent] if stage.parent is not None else None
        return tuple(reversed(found))


def parse_dockerfile(text: str, arguments: Mapping[str, str] | None = None) -> Dockerfile:
    """`arguments`: values of --build-arg, which go before those that the file gives."""
    instructions = tuple(_instructions(text))
    stages: list[Stage] = []
    globals_: dict[str, str] = dict(PREDEFINED)
    numbered: list[Instruction] = []
    for instruction in instructions:
        if instruction.keyword == "FROM":
            stages.append(_stage(instruction, len(stages), stages, globals_))
        elif instruction.keyword == "ARG" and not stages:
            globals_.update(assignments(instruction.text, globals_) | dict(arguments or {}))
        numbered.append(Instruction(**{**vars(instruction), "stage": len(stages) - 1}))
    whole = [
        Stage(**{**vars(stage), "instructions": tuple(one for one in numbered if one.stage == stage.number)})
        for stage in stages
    ]
    return Dockerfile(text, tuple(numbered), tuple(whole))


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Put values into $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word}; what is not known stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["braced"] or match["plain"]
        known = values.get(name)
        if match["kind"] == ":-":
            return known or substitute(match["word"], values)
        if match["kind"] == ":+":
            return substitute(match["word"], values) if known else ""
        if known is not None and match["kind"]:
            return _trimmed(known, match["kind"], match["word"])
        return match[0] if known is None else known

    return VARIABLE.sub(value, text)


def _trimmed(value: str, kind: str, word: str) -> str:
    """${NAME%.*}, ${NAME#v}, ${NAME//./}: a value less its end, its beginning, or with a part replaced."""
    if kind[0] == "/":
        old, _, new = word.partition("/")
        return value.replace(old, new, -1 if kind == "//" else 1)
    cuts = range(len(value) + 1)
    if kind[0] == "%":
        fitting = [value[:cut] for cut in cuts if fnmatchcase(value[cut:], word)]
    else:
        fitting = [value[cut:] for cut in cuts if fnmatchcase(value[:cut], word)]
    return (min if len(kind) == 2 else max)(fitting, key=len, default=value)


def _stage(one: Instruction, number: int, earlier: list[Stage], values: Mapping[str, str]) -> Stage:
    words = one.words.split()
    image = substitute(words[0], values) if words else ""
    name = words[2].lower() if len(words) > 2 and words[1].upper() == "AS" else None
    parent = next((s.number for s in reversed(earlier) if s.name == image.lower()), None)
    platform = one.flags.get("platform")
    return Stage(number, name, image, parent, substitute(platform, values) if platform else None, one, ())


def assignments(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """`A=1 B="x y"` and the old form `A one two`."""
    flat = " ".join(text.split())
    first = flat.split(" ", 1)[0]
    if "=" not in first:
        name, _, rest = flat.partition(" ")
        return {name: substitute(rest, values)} if rest and "=" not in rest.split(" ", 1)[0] else {}
    found: dict[str, str] = {}
    for match in re.finditer(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|(?:\\.|\S)*)", flat):
        value = match[2]
        if value[:1] in "\"'" and len(value) > 1:
            value = value[1:-1]
        found[match[1]] = substitute(value, {**values, **found})
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = text.removeprefix("\ufeff").splitlines()  # docker passes over a byte order mark
    escape = "\\"
    for line in lines:
        directive = re.fullmatch(r"#\s*(\w+)\s*=\s*(\S+)\s*", line)
        if not directive:
            break
        if directive[1].lower() == "escape":
            escape = directive[2]
    number = 0
    while number < len(lines):
        if not lines[number].strip() or lines[number].lstrip().startswith("#"):
            number += 1
            continue
        first = number
        parts: list[str] = []
        sources: list[int] = []
        while number < len(lines):
            line = lines[number]
            if parts and (not line.strip() or line.lstrip().startswith("#")):  # dropped between continued lines
                number += 1
                continue
            continued = line.rstrip().endswith(escape)
            parts.append(line.rstrip()[: -len(escape)] if continued else line)
            number += 1
            sources.append(number)
            if not continued:
                break
        joined = "\n".join(parts)
        keyword, _, rest = joined.lstrip().partition(" ")
        if "\n" in keyword:
            keyword, _, tail = keyword.partition("\n")
            rest = f"{tail} {rest}"
        heredocs: list[Heredoc] = []
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            for begins in HEREDOC.finditer(joined):
                word, body, start = begins[2], [], number + 1
                while number < len(lines) and lines[number].strip() != word:
                    body.append(lines[number])
                    number += 1
                opens = joined[: begins.start()]
                is_word = bool(re.search(r"\s\d*$", opens)) and not (opens.count('"') % 2 or opens.count("'") % 2)
                heredocs.append(Heredoc("\n".join(body), start, number < len(lines) or not is_word))
                number += 1
        flags: dict[str, str] = {}
        rest = rest.lstrip()
        while found := FLAG.match(rest + " "):
            flags[found[1]] = f"{flags.get(found[1], '')} {found[2] or ''}".strip()
            rest = rest[found.end() :].lstrip()
        told = tuple(sources[len(sources) - rest.count("\n") - 1 :])
        yield Instruction(keyword.upper(), rest, flags, first + 1, min(number, len(lines)), tuple(heredocs), -1, told)
