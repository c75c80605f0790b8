"""What plain commands make of known values: `echo $CUDA_VERSION | cut -d. -f1,2 | tr -d .`. Pure; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from windlass.image.read.dockerfile import substitute

SINGLE = re.compile(r"('[^']*')")
SED = re.compile(r"\s*s(?P<mark>[/|#,:@])(?P<old>.*?)(?<!\\)(?P=mark)(?P<new>.*?)(?<!\\)(?P=mark)(?P<flags>g?)\s*")
AWK = re.compile(r"(?:BEGIN *)?\{ *printf? *(?P<what>.*?);? *\}")


def output_of(text: str, known: Mapping[str, str]) -> str | None:
    """The output of a pipeline; None where it takes more than a pure function of known values."""
    filled = "".join(part if part[:1] == "'" else substitute(part, known) for part in SINGLE.split(text))
    lexer = shlex.shlex(filled, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        return None
    steps: list[list[str]] = [[]]
    for token in tokens:
        if token == "|":
            steps.append([])
        else:
            steps[-1].append(token)
    value: str | None = None
    for words in steps:
        if words[-2:-1] == ["<<<"] and value is None:
            value, words = words[-1], words[:-2]
        if not words or any(set(word) <= set("|;&<>") for word in words if word):
            return None
        program, arguments = words[0], words[1:]
        if program in ("echo", "printf") and value is None:
            value = _printed(program, arguments)
        elif program in FILTERS and value is not None:
            value = FILTERS[program](arguments, value)
        else:
            return None
        if value is None:
            return None
    return None if value is None or "$" in value else value.rstrip("\n")


def _printed(program: str, arguments: list[str]) -> str | None:
    if program == "echo":
        while arguments and re.fullmatch(r"-[neE]+", arguments[0]):
            arguments = arguments[1:]
        return " ".join(arguments)
    form, *values = arguments or [""]
    form = form.removesuffix("\\n")
    if form.count("%s") != len(values) or "%" in form.replace("%s", "") or "\\" in form:
        return None
    return form.replace("%s", "{}").format(*values)


def _cut(arguments: list[str], value: str) -> str | None:
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        option = re.fullmatch(r"-([dfc])(.*)|--(delimiter|fields|characters)=(.*)", word)
        if not option:
            return None
        given = option[2] if option[1] else option[4]
        options[(option[1] or option[3])[0]] = given or (rest.pop(0) if rest else "")
    wanted, mark = options.get("f") or options.get("c", ""), options.get("d", "\t")
    if not re.fullmatch(r"[\d,-]+", wanted) or ("f" in options and len(mark) != 1):
        return None
    parts = value.split(mark) if "f" in options else list(value)
    if "f" in options and len(parts) == 1:
        return value  # a line without the mark is printed whole
    numbers: set[int] = set()
    for part in wanted.split(","):
        first, dash, last = part.partition("-")
        numbers |= set(range(int(first or 1), int(last or (len(parts) if dash else first)) + 1))
    kept = [one for number, one in enumerate(parts, start=1) if number in numbers]
    return mark.join(kept) if "f" in options else "".join(kept)


def _tr(arguments: list[str], value: str) -> str | None:
    plain = [word for word in arguments if not word.startswith("-")]
    sets = {"[:upper:]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "[:lower:]": "abcdefghijklmnopqrstuvwxyz",
            "A-Z": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "a-z": "abcdefghijklmnopqrstuvwxyz", "\\n": "\n"}  # fmt: skip
    letters = [sets.get(word, word) for word in plain]
    if any(re.search(r"[\[\\]|\w-\w", word) for word in letters):
        return None
    if "-d" in arguments and len(letters) == 1:
        return value.translate({ord(letter): None for letter in letters[0]})
    if len(letters) == 2 and len(arguments) == 2 and letters[1]:
        return value.translate(str.maketrans(letters[0], letters[1].ljust(len(letters[0]), letters[1][-1])))
    return None


def _sed(arguments: list[str], value: str) -> str | None:
    extended = bool({"-E", "-r"} & set(arguments))
    scripts = [word for word in arguments if word not in ("-E", "-r", "-e")]
    for script in (part for word in scripts for part in re.split(r";(?=\s*s)", word)):
        found = SED.fullmatch(script)
        if not found:
            return None
        old = found["old"].replace(f"\\{found['mark']}", found["mark"])
        if not extended:  # of basic expressions the plain signs are letters, and the escaped ones are signs
            old = re.sub(r"\\?[(){}+?|]", lambda sign: sign[0][1:] if sign[0][0] == "\\" else f"\\{sign[0]}", old)
        new = re.sub(r"\\(\d)", r"\\g<\1>", found["new"]).replace("&", r"\g<0>")
        try:
            value = re.sub(old, new, value, count=0 if found["flags"] else 1)
        except (re.error, IndexError):
            return None
    return value


def _awk(arguments: list[str], value: str) -> str | None:
    mark, rest = None, list(arguments)
    while rest and rest[0].startswith("-F"):
        word = rest.pop(0)
        mark = (word[2:] or (rest.pop(0) if rest else "")).strip("[]").removeprefix("\\") or None
    found = AWK.fullmatch(rest[0].strip()) if len(rest) == 1 else None
    if not found or (mark and len(mark) > 1):
        return None
    fields = value.split(mark)
    parts = re.findall(r'\$(\d)|"([^"]*)"|(,)|(\S)', found["what"])
    if any(other for *_, other in parts) or "printf" in rest[0]:
        return None
    printed = ""
    for number, text, comma, _ in parts:
        at = int(number or 0)
        printed += " " if comma else text if not number else value if at == 0 else (fields + [""] * 9)[at - 1]
    return printed


def _first_line(arguments: list[str], value: str) -> str | None:
    return value.split("\n")[0] if re.fullmatch(r"-(n ?)?1", " ".join(arguments)) else None


def _same(arguments: list[str], value: str) -> str | None:
    return value.strip() if not arguments else None


FILTERS: dict[str, Callable[[list[str], str], str | None]] = {
    "cut": _cut,
    "tr": _tr,
    "sed": _sed,
    "awk": _awk,
    "gawk": _awk,
    "head": _first_line,
    "xargs": _same,
}
