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
from windlass.image.build.process import plain, step_of


@cache
def known() -> dict[str, Any]:
    """The data file beside this one."""
    value: dict[str, Any] = yaml.safe_load(resources.files(__package__).joinpath("known.yaml").read_text())
    return value


def obstacle_in(log: str) -> UserError | None:
    """The first obstacle that the log names, looked for from its end."""
    for line in reversed(log.splitlines()[-200:]):
        for obstacle in known()["obstacles"]:
            if re.search(obstacle["pattern"], line, re.IGNORECASE):
                said = {"evidence": line.strip()[:400], "cause": obstacle["cause"], "fix": obstacle["fix"]}
                return UserError(obstacle["what"], **said, exit_code=ExitCode.FAILED)
    return None


def stopped(what: str, log: str, evidence: str) -> UserError:
    """That something did not work, with the obstacle that the log names, if it does."""
    obstacle = obstacle_in(log)
    if obstacle is None:
        return UserError(what, evidence=evidence, exit_code=ExitCode.FAILED)
    said = f"{what}: {obstacle.what}"
    return UserError(said, evidence=evidence, cause=obstacle.cause, fix=obstacle.fix, exit_code=ExitCode.FAILED)


BUILDKIT = re.compile(r"^#\d+ (?:\d+\.\d+ )?")  # `#9 12.34 text`
SUMMARY = re.compile(r"^\d+\.\d+ ")  # `12.34 text`, in BuildKit's summary at the end
FAILED_STEP = (
    re.compile(r"building at STEP \"(.+?)\": "),
    re.compile(r"process \"(?:/bin/(?:ba)?sh -\w+ )?(.+?)\" did not complete successfully"),
    re.compile(r"executor failed running \[(?:/bin/(?:ba)?sh -\w+ )?(.+)\]: "),  # docker before 23
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
class BuildLog:
    text: str

    @cached_property
    def raw(self) -> list[str]:
        return plain(self.text).split("\n")

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Without the prefixes of builders."""
        return tuple(SUMMARY.sub("", BUILDKIT.sub("", line)).rstrip() for line in self.raw)

    @cached_property
    def last_start(self) -> int:
        """The line at which the last step began; the first where no builder says."""
        return max((number for number, line in enumerate(self.raw) if step_of(line)), default=0)

    @cached_property
    def step(self) -> str | None:
        """The instruction that failed, as the builder writes it."""
        for line in reversed(self.lines):
            for pattern in FAILED_STEP:
                if match := pattern.search(line):
                    return match[1].replace('\\"', '"')
        last = step_of(self.raw[self.last_start])
        return last.text if last else None

    @property
    def tail(self) -> tuple[str, ...]:
        """The lines since the last step began."""
        return self.lines[self.last_start :]

    def find(self, pattern: str, *, everywhere: bool = False) -> re.Match[str] | None:
        """The first line of the failing step that a pattern is in: what earlier steps said did not end the build."""
        return next(iter(self.all(pattern, everywhere=everywhere)), None)

    def all(self, pattern: str, *, everywhere: bool = False) -> list[re.Match[str]]:
        lines = self.lines if everywhere else self.tail
        return [match for line in lines if (match := re.search(pattern, line))]


def why_failed(text: str) -> Failure:
    """The best known reason with the lines that show it; always answers."""
    log = BuildLog(text)
    for everywhere in (False, True):
        for id, pattern, sentence in known()["symptoms"]:
            if found := log.find(pattern, everywhere=everywhere):
                lines = _with_surroundings(log.lines if everywhere else log.tail, found.string.strip())
                return Failure(id, filled(sentence, found), tuple(lines))
    said = [line.strip() for line in log.tail if line.strip() and not NOISE.search(line)]
    trouble = [line for line in said if TROUBLE.search(line)]
    lines = list(dict.fromkeys(trouble or said))[-MOST_LINES:]
    return Failure("unknown", "the build failed for a reason that windlass does not know", tuple(lines))


def filled(sentence: str, match: re.Match[str]) -> str:
    """`sentence` with the groups of a match in the place of {1}, {2}."""
    return sentence.format(match[0], *((value or "").strip("'\"") for value in match.groups()))


def _with_surroundings(log: Sequence[str], line: str) -> list[str]:
    """A line with what explains it: pip's list of causes after it, or the lines of trouble around it."""
    lines = [text for text in log if text.strip()]
    place = next(number for number, text in enumerate(lines) if text.strip() == line)
    causes = next((number for number, text in enumerate(lines) if text.startswith("The conflict is caused by")), None)
    if causes is not None:
        end = next((n for n in range(causes + 1, len(lines)) if not lines[n].startswith("    ")), len(lines))
        start = causes - 1 if causes and lines[causes - 1].startswith("ERROR: Cannot install") else causes
        return [text.strip() for text in lines[start:end]][:MOST_LINES]
    window = [text.strip() for text in lines[max(0, place - 6) : place + 4]]
    kept = [text for text in window if text == line or (TROUBLE.search(text) and not NOISE.search(text))]
    return list(dict.fromkeys(kept))[:MOST_LINES]
