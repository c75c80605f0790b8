"""Read the log of a failed build: the step that failed, what it means, and the lines that matter. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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


# What a log says, in the order of how much it explains. `{1}` is the first group of the pattern.
SYMPTOMS: tuple[tuple[str, str, str], ...] = (
    ("no-space", r"No space left on device", "the disk of the builder is full"),
    ("copy-missing", r"copier: stat: \"/?(.+?)\": no such file", "the build copies {1}, which is not in the context"),
    ("copy-missing", r"failed to (?:calculate checksum|compute cache key).*\"/?(.+?)\": not found",
     "the build copies {1}, which is not in the context"),
    ("base-missing", r"reading manifest \S+ in (\S+?): (?:manifest unknown|name unknown)",
     "the registry has no such image of {1}"),
    ("base-missing", r"failed to resolve source metadata for (\S+?): .*not found", "there is no image {1}"),
    ("base-denied", r"(?:pull access denied|unauthorized|authentication required|requested access to the resource is)",
     "the registry does not give the base image without a login"),
    ("base-unreachable", r"pinging container registry (\S+?): .*(?:refused|no such host|timeout|unreachable)",
     "the registry {1} does not answer"),
    ("resolution", r"ResolutionImpossible|your requirements are unsatisfiable|No solution found when resolving",
     "the requirements contradict each other"),
    ("torch-at-build", r"No module named '(torch)'", "a package imports torch while it is built, and there is none"),
    ("build-module", r"ModuleNotFoundError: No module named '([\w.]+)'", "the Python module {1} is missing"),
    ("no-nvcc", r"CUDA_HOME environment variable is not set|nvcc was not found|nvcc: (?:command )?not found",
     "a package is compiled with nvcc, which the base image does not have"),
    ("externally-managed", r"externally-managed-environment", "pip refuses to install into the system's Python"),
    ("python-version", r"requires a different Python: (\S+) not in '(.+?)'", "Python {1} is not in {2}"),
    ("git", r"Cannot find command 'git'", "git is missing"),
    ("header", r"fatal error: (\S+): No such file or directory", "the header {1} is missing"),
    ("compiler", r"command '(\S*(?:gcc|g\+\+|cc|clang)\S*)' failed: No such file|[Cc]ould not find (?:a )?C compiler|"
     r"unable to execute '(\S+)': No such file", "a C compiler is missing"),
    ("rust", r"can't find Rust compiler|Cargo, the Rust package manager, is not", "a Rust compiler is missing"),
    ("cmake", r"CMake must be installed|[Cc]ould not find CMake", "CMake is missing"),
    ("linker", r"ld: cannot find -l(\S+?):?(?:\s|$)", "the library {1} is missing"),
    ("shared-library", r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file", "the shared library {1} is missing"),
    ("program", r"(?:/bin/(?:ba)?sh: (?:\d+: |line \d+: )?|^sh: (?:\d+: )?)([\w.+-]+): (?:command )?not found",
     "the program {1} is missing"),
    ("no-pip", r"No module named pip\b", "pip is missing"),
    ("apt-locate", r"E: Unable to locate package (\S+)", "there is no package {1} in the lists that apt has"),
    ("apt-candidate", r"E: Package '(\S+)' has no installation candidate", "apt cannot install {1}"),
    ("apt-version", r"E: Version '(.+?)' for '(\S+)' was not found", "{2} has no version {1}"),
    ("apt-stale", r"E: Failed to fetch (\S+)\s+404", "apt's lists are older than the archive"),
    ("apt-network", r"(?:Temporary failure resolving|Could not resolve|Could not connect to) '?([\w.:-]+)",
     "apt cannot reach {1}"),
    ("apt-asks", r"Do you want to continue\? \[Y/n\].*Abort|^Abort\.$", "apt asked a question and nobody answered"),
    ("not-root", r"(?:are you root\?|lock-frontend - open \(13: Permission denied\))", "the step needs root"),
    ("pip-network", r"Read timed out|ReadTimeoutError|ConnectTimeoutError|NewConnectionError|Connection reset|"
     r"Connection refused|Temporary failure in name resolution|IncompleteRead|Max retries exceeded",
     "the package index did not answer"),
    ("no-version", r"No matching distribution found for (\S+)", "no version of {1} suits this Python and platform"),
    ("platform", r"[Ee]xec format error|no match for platform in manifest", "the base image is for another machine"),
    ("hash", r"THESE PACKAGES DO NOT MATCH THE HASHES", "a downloaded file is not the one that the hash names"),
    ("torchvision-abi", r"operator torchvision::nms does not exist", "torchvision is made for another torch"),
    ("symbol", r"undefined symbol: (\S+)", "a library was compiled against another version of what it loads"),
    ("certificate", r"CERTIFICATE_VERIFY_FAILED|server certificate verification failed",
     "a certificate cannot be verified: the image has no certificates, or a proxy puts its own in"),
)  # fmt: skip


def why_failed(log: str | BuildLog) -> Failure:
    """The best known reason with the lines that show it; always answers."""
    whole = log if isinstance(log, BuildLog) else BuildLog(log)
    for everywhere in (False, True):
        for id, pattern, sentence in SYMPTOMS:
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
