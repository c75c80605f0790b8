"""What the commands of pip, uv, conda and apt ask for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from windlass.image.read.requirements import Place
from windlass.image.read.shell import Command, Word

PIP = re.compile(r"pip(3(\.\d+)?)?$")
PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
CONDA = ("conda", "mamba", "micromamba")

# Options of `pip install` and `uv pip install` that take a value of their own.
# fmt: off
WITH_VALUE = frozenset((
    "-r", "--requirement", "--requirements", "-c", "--constraint", "--constraints", "-i", "--index-url",
    "--extra-index-url", "-f", "--find-links", "-t", "--target", "--platform", "--python-version", "--implementation",
    "--abi", "--root", "--prefix", "--src", "--upgrade-strategy", "-C", "--config-settings", "--global-option",
    "--no-binary", "--only-binary", "--progress-bar", "--report", "--group", "--cache-dir", "--trusted-host", "--cert",
    "--retries", "--timeout", "--default-timeout", "--proxy", "--exists-action", "--log", "--python",
    "--root-user-action", "--torch-backend", "--index", "--default-index", "--index-strategy", "-p", "-e", "--editable",
    "--build-constraint", "-b", "--extra", "--only-group", "--no-group", "--override", "--overrides", "--link-mode",
    "--resolution", "--prerelease", "--package", "--no-install-package", "--keyring-provider", "--build-option",
    "-P", "--upgrade-package", "--install-option", "--exclude-newer", "--project", "--directory", "-n", "--name",
    "-w", "--wheel-dir", "--channel", "--file",
    "--no-build-isolation-package", "--extras", "--only", "--with", "--without",
))
# fmt: on
SHORT = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-i": "--index-url",
    "-f": "--find-links",
    "-e": "--editable",
    "-t": "--target",
    "-U": "--upgrade",
    "-p": "--python",
    "-n": "--name",
    "-P": "--upgrade-package",
    "--requirements": "--requirement",
    "--constraints": "--constraint",
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Words and options of a command; options by their long names, with every value that was given."""

    words: tuple[Word, ...]
    options: Mapping[str, tuple[Word, ...]] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        return any(name in self.options for name in names)

    def values(self, *names: str) -> tuple[Word, ...]:
        return tuple(value for name in names for value in self.options.get(name, ()))


@dataclass(frozen=True)
class PipInstall:
    """`pip install`, `uv pip install`, `uv sync` and `uv add`."""

    command: Command
    arguments: Arguments
    verb: str  # install, wheel, sync, add
    by_uv: bool

    @property
    def interpreter(self) -> str:
        """The pip or Python that was named: `python3.11`, `/opt/venv/bin/pip`."""
        given = self.arguments.values("--python")
        return str(given[-1]) if given else "" if self.by_uv else str(self.command.words[0])

    @property
    def place(self) -> Place:
        return self.command.place


def pip_install(command: Command) -> PipInstall | None:
    words = command.words
    if command.program == "uv":
        rest = _after_options(words[1:])
        if rest[:1] in (["sync"], ["add"]):
            return PipInstall(command, _arguments(rest[1:]), str(rest[0]), True)
        verb = _after_options(rest[1:]) if rest[:1] == ["pip"] else []
        if verb[:1] in (["install"], ["sync"]):
            return PipInstall(command, _arguments(verb[1:]), "install", True)
        return None
    rest = list(words[1:])
    if PYTHON.match(command.program) and "-m" in words[:4]:
        rest = rest[rest.index(Word("-m")) + 1 :]
        if rest[:1] == ["uv"]:
            return pip_install(replace(command, words=tuple(rest)))
        if rest[:1] != ["pip"]:
            return None
        rest = rest[1:]
    elif not PIP.match(command.program):
        return None
    rest = _after_options(rest)
    return (
        PipInstall(command, _arguments(rest[1:]), str(rest[0]), False) if rest[:1] in (["install"], ["wheel"]) else None
    )


def pip_uninstall(command: Command) -> tuple[str, ...]:
    """The packages that are taken out."""
    words = [str(word) for word in command.words]
    if not (PIP.match(command.program) or "pip" in words[:4]) or "uninstall" not in words:
        return ()
    return tuple(word for word in words[words.index("uninstall") + 1 :] if not word.startswith("-"))


def apt_packages(command: Command) -> tuple[Word, ...] | None:
    if command.program not in ("apt-get", "apt", "aptitude") or "install" not in command.words:
        return None
    at = list(command.words).index(Word("install"))
    rest, packages = list(command.words[at + 1 :]), []
    while rest:
        word = rest.pop(0)
        if word in ("-o", "-t", "--option", "--target-release"):
            rest = rest[1:]
        elif not word.startswith("-"):
            packages.append(word)
    return tuple(packages)


@dataclass(frozen=True)
class CondaInstall:
    """`conda install`, `create`, `env create` and `env update`."""

    arguments: Arguments
    environment: str | None
    files: tuple[Word, ...]


def conda_install(command: Command) -> CondaInstall | None:
    words = list(command.words[1:])
    if command.program not in CONDA:
        return None
    while words and words[0] in ("env", "-y", "-q", "--yes"):
        words = words[1:]
    if words[:1] not in (["install"], ["create"], ["update"]):
        return None
    arguments = _arguments(
        [w for w in words[1:] if w not in ("-y", "-q")],
        short={"-n": "--name", "-c": "--channel", "-f": "--file", "-p": "--prefix"},
    )
    name = next(iter(arguments.values("--name", "--prefix")), None)
    return CondaInstall(arguments, str(name) if name else None, arguments.values("--file"))


def _after_options(words: Sequence[Word]) -> list[Word]:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] in WITH_VALUE and len(rest) > 1 else rest[1:]
    return rest


def _arguments(words: Sequence[Word], short: Mapping[str, str] = SHORT) -> Arguments:
    plain: list[Word] = []
    options: dict[str, list[Word]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            options.setdefault(short.get(name, name), []).append(Word(value).at(word.line))
        elif (word in WITH_VALUE or word in short) and word != "-U" and rest:
            options.setdefault(short.get(word, word), []).append(rest.pop(0))
        elif re.match(r"-[rcife][^-]", word):
            options.setdefault(short.get(word[:2], word[:2]), []).append(Word(word[2:].lstrip("=")).at(word.line))
        elif re.fullmatch(r"\d*[<>]+.*", word):  # a redirection
            if re.fullmatch(r"\d*[<>]+", word) and rest:
                rest.pop(0)
        elif word.startswith("-") and word != "-":
            options.setdefault(short.get(word, word), [])
        else:
            plain.append(word)
    return Arguments(tuple(plain), {name: tuple(values) for name, values in options.items()})
