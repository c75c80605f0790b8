"""The commands of a RUN or of a script, word by word with their lines. Pure; nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from windlass.image.read.dockerfile import Instruction, substitute
from windlass.image.read.requirements import Place

# Words that stand before a command and do not change what it installs.
SKIPPED = ("sudo", "exec", "env", "time", "then", "do", "else", "nice", "!", "{", "}", "command", "-E", "-H")
NOT_COMMANDS = ("if", "elif", "for", "while", "until", "case", "fi", "done", "esac", "[", "in")
OPENING, CLOSING = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
SHELLS = ("sh", "bash", "dash", "zsh")
COMMENT = re.compile(r"(^|\s)#.*$")
SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
REDIRECTIONS = {"<": "\x01", ">": "\x02"}
MARK = re.compile(r"\x00(\d+)\x00")


class Word(str):
    """A word of a command, with the line that it stands on."""

    line: int = 0

    def at(self, line: int) -> Word:
        self.line = line
        return self


@dataclass(frozen=True)
class Command:
    """One simple command; `variables` are those that it sets for itself."""

    words: tuple[Word, ...]
    file: str
    variables: Mapping[str, str]
    after: str = ""  # the operator before it: &&, ||, ;
    reads: str = ""  # `numpy<2`: a word that the shell takes for a name and a file to read from
    certain: bool = True  # False: a condition or `||` decides whether it runs, or whether its failure counts
    sudo: bool = False
    shell: str = "sh"  # that runs it

    @property
    def program(self) -> str:
        return self.words[0].rsplit("/", 1)[-1]

    @property
    def place(self) -> Place:
        return Place(self.file, self.words[0].line)

    def __str__(self) -> str:
        return " ".join(self.words)


def run_commands(
    instruction: Instruction, file: str, variables: Mapping[str, str], shell: str = "sh"
) -> Iterator[Command]:
    """The commands of a RUN, with the values of ARG and ENV put in."""
    text = instruction.text.strip()
    if text.startswith("["):
        try:
            words = [Word(substitute(word, variables)).at(instruction.first) for word in json.loads(text)]
        except ValueError:
            words = []
        if words:
            yield from _unwrapped(Command(tuple(words), file, {}), variables)
            return
    if not text.startswith("<<"):
        lines = list(zip(instruction.text.split("\n"), instruction.lines, strict=False))
        yield from _commands(lines, file, dict(variables), [], shell)
    reader = text.split()[0].rsplit("/", 1)[-1] if text else ""
    for heredoc in instruction.heredocs:
        if reader.startswith("<<") or reader in SHELLS:
            own = reader if reader in SHELLS else shell
            yield from script_commands(heredoc.text, file, variables, first=heredoc.first, shell=own)


def script_commands(
    text: str, file: str, variables: Mapping[str, str], *, first: int = 1, shell: str = "sh"
) -> Iterator[Command]:
    """The commands of a shell script; its first line may name the shell."""
    group: list[tuple[str, int]] = []
    open_: list[str] = []
    known, named = dict(variables), re.match(r"#!\s*\S*?(?:env\s+)?(\w+)\s*(?:$|\s)", text)
    shell = named[1] if named else shell
    for number, line in enumerate(text.splitlines(), start=first):
        if line.rstrip().endswith("\\"):
            group.append((line.rstrip()[:-1], number))
            continue
        yield from _commands([*group, (line, number)], file, known, open_, shell)
        group = []
    yield from _commands(group, file, known, open_, shell)


def _commands(
    lines: list[tuple[str, int]], file: str, known: dict[str, str], open_: list[str], shell: str
) -> Iterator[Command]:
    """`known`: variables, to which assignments are added; `open_`: the conditions and loops around a line."""
    # The line of every word is carried through the lexer by marks that no Dockerfile contains.
    text = " ".join(f"\x00{number}\x00 {COMMENT.sub('', line)}" for line, number in lines)
    text = _marked(text)
    text = SUBSTITUTION.sub(lambda found: _echoed(found[0], known) or "$?" + re.sub(r"[^\w.]+", "_", found[0]), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    line, operator = (lines[0][1] if lines else 0), ""
    current: list[Word] = []
    loop: tuple[str, list[str]] = ("", [""])
    try:
        tokens = [*lexer, ";"]
    except ValueError:  # quotes that do not end
        return
    for token in tokens:
        for number in MARK.findall(token):
            line = int(number)
        plain = MARK.sub("", token).strip() if MARK.search(token) else token
        if not plain and MARK.search(token):
            continue
        if plain and set(plain) <= set(";&|()"):
            if current[:1] == ["for"] and current[2:3] == ["in"]:
                loop = (str(current[1]), [substitute(word, known) for word in current[3:]])
            elif current[:1] == ["done"]:
                loop = ("", [""])
            repeated = any(loop[0] in word for word in current) if loop[0] else False
            begins = current[0] if current else ""
            if begins in OPENING:
                open_.append(str(begins))
            certain = all(word == "for" for word in open_) and plain != "||" and begins not in ("then", "else")
            for value in loop[1] if repeated else loop[1][:1]:  # what a loop does is done for each of its words
                values = known | {loop[0]: value} if loop[0] else known
                yield from _finished(current, file, values, Command((), file, {}, operator, "", certain, False, shell))
            if begins in CLOSING and open_:
                open_.pop()
            current, operator = [], plain
        else:
            current.append(Word(plain).at(line))


def _echoed(text: str, known: Mapping[str, str]) -> str | None:
    """`$(echo $CUDA_VERSION | cut -d. -f1,2 | tr -d .)`: what a few plain commands make of a value."""
    first, *filters = text.strip("$()`").split("|")
    value = substitute(first.strip().removeprefix("echo").strip(" \"'"), known)
    for part in filters:
        if cut := re.fullmatch(r"\s*cut -d ?['\"]?(.)['\"]? -f ?(\d)(?:[,-](\d))?\s*", part):
            value = cut[1].join(value.split(cut[1])[int(cut[2]) - 1 : int(cut[3] or cut[2])])
        elif dropped := re.fullmatch(r"\s*tr -d ['\"]?(.)['\"]?\s*", part):
            value = value.replace(dropped[1], "")
        else:
            return None
    return value if first.strip().startswith("echo ") and "$" not in value else None


def _marked(text: str) -> str:
    """An unquoted < or > after a name becomes a mark: the shell ends the word there."""
    quote = ""
    letters = list(text)
    for at, letter in enumerate(letters):
        if letter in "'\"" and (not quote or quote == letter) and text[at - 1 : at] != "\\":
            quote = "" if quote else letter
        elif letter in "<>" and not quote and re.search(r"(^|\s)[\"']*[A-Za-z][\w.,\[\]-]*$", text[:at][-60:]):
            letters[at] = REDIRECTIONS[letter]
    return "".join(letters)


def _finished(words: list[Word], file: str, known: dict[str, str], like: Command) -> Iterator[Command]:
    """A command with its variables put in; assignments and exports are remembered for those after it."""
    own: dict[str, str] = {}
    sudo = "sudo" in words[:2]
    if words[1:2] == ["[["]:
        words = words[1:]
    while words:
        assignment = re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)
        if assignment:
            own[assignment[1]] = substitute(assignment[2], known)
        elif words[0] not in SKIPPED:
            break
        words = words[1:]
    if not words:
        known.update(own)
        return
    if words[0] in ("export", "declare"):
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if equals:
                known[name] = substitute(value, known)
        return
    if words[0] in NOT_COMMANDS:
        return
    filled = tuple(Word(part).at(word.line) for word in words for part in _filled(word, {**known, **own}))
    reads = next((str(word).replace("\x01", "<") for word in filled if "\x01" in word), "")
    filled = tuple(Word(re.split("[\x01\x02]", word)[0]).at(word.line) for word in filled)
    if filled:
        yield from _unwrapped(replace(like, words=filled, variables={**known, **own}, reads=reads, sudo=sudo), known)


def _filled(word: Word, values: Mapping[str, str]) -> list[str]:
    """A variable that is a word of its own may hold several words."""
    value = substitute(word, values)
    return value.split() if re.fullmatch(r"\$\{?\w+\}?", word) and value != word else [value]


def _unwrapped(command: Command, variables: Mapping[str, str]) -> Iterator[Command]:
    """`bash -c "…"`: the commands inside."""
    words = command.words
    inner = next((n for n, word in enumerate(words[:4]) if re.fullmatch(r"-\w*c", word)), None)
    if command.program in SHELLS and inner is not None and len(words) > inner + 1:
        lines = [(str(words[inner + 1]), words[inner + 1].line)]
        within = [] if command.certain else ["if"]
        yield from _commands(lines, command.file, dict(variables), within, command.program)
    else:
        yield command
