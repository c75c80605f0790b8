"""What the shell lines of a RUN install: pip, apt, conda and a few tools. Pure; nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from windlass.image.parsing import Instruction

PIP = re.compile(r"(?:.*/)?pip(?:3(?:\.\d+)?)?$")
PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?$")
SKIPPED = ("sudo", "exec", "env", "time", "then", "do", "else", "nice")

# Options of `pip install` that take a value of their own.
# fmt: off
WITH_VALUE = frozenset((
    "-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "-f", "--find-links",
    "-t", "--target", "--platform", "--python-version", "--implementation", "--abi", "--root", "--prefix", "--src",
    "--upgrade-strategy", "-C", "--config-settings", "--global-option", "--no-binary", "--only-binary",
    "--progress-bar", "--report", "--group", "--cache-dir", "--trusted-host", "--cert", "--retries", "--timeout",
    "--proxy", "--exists-action", "--log", "--python", "--root-user-action", "--torch-backend", "--index",
    "--default-index", "--index-strategy", "-p", "-e", "--editable", "--build-constraint", "-b",
))
# fmt: on


@dataclass(frozen=True)
class PipInstall:
    """One `pip install` or `uv pip install`."""

    requirements: tuple[str, ...]
    files: tuple[str, ...]  # -r
    constraints: tuple[str, ...]  # -c
    options: dict[str, tuple[str, ...]]
    command: str  # as written, without continuations
    by_uv: bool
    instruction: Instruction

    def has(self, *names: str) -> bool:
        return any(name in self.options for name in names)

    def values(self, *names: str) -> tuple[str, ...]:
        return tuple(value for name in names for value in self.options.get(name, ()))

    @property
    def index(self) -> str | None:
        found = self.values("-i", "--index-url", "--default-index")
        return found[-1] if found else None

    @property
    def indexes(self) -> tuple[str, ...]:
        extra = self.values("--extra-index-url", "--index", "-f", "--find-links")
        return tuple(one for one in (self.index, *extra) if one)


@dataclass(frozen=True)
class AptInstall:
    packages: tuple[str, ...]
    options: tuple[str, ...]
    command: str
    instruction: Instruction


def shell_text(instruction: Instruction) -> str:
    """What a RUN gives to the shell; the list form is put back together."""
    text = instruction.text.strip()
    if text.startswith("["):
        try:
            words = json.loads(text.replace("\n", " "))
        except ValueError:
            return text
        if len(words) > 2 and words[1] in ("-c", "-lc", "-ec", "-exc"):
            return str(words[2])
        return shlex.join(words)
    if instruction.heredocs and re.match(r"<<", text):
        return "\n".join(instruction.heredocs)
    return text.replace("\n", " ") + ("\n" + "\n".join(instruction.heredocs) if instruction.heredocs else "")


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of shell text as words; quotes are honoured, what cannot be split is passed over."""
    for line in re.sub(r"\\\n", " ", text).split("\n"):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            words = list(lexer)
        except ValueError:
            continue
        current: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(";&|()") and word:
                while current and (current[0] in SKIPPED or re.fullmatch(r"\w+=.*", current[0], re.DOTALL)):
                    current = current[1:]
                if current:
                    yield current
                current = []
            else:
                current.append(word)


def pip_installs(instruction: Instruction, text: str | None = None) -> Iterator[PipInstall]:
    for words in commands(shell_text(instruction) if text is None else text):
        arguments = _pip_arguments(words)
        if arguments is not None:
            yield _pip_install(arguments[1], words, arguments[0], instruction)


def _pip_arguments(words: list[str]) -> tuple[bool, list[str]] | None:
    """Whether uv does it, and what follows `install`."""
    by_uv = words[0].rsplit("/", 1)[-1] == "uv"
    rest = words[1:]
    if by_uv:
        if not rest or rest[0] != "pip":
            return None
        rest = rest[1:]
    elif PYTHON.match(words[0]):
        if rest[:2] != ["-m", "pip"]:
            return None
        rest = rest[2:]
    elif not PIP.match(words[0]):
        return None
    while rest and rest[0].startswith("-"):  # options before the verb
        rest = rest[2:] if rest[0] in WITH_VALUE and len(rest) > 1 else rest[1:]
    if not rest or rest[0] not in ("install", "wheel"):
        return None
    return by_uv, rest[1:]


def _pip_install(arguments: list[str], words: list[str], by_uv: bool, instruction: Instruction) -> PipInstall:
    requirements: list[str] = []
    options: dict[str, list[str]] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            options.setdefault(name, []).append(value)
        elif word in WITH_VALUE and position < len(arguments):
            options.setdefault(word, []).append(arguments[position])
            position += 1
        elif re.match(r"-[rcife].", word) and not word.startswith("--"):
            options.setdefault(word[:2], []).append(word[2:])
        elif word.startswith("-") and word != "-":
            options.setdefault(word, [])
        elif re.match(r"\d*[<>]", word):  # a redirection
            position += 1 if re.fullmatch(r"\d*>{1,2}|<", word) else 0
        else:
            requirements.append(word)
    plain = {name: tuple(values) for name, values in options.items()}
    return PipInstall(
        requirements=tuple(requirements),
        files=(*plain.get("-r", ()), *plain.get("--requirement", ())),
        constraints=(*plain.get("-c", ()), *plain.get("--constraint", ())),
        options=plain,
        command=" ".join(words),
        by_uv=by_uv,
        instruction=instruction,
    )


def apt_installs(instruction: Instruction, text: str | None = None) -> Iterator[AptInstall]:
    for words in commands(shell_text(instruction) if text is None else text):
        if words[0].rsplit("/", 1)[-1] in ("apt-get", "apt", "aptitude") and "install" in words:
            before, after = words[1 : words.index("install")], words[words.index("install") + 1 :]
            options: list[str] = []
            packages: list[str] = []
            rest = iter([*before, *after])
            for word in rest:
                if word in ("-o", "-t", "--option", "--target-release"):
                    options += [word, next(rest, "")]
                elif word.startswith("-"):
                    options.append(word)
                else:
                    packages.append(word)
            yield AptInstall(tuple(packages), tuple(options), " ".join(words), instruction)
