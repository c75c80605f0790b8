"""Ask a real resolver which packages some requirements become, for a Python and a platform that are not this one's.

uv where it is there, else pip. Nothing is installed and nothing is built; only metadata is read. uv is exact; pip
judges what a package requires of Python, and markers, by the Python that it runs in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from windlass.errors import UserError

# Debian 13 has 2.41; uv knows tags up to 2.40.
GLIBC_OF = {"debian11": "2.31", "ubuntu22.04": "2.35", "debian12": "2.36", "ubuntu24.04": "2.39", "debian13": "2.40"}
LEGACY = ("manylinux2014", "manylinux2010", "manylinux1")
UNREACHABLE = re.compile(
    r"(?i)failed to fetch|could not connect|error sending request|dns error|name or service not known|read timed out|"
    r"connection refused|temporary failure in name resolution|no route to host|network is unreachable|"
    r"operation timed out|newconnectionerror|max retries exceeded"
)
ONLY_SOURCE = re.compile(
    r"(?i)no usable wheels|building source distributions is disabled|building .* is disabled|no wheels"
)
SECONDS = 300


@dataclass(frozen=True)
class Question:
    """What is asked of a resolver."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    python: str = "3.12"
    platform: str = "linux/amd64"
    glibc: str = "2.35"  # of the base image: a wheel for a newer one does not load
    index: str | None = None  # None: the machine's own
    extra_indexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The packages with their versions; or the resolver's own words why there are none."""

    packages: Mapping[str, str]
    trouble: str | None = None
    checked: bool = True  # False: it could not be found out, an index was out of reach say
    resolver: str = ""
    left_out: tuple[str, ...] = ()  # packages that are there as source alone, whose needs nobody knows before a build


def resolve(question: Question, *, program: str | None = None) -> Answer:
    """Resolve with uv or pip, `program` naming one of them."""
    left_out: list[str] = []
    while question.requirements:
        answer = _once(question, program)
        name = _only_source(answer.trouble or "")
        rest = tuple(one for one in question.requirements if _name(one) != name)
        if answer.checked or name is None or rest == question.requirements:
            return replace(answer, left_out=tuple(left_out))
        left_out.append(name)
        question = replace(question, requirements=rest)
    return Answer({}, left_out=tuple(left_out))


def _once(question: Question, program: str | None) -> Answer:
    uv = _uv()
    if program == "pip" or (program is None and uv is None):
        return _by_pip(question)
    if uv is None:
        raise UserError("uv is not there", fix="pip install 'windlass[image]'")
    return _by_uv(question, uv)


def _only_source(text: str) -> str | None:
    found = re.search(r"([A-Za-z0-9][\w.-]*?)(?:==\S+)? (?:has|have) no usable wheels", text)
    return canonicalize_name(found[1]) if found else None


def _name(requirement: str) -> str:
    return canonicalize_name(re.split(r"[\s\[=<>!~;@]", requirement, maxsplit=1)[0])


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


def _by_uv(question: Question, uv: str) -> Answer:
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[question.platform]
    with tempfile.TemporaryDirectory() as folder:
        wanted, held = _files(Path(folder), question)
        command = [
            uv,
            "pip",
            "compile",
            str(wanted),
            "--constraint",
            str(held),
            "--no-header",
            "--no-annotate",
            "--no-build",
        ]
        command += [
            "--python-version",
            question.python,
            "--python-platform",
            f"{machine}-manylinux_{question.glibc.replace('.', '_')}",
        ]
        command += ["--color", "never", "--no-progress", "--no-config", "--no-python-downloads"]
        command += ["--python", sys.executable]  # else uv looks through every Python of the machine
        if question.index:
            command += ["--default-index", question.index]
        for one in question.extra_indexes:
            command += ["--index", one]
        if question.extra_indexes:
            command += ["--index-strategy", "unsafe-best-match"]  # as pip does
        done = _run(command)
    if done.returncode == 0:
        found = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)==(\S+)", done.stdout)
        return Answer({canonicalize_name(name): version for name, version in found}, resolver="uv")
    return _trouble(done.stderr, "uv")


def _by_pip(question: Question) -> Answer:
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[question.platform]
    with tempfile.TemporaryDirectory() as folder:
        wanted, held = _files(Path(folder), question)
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-color"]
        command += ["--disable-pip-version-check", "--report", str(report), "--target", str(Path(folder) / "target")]
        command += ["--only-binary=:all:", "--python-version", question.python, "-r", str(wanted), "-c", str(held)]
        newest = int(question.glibc.split(".")[1])
        for tag in (
            *(f"manylinux_2_{one}_{machine}" for one in range(newest, 4, -1)),
            *(f"{one}_{machine}" for one in LEGACY),
        ):
            command += ["--platform", tag]
        if question.index:
            command += ["--index-url", question.index]
        for one in question.extra_indexes:
            command += ["--extra-index-url", one]
        done = _run(command)
        if done.returncode == 0:
            installs = json.loads(report.read_text())["install"]
            found = [(one["metadata"]["name"], one["metadata"]["version"]) for one in installs]
            return Answer({canonicalize_name(name): version for name, version in found}, resolver="pip")
    return _trouble(done.stdout + done.stderr, "pip")  # pip lists the causes on its stdout


def _trouble(text: str, resolver: str) -> Answer:
    unknown = bool(UNREACHABLE.search(text)) or bool(ONLY_SOURCE.search(text))
    told = "\n".join(line for line in text.splitlines() if not line.startswith("warning:"))
    return Answer({}, trouble=told.strip(), checked=not unknown, resolver=resolver)


def _files(folder: Path, question: Question) -> tuple[Path, Path]:
    wanted, held = folder / "requirements.in", folder / "constraints.txt"
    wanted.write_text("".join(f"{one}\n" for one in question.requirements), encoding="utf-8")
    held.write_text("".join(f"{one}\n" for one in question.constraints), encoding="utf-8")
    return wanted, held


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment(os.environ)
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"read timed out: no answer in {SECONDS} s")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a resolver: what is set for pip holds for uv."""
    own = {"UV_HTTP_RETRIES": "1", **given}
    for pip, uv in (
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ):
        if given.get(pip) and not given.get(uv):
            own[uv] = given[pip]
    return own
