"""Changes of a Dockerfile and of requirement files as whole new texts, and how they are shown. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

DOCKERFILE = "Dockerfile"


@dataclass(frozen=True)
class Texts:
    """What an image is made from: the Dockerfile, where there is one, and the requirement files of the context."""

    dockerfile: str | None
    files: Mapping[str, str] = field(default_factory=dict)
    name: str = DOCKERFILE  # what messages call the Dockerfile
    names: frozenset[str] | None = None  # of every file of the context; None: not known
    code: Mapping[str, str] = field(default_factory=dict)  # Python files and configurations: read, and never changed

    def get(self, name: str) -> str:
        if name == self.name and self.dockerfile is not None:
            return self.dockerfile
        return self.files[name]

    def replaced(self, name: str, text: str) -> Texts:
        if name == self.name and self.dockerfile is not None:
            return replace(self, dockerfile=text)
        return replace(self, files={**self.files, name: text})

    def with_dockerfile(self, text: str) -> Texts:
        return replace(self, dockerfile=text)

    def left_out(self, source: str) -> str:
        """The line of .dockerignore that may leave a file out."""
        last = source.rstrip("/").rsplit("/", 1)[-1]
        lines = [line.strip() for line in self.files.get(".dockerignore", "").splitlines()]
        fitting = [line for line in lines if line and fnmatchcase(last, line.rstrip("/").rsplit("/", 1)[-1])]
        return f".dockerignore says {fitting[-1]}" if fitting else ""

    def changed_files(self, before: Texts) -> dict[str, str]:
        return {name: text for name, text in self.files.items() if before.files.get(name) != text}

    def diff(self, before: Texts) -> str:
        """One unified diff from `before` to this."""
        parts = []
        if self.dockerfile != before.dockerfile:
            parts.append(unified(self.name, before.dockerfile or "", self.dockerfile or ""))
        parts += [unified(n, before.files.get(n, ""), t) for n, t in sorted(self.changed_files(before).items())]
        return "".join(parts)


@dataclass(frozen=True)
class Fix:
    """One change: what it does and why, the lines that led to it, and the texts as they are afterwards."""

    id: str
    sentence: str
    evidence: tuple[str, ...]
    dockerfile: str
    files: Mapping[str, str] = field(default_factory=dict)  # only those that change

    def apply(self, texts: Texts) -> Texts:
        dockerfile = self.dockerfile if texts.dockerfile is not None else None
        return replace(texts, dockerfile=dockerfile, files={**texts.files, **self.files})

    def diff(self, dockerfile: str, files: Mapping[str, str]) -> str:
        before = Texts(dockerfile, files)
        return self.apply(before).diff(before)


def unified(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def replace_lines(text: str, first: int, last: int, new: str) -> str:
    """The lines from `first` to `last`, counted from 1, become `new`."""
    lines = text.splitlines(keepends=True)
    ending = "\n" if new and not new.endswith("\n") else ""
    return "".join([*lines[: first - 1], new + ending, *lines[last:]])


def lines_of(text: str, first: int, last: int) -> str:
    return "".join(text.splitlines(keepends=True)[first - 1 : last])


def insert_after(text: str, line: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines and line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    return "".join([*lines[:line], new if new.endswith("\n") else new + "\n", *lines[line:]])


def substitute_within(text: str, first: int, last: int, old: str, new: str) -> str:
    """`old`, as a whole word, becomes `new` in some lines; the same text where it is not there."""
    part = lines_of(text, first, last)
    pattern = rf"(?<![\w.\-=<>!~\[]){re.escape(old)}(?![\w.\-*\[+])"
    changed = re.sub(pattern, lambda _: new, part)
    return replace_lines(text, first, last, changed) if changed != part else text


def remove_word(text: str, first: int, last: int, word: str) -> str:
    """A word of a command goes, with the line that held nothing else."""
    lines = lines_of(text, first, last).splitlines(keepends=True)
    pattern = re.compile(rf"(^|\s)(['\"]?){re.escape(word)}\2(?=\s|$)")
    kept = []
    for line in lines:
        if not pattern.search(line):
            kept.append(line)
            continue
        shorter = pattern.sub(lambda match: match[1], line, count=1)
        shorter = re.sub(r"(?<=\S)[ \t]{2,}", " ", shorter)
        shorter = re.sub(r"[ \t]+$", "", shorter, flags=re.MULTILINE)
        if shorter.strip() not in ("", "\\"):
            kept.append(shorter)
        elif kept and not line.rstrip().endswith("\\"):  # the last line went: the one before it ends the command
            kept[-1] = kept[-1].rstrip().removesuffix("\\").rstrip() + "\n"
    return replace_lines(text, first, last, "".join(kept))
