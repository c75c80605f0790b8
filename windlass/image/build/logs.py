"""Read the log of a failed build: the step, what it means, the lines that matter, and what stands in the way. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

import yaml

from windlass.errors import ExitCode, UserError


@cache
def known() -> dict[str, Any]:
    """The data file beside this one."""
    value: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("known.yaml").read_text())
    return value


def obstacle_in(log: str) -> UserError | None:
    """The first obstacle that the log names, looked for from its end."""
    lines = log.splitlines()
    for line in reversed(lines[-200:]):
        for obstacle in known()["obstacles"]:
            if re.search(obstacle["pattern"], line, re.IGNORECASE):
                said = {"evidence": line.strip()[:400], "cause": obstacle["cause"], "fix": obstacle["fix"]}
                return UserError(obstacle["what"], **said, exit_code=ExitCode.FAILED)
    return None


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
BUILDKIT = re.compile(r"^#\d+ (?:\d+\.\d+ )?")  # `#9 12.34 text`
SUMMARY = re.compile(r"^\d+\.\d+ ")  # `12.34 text`, in BuildKit's summary at the end
STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP \d+(?:/\d+)?: (.*)|^\[(?:[\w.-]+ )?\s*\d+/\d+\] (\w.*)")
FAILED_STEP = (
    re.compile(r"building at STEP \"(.+?)\": "),
    re.compile(r"process \"(?:/bin/(?:ba)?sh -\w+ )?(.+?)\" did not complete successfully"),
    re.compile(r"The command '(?:/bin/(?:ba)?sh -\w+ )?(.+?)' returned a non-zero code"),
)
TROUBLE = re.compile(
    r"(?i)\b(error|fatal|failed|cannot|could not|unable to|not found|no such|denied|conflict|exception)\b|^\s*E: |^[×╰]"
)
NOISE = re.compile(
    r"(?i)^\s*(note: This (error|is an issue)|hint: See above|WARNING: Running pip as|\[notice\]|See above for output|"
    r"subprocess exited with status|exit status \d+$|.*FutureWarning)"
)
MOST_LINES = 12


@dataclass(frozen=True)
class Failure:
    """Why a build failed: a known cause or `unknown`, and the lines that say so."""

    id: str
    sentence: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    match: re.Match[str]
    line: str


@dataclass(frozen=True)
class BuildLog:
    text: str

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Without colours, carriage returns and the prefixes of builders."""
        plain = ANSI.sub("", self.text).replace("\r\n", "\n")
        whole = [line.rsplit("\r", 1)[-1] for line in plain.split("\n")]
        return tuple(SUMMARY.sub("", BUILDKIT.sub("", line)).rstrip() for line in whole)

    @cached_property
    def step(self) -> str | None:
        """The instruction that failed, as the builder writes it."""
        for line in reversed(self.lines):
            for pattern in FAILED_STEP:
                if found := pattern.search(line):
                    return found[1].replace('\\"', '"')
        steps = [found[1] or found[2] for line in self.lines if (found := STEP.match(line))]
        return steps[-1] if steps else None

    @cached_property
    def tail(self) -> tuple[str, ...]:
        """The lines since the last step began; all of them where no builder says."""
        starts = [number for number, line in enumerate(self.lines) if STEP.match(line)]
        return self.lines[starts[-1] :] if starts else self.lines

    def find(self, pattern: str, *, everywhere: bool = False) -> Found | None:
        """The first line of the failing step that a pattern is in: what earlier steps said did not end the build."""
        found = self.all(pattern, everywhere=everywhere)
        return found[0] if found else None

    def all(self, pattern: str, *, everywhere: bool = False) -> list[Found]:
        compiled = re.compile(pattern)
        lines = self.lines if everywhere else self.tail
        return [Found(match, line.strip()) for line in lines if (match := compiled.search(line))]


def why_failed(log: str | BuildLog) -> Failure:
    """The best known reason with the lines that show it; always answers."""
    whole = log if isinstance(log, BuildLog) else BuildLog(log)
    for everywhere in (False, True):
        for id, pattern, sentence in known()["symptoms"]:
            if found := whole.find(pattern, everywhere=everywhere):
                lines = tuple(_with_surroundings(whole.lines if everywhere else whole.tail, found.line))
                return Failure(id, _filled(sentence, found.match), lines)
    return Failure("unknown", "the build failed for a reason that windlass does not know", tuple(_lines(whole)))


def _filled(sentence: str, match: re.Match[str]) -> str:
    for number, value in enumerate(match.groups(), start=1):
        sentence = sentence.replace(f"{{{number}}}", (value or "").strip("'\""))
    return sentence


def lines_that_matter(log: str, limit: int = MOST_LINES) -> list[str]:
    """What to show of a log: the failing step and the lines that speak of trouble, else its end."""
    whole = BuildLog(log)
    shown = why_failed(whole).lines
    step = [f"STEP {whole.step}"] if whole.step and not any(whole.step in line for line in shown) else []
    return [*step, *shown][:limit]


def _with_surroundings(log: Sequence[str], line: str) -> list[str]:
    """A line with what explains it: pip's list of causes after it, or the lines of trouble around it."""
    lines = [one for one in log if one.strip()]
    place = next(number for number, one in enumerate(lines) if one.strip() == line)
    causes = next((number for number, one in enumerate(lines) if one.startswith("The conflict is caused by")), None)
    if causes is not None:
        end = next((n for n in range(causes + 1, len(lines)) if not lines[n].startswith("    ")), len(lines))
        start = causes - 1 if causes and lines[causes - 1].startswith("ERROR: Cannot install") else causes
        return [one.strip() for one in lines[start:end]][:MOST_LINES]
    window = lines[max(0, place - 6) : place + 4]
    kept = [one.strip() for one in window if one.strip() == line or (TROUBLE.search(one) and not NOISE.search(one))]
    return list(dict.fromkeys(kept))[:MOST_LINES]


def _lines(log: BuildLog) -> list[str]:
    lines = [line.strip() for line in log.tail if line.strip() and not NOISE.search(line)]
    trouble = [line for line in lines if TROUBLE.search(line)]
    return list(dict.fromkeys(trouble or lines))[-MOST_LINES:]
