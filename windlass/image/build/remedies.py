"""What the log of a failed build proves, and the one change of the Dockerfile that answers it. Pure.

Versions that do not fit are no matter of logs: the resolver finds them before the build. Here is what only a build
shows: a compiler, header, library, program or build module that is missing, apt's own troubles, the network, the disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from windlass.image.build.logs import BuildLog, Found, known
from windlass.image.facts.bases import base_of
from windlass.image.read.dockerfile import Dockerfile, Instruction, parse_dockerfile
from windlass.image.read.texts import Fix, Texts, fix_from, insert_after, lines_of, replace_lines

APT = "RUN apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"
GCC = ("gcc", "libc6-dev")
PIP_NETWORK = (
    r"Read timed out|ReadTimeoutError|ConnectTimeoutError|NewConnectionError|Connection reset|Connection refused|"
    r"Temporary failure in name resolution|IncompleteRead|Max retries exceeded|Connection broken"
)
APT_NETWORK = (
    r"Temporary failure resolving|Could not resolve|Could not connect to|Connection timed out|Connection failed"
)
OTHER_NETWORK = (
    r"TLS handshake timeout|i/o timeout|unexpected EOF|toomanyrequests|early EOF|RPC failed|connect: connection refused"
)
APT_CALL = r"(\bapt(?:-get)?)(?=\s+(?:-\S+\s+)*(?:update|install)\b)"
INSTALL = re.compile(r"\b(apt(?:-get)?)((?:\s+-\S+)*\s+install)\b")


def propose(dockerfile: str, files: Mapping[str, str], log: str, tried: Collection[str]) -> Fix | None:
    """The best change that has not been tried; None where nothing is left that the log gives a reason for."""
    return next((proposal for proposal in proposals(dockerfile, files, log) if proposal.id not in tried), None)


def proposals(dockerfile: str, files: Mapping[str, str], log: str) -> Iterator[Fix]:
    """Every change that the log gives a reason for, the most specific first."""
    case = _Case(Texts(dockerfile, dict(files)), BuildLog(log))
    seen: set[str] = set()
    for remedy in (missing_file, missing_program, missing_module, no_build_isolation, apt, managed_python, not_root,
                   network, disk):  # fmt: skip
        for one in remedy(case):
            if one.id not in seen:
                seen.add(one.id)
                yield one


@dataclass(frozen=True)
class _Case:
    texts: Texts
    log: BuildLog

    @property
    def text(self) -> str:
        return self.texts.dockerfile or ""

    @cached_property
    def dockerfile(self) -> Dockerfile:
        return parse_dockerfile(self.text)

    @cached_property
    def failed(self) -> Instruction | None:
        """The instruction that the log says failed; the only RUN where there is one."""
        runs = [instruction for instruction in self.dockerfile.instructions if instruction.keyword == "RUN"]
        step = " ".join((self.log.step or "").split()).removeprefix("RUN ")
        for run in reversed(runs):
            if step and (run.words == step or (len(step) > 30 and run.words.startswith(step.rstrip(".")[:60]))):
                return run
        return runs[0] if len(runs) == 1 else None

    def fix(self, id: str, sentence: str, text: str, found: Found) -> Iterator[Fix]:
        made = fix_from(self.texts, self.texts.with_dockerfile(text), id, sentence, (found.line,))
        if made:
            yield made

    def before_failure(self, line: str) -> str:
        """The Dockerfile with an instruction more before the one that failed, else after the last FROM."""
        if self.failed:
            return insert_after(self.text, self.failed.first - 1, line)
        start = self.dockerfile.last
        return insert_after(self.text, start.start.last if start else 0, line)

    def in_failed(self, pattern: str, new: str) -> str:
        """The Dockerfile with a part of the failed instruction written anew."""
        if not self.failed:
            return self.text
        part = lines_of(self.text, self.failed.first, self.failed.last)
        return replace_lines(self.text, self.failed.first, self.failed.last, re.sub(pattern, new, part))

    def apt_add(self, packages: Collection[str], why: str, found: Found) -> Iterator[Fix]:
        chain = self.dockerfile.chain()
        if chain and "alpine" in (base_of(chain[0].image).tag or ""):
            return
        names = " ".join(packages)
        id = f"apt-add:{'+'.join(packages)}"
        yield from self.fix(id, f"{why}: install {names}", self.before_failure(APT.format(names)), found)


def missing_file(case: _Case) -> Iterator[Fix]:
    """A header or a library."""
    for pattern, table, kind in (
        (r"fatal error: (\S+): No such file or directory", known()["headers"], "the header"),
        (r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file", known()["libraries"], "the library"),
        (r"ld: cannot find -l([\w+]+)", known()["linked"], "the library"),
    ):
        found = case.log.find(pattern)
        if found and found.match[1] in table:
            yield from case.apt_add([table[found.match[1]]], f"{kind} {found.match[1]} is missing", found)


def missing_program(case: _Case) -> Iterator[Fix]:
    for pattern in (
        r"Cannot find command '(git)'",
        r"(?:^|[/ ])(?:ba|da)?sh: (?:\d+: |line \d+: )?(?:[\w/]+/)?([\w.+-]+): (?:command )?not found",
        r"Error: (pg_config) executable not found",
        r"command '(?:\S*/)?(\S*?)' failed: No such file",
        r"unable to execute '(\S+?)': No such file",
    ):
        found = case.log.find(pattern)
        if found and found.match[1] in known()["programs"]:
            yield from case.apt_add(known()["programs"][found.match[1]], f"{found.match[1]} is missing", found)
    for pattern, packages, why in (
        (r"[Cc]ould not find (?:a )?C compiler|No CMAKE_C_COMPILER", GCC, "a C compiler is missing"),
        (r"No CMAKE_CXX_COMPILER", ("g++",), "a C++ compiler is missing"),
        (r"can't find Rust compiler|Cargo, the Rust package manager, is not", ("rustc", "cargo"), "Rust is missing"),
        (r"CMake must be installed|[Cc]ould not find CMake", known()["programs"]["cmake"], "CMake is missing"),
        (r"No module named pip\b", ("python3-pip",), "pip is missing"),
        (
            r"certificate verification failed|unable to get local issuer",
            ("ca-certificates",),
            "certificates are missing",
        ),
    ):
        if found := case.log.find(pattern):
            yield from case.apt_add(packages, why, found)


def missing_module(case: _Case) -> Iterator[Fix]:
    """Without build isolation pip installs none of the modules that a build imports."""
    found = case.log.find(r"ModuleNotFoundError: No module named '([\w]+)")
    isolated = case.failed is None or "--no-build-isolation" not in case.failed.text
    if (
        not found
        or found.match[1] not in known()["modules"]
        or not case.failed
        or (found.match[1] == "torch" and isolated)
    ):
        return
    package = known()["modules"][found.match[1]]
    text = case.before_failure(f"RUN pip install --no-cache-dir '{package}'")
    yield from case.fix(f"build-needs:{package}", f"the build imports {found.match[1]}: install it before", text, found)


def no_build_isolation(case: _Case) -> Iterator[Fix]:
    """A package that imports torch while pip builds it where there is none."""
    found = case.log.find(r"No module named 'torch'")
    if found and case.failed and "--no-build-isolation" not in case.failed.text:
        text = case.in_failed(r"(\bpip[\d.]*\s+install)\b", r"\1 --no-build-isolation")
        yield from case.fix(
            "no-build-isolation", "a package imports torch while it is built: build it beside torch", text, found
        )


def apt(case: _Case) -> Iterator[Fix]:
    """Lists that are missing or old, another name of a package, questions that nobody answers."""
    found = case.log.find(r"E: Unable to locate package (\S+)|E: Package '(\S+)' has no installation candidate|"
                          r"(?:E: )?Failed to fetch \S+\s+404")  # fmt: skip
    if found and case.failed and not re.search(r"\bapt(-get)?\s+(-\S+\s+)*update\b", case.failed.text):
        text = case.in_failed(INSTALL.pattern, r"\1 update && \1\2")
        yield from case.fix(
            f"apt-update:{case.failed.first}",
            "the lists of apt are missing or old: update in the same step",
            text,
            found,
        )
    name = (found.match[1] or found.match[2]) if found else None
    if found and name and case.log.find(r"the following packages replace it"):
        for other in case.log.all(r"^\s\s(\S+)$"):
            text = case.in_failed(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", other.match[1])
            yield from case.fix(
                f"apt-rename:{name}", f"apt has no {name} any more; install {other.match[1]}", text, found
            )
    found = case.log.find(r"Do you want to continue\?|^Abort\.$")
    if found and case.failed and not re.search(r"install\s+(-\S+\s+)*-\w*y", case.failed.text):
        text = case.in_failed(INSTALL.pattern, r"\1\2 -y")
        yield from case.fix("apt-yes", "apt asked whether to go on: answer -y", text, found)
    found = case.log.find(r"Please select the geographic area|debconf: unable to initialize frontend: Readline")
    if found and "DEBIAN_FRONTEND" not in case.text:
        text = case.before_failure("ENV DEBIAN_FRONTEND=noninteractive")
        yield from case.fix("noninteractive", "a package asked a question: ask none", text, found)


def managed_python(case: _Case) -> Iterator[Fix]:
    found, start = case.log.find(r"externally-managed-environment"), case.dockerfile.last
    if found and start and "PIP_BREAK_SYSTEM_PACKAGES" not in case.text:
        text = insert_after(case.text, start.start.last, "ENV PIP_BREAK_SYSTEM_PACKAGES=1")
        yield from case.fix(
            "break-system-packages", "pip may install into the system's Python of an image", text, found
        )


def not_root(case: _Case) -> Iterator[Fix]:
    """An earlier USER took the rights that a step needs."""
    found = case.log.find(
        r"are you root\?|lock-frontend - open \(13: Permission denied\)|\[Errno 13\] Permission denied"
    )
    if not found or not case.failed:
        return
    users = [
        instruction
        for instruction in case.dockerfile.instructions
        if instruction.keyword == "USER" and instruction.stage == case.failed.stage
    ]
    before = [user for user in users if user.first < case.failed.first]
    if before and before[-1].words not in ("root", "0"):
        lines = lines_of(case.text, case.failed.first, case.failed.last).rstrip()
        new = f"USER root\n{lines}\nUSER {before[-1].words}\n"
        text = replace_lines(case.text, case.failed.first, case.failed.last, new)
        yield from case.fix("user-root", f"the step runs as {before[-1].words} and needs root", text, found)


def network(case: _Case) -> Iterator[Fix]:
    """Downloads that break: more patience, then once the same again."""
    for pattern, old, new, id in (
        (PIP_NETWORK, r"(\bpip[\d.]*\s+install)\b(?! --retries)", r"\1 --retries 10 --timeout 120", "pip-retries"),
        (APT_NETWORK, APT_CALL, r"\1 -o Acquire::Retries=5", "apt-retries"),
        (r"curl: \((?:6|7|18|28|35|52|56)\)", r"(?<![\w/-])curl(?=\s+[-'\"h])(?! --retry)",
         "curl --retry 5 --retry-connrefused", "curl-retries"),
    ):  # fmt: skip
        if found := case.log.find(pattern):
            yield from case.fix(id, "a server did not answer: try longer", case.in_failed(old, new), found)
    if found := case.log.find(rf"{PIP_NETWORK}|{APT_NETWORK}|{OTHER_NETWORK}"):
        yield Fix("retry-network-1", "the network failed: the same build again", (found.line,), case.text)


def disk(case: _Case) -> Iterator[Fix]:
    """Copies of packages that the image does not need."""
    found = case.log.find(r"No space left on device|Errno 28")
    if found:
        text = re.sub(r"(\bpip[\d.]*\s+install)\b(?!.*--no-cache-dir)", r"\1 --no-cache-dir", case.text)
        yield from case.fix("no-cache", "the disk is full: keep no copies of what pip downloads", text, found)
