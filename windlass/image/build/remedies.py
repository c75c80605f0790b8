"""What the log of a failed build proves, and the one change of the Dockerfile that answers it. Pure.

Versions that do not fit are no matter of logs: the resolver finds them before the build. Here is what only a build
shows: a compiler, header, library, program or build module that is missing, apt's own troubles, the network, the disk.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from windlass.image.build.logs import BuildLog, filled, known
from windlass.image.facts.bases import base_of
from windlass.image.read.dockerfile import Dockerfile, Instruction, parse_dockerfile
from windlass.image.read.texts import Fix, insert_after, lines_of, replace_lines

APT = "RUN apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"
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
INSTALL = r"\b(apt(?:-get)?)((?:\s+-\S+)*\s+install)\b"


def propose(dockerfile: str, log: str, tried: Collection[str]) -> Fix | None:
    """The best change that has not been tried; None where nothing is left that the log gives a reason for."""
    return next((proposal for proposal in proposals(dockerfile, log) if proposal.id not in tried), None)


def proposals(dockerfile: str, log: str) -> list[Fix]:
    """Every change that the log gives a reason for, the most specific first."""
    case = _Case(dockerfile, BuildLog(log))
    remedies = (missing_package, missing_module, no_build_isolation, apt, managed_python, not_root, network, disk)
    first: dict[str, Fix] = {}
    for proposal in (proposal for remedy in remedies for proposal in remedy(case)):
        first.setdefault(proposal.id, proposal)
    return list(first.values())


@dataclass(frozen=True)
class _Case:
    text: str
    log: BuildLog

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

    def fix(self, id: str, sentence: str, text: str, found: re.Match[str]) -> Iterator[Fix]:
        if text != self.text:
            yield Fix(id, sentence, (found.string.strip(),), text)

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


def missing_package(case: _Case) -> Iterator[Fix]:
    """A header, library or program that packages of Debian bring."""
    chain = case.dockerfile.chain()
    if chain and "alpine" in (base_of(chain[0].image).tag or ""):
        return
    for pattern, where, sentence in known()["missing"]:
        if found := case.log.find(pattern):
            packages = known()[where].get(found[1]) if where in known() else where
            if packages:
                id = f"apt-add:{packages.replace(' ', '+')}"
                why = f"{filled(sentence, found)}: install {packages}"
                yield from case.fix(id, why, case.before_failure(APT.format(packages)), found)


def missing_module(case: _Case) -> Iterator[Fix]:
    """Without build isolation pip installs none of the modules that a build imports."""
    found = case.log.find(r"ModuleNotFoundError: No module named '([\w]+)")
    module = found[1] if found else ""
    package = known()["modules"].get(module)
    if not found or not package or not case.failed:
        return
    if module == "torch" and "--no-build-isolation" not in case.failed.text:
        return
    text = case.before_failure(f"RUN pip install --no-cache-dir '{package}'")
    yield from case.fix(f"build-needs:{package}", f"the build imports {module}: install it before", text, found)


def no_build_isolation(case: _Case) -> Iterator[Fix]:
    """A package that imports torch while pip builds it where there is none."""
    found = case.log.find(r"No module named 'torch'")
    if found and case.failed and "--no-build-isolation" not in case.failed.text:
        text = case.in_failed(r"(\bpip[\d.]*\s+install)\b", r"\1 --no-build-isolation")
        why = "a package imports torch while it is built: build it beside torch"
        yield from case.fix("no-build-isolation", why, text, found)


def apt(case: _Case) -> Iterator[Fix]:
    """Lists that are missing or old, another name of a package, questions that nobody answers."""
    found = case.log.find(r"E: Unable to locate package (\S+)|E: Package '(\S+)' has no installation candidate|"
                          r"(?:E: )?Failed to fetch \S+\s+404")  # fmt: skip
    if found and case.failed and not re.search(r"\bapt(-get)?\s+(-\S+\s+)*update\b", case.failed.text):
        text = case.in_failed(INSTALL, r"\1 update && \1\2")
        why = "the lists of apt are missing or old: update in the same step"
        yield from case.fix(f"apt-update:{case.failed.first}", why, text, found)
    name = (found[1] or found[2]) if found else None
    if found and name and case.log.find(r"the following packages replace it"):
        for other in case.log.all(r"^\s\s(\S+)$"):
            text = case.in_failed(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", other[1])
            yield from case.fix(f"apt-rename:{name}", f"apt has no {name} any more; install {other[1]}", text, found)
    found = case.log.find(r"Do you want to continue\?|^Abort\.$")
    if found and case.failed and not re.search(r"install\s+(-\S+\s+)*-\w*y", case.failed.text):
        text = case.in_failed(INSTALL, r"\1\2 -y")
        yield from case.fix("apt-yes", "apt asked whether to go on: answer -y", text, found)
    found = case.log.find(r"Please select the geographic area|debconf: unable to initialize frontend: Readline")
    if found and "DEBIAN_FRONTEND" not in case.text:
        text = case.before_failure("ENV DEBIAN_FRONTEND=noninteractive")
        yield from case.fix("noninteractive", "a package asked a question: ask none", text, found)


def managed_python(case: _Case) -> Iterator[Fix]:
    found, start = case.log.find(r"externally-managed-environment"), case.dockerfile.last
    if found and start and "PIP_BREAK_SYSTEM_PACKAGES" not in case.text:
        text = insert_after(case.text, start.start.last, "ENV PIP_BREAK_SYSTEM_PACKAGES=1")
        why = "pip may install into the system's Python of an image"
        yield from case.fix("break-system-packages", why, text, found)


def not_root(case: _Case) -> Iterator[Fix]:
    """An earlier USER took the rights that a step needs."""
    found = case.log.find(
        r"are you root\?|lock-frontend - open \(13: Permission denied\)|\[Errno 13\] Permission denied"
    )
    if not found or not case.failed:
        return
    step = case.failed
    users = [user for user in case.dockerfile.instructions if user.keyword == "USER" and user.stage == step.stage]
    user = next((user.words for user in reversed(users) if user.first < step.first), "root")
    if user not in ("root", "0"):
        new = f"USER root\n{lines_of(case.text, step.first, step.last).rstrip()}\nUSER {user}\n"
        text = replace_lines(case.text, step.first, step.last, new)
        yield from case.fix("user-root", f"the step runs as {user} and needs root", text, found)


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
        yield Fix("retry-network-1", "the network failed: the same build again", (found.string.strip(),), case.text)


def disk(case: _Case) -> Iterator[Fix]:
    """Copies of packages that the image does not need."""
    if found := case.log.find(r"No space left on device|Errno 28"):
        text = re.sub(r"(\bpip[\d.]*\s+install)\b(?!.*--no-cache-dir)", r"\1 --no-cache-dir", case.text)
        yield from case.fix("no-cache", "the disk is full: keep no copies of what pip downloads", text, found)
