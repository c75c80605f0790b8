"""The commands of a RUN or of a script, word by word with their lines. Pure; nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from windlass.image.read.conditions import CLOSING, OPENING, SEPARATORS, Block, Flow, failure_counts
from windlass.image.read.dockerfile import Instruction, substitute
from windlass.image.read.pipeline import output_of
from windlass.image.read.requirements import Place

# Words that stand before a command and do not change what it installs.
SKIPPED = ("sudo", "exec", "env", "time", "then", "do", "else", "nice", "!", "{", "}", "command", "-E", "-H")
NOT_COMMANDS = (*OPENING, *CLOSING, "elif", "[", "in")
JOINING = ("&&", "||", "|")
SHELLS = ("sh", "bash", "dash", "zsh")
COMMENT = re.compile(r"(^|\s)#.*$")
SUBSTITUTION = re.compile(r"\$\((?:'[^']*'|\"[^\"]*\"|[^()'\"])*\)|\$\([^()]*\)|`[^`]*`")
REDIRECTIONS = {"<": "\x01", ">": "\x02"}
MARK = re.compile(r"\x00(\d+)\x00")
INNER = re.compile(r"\x03(\d+)\x03")  # stands for a $(…), which is computed when its turn comes


class Word(str):
    """A word of a command, with the line that it stands on."""

    line: int = 0
    separates: bool = False  # && || | ; & ( )

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
    writes: str = ""  # `torch>=2.5`: the same with a file to write
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
        yield from _commands(lines, file, _Variables(variables), Flow(), shell)
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
    flow = Flow()
    known, named = _Variables(variables), re.match(r"#!\s*\S*?(?:env\s+)?(\w+)\s*(?:$|\s)", text)
    shell = named[1] if named else shell
    for number, line in enumerate(text.splitlines(), start=first):
        if line.rstrip().endswith("\\"):
            group.append((line.rstrip()[:-1], number))
            continue
        if line.rstrip().endswith(JOINING):
            group.append((line, number))
            continue
        yield from _commands([*group, (line, number)], file, known, flow, shell)
        group = []
    yield from _commands(group, file, known, flow, shell)


class _Variables(dict[str, str]):
    """The variables of a shell; a command that it starts sees those of the environment alone."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.own: set[str] = set()  # assigned, and never exported
        self.exports_all = False  # set -a

    def assign(self, values: Mapping[str, str], *, certain: bool = True) -> None:
        self.own |= {name for name in values if name not in self and not self.exports_all}
        self.update(values if certain else {name: f"${name}" for name in values})  # either value may be there

    def with_value(self, name: str, value: str) -> _Variables:
        other = _Variables({**self, name: value})
        other.own, other.exports_all = {*self.own, name}, self.exports_all
        return other

    @property
    def exported(self) -> dict[str, str]:
        return {name: value for name, value in self.items() if name not in self.own}


def _commands(lines: list[tuple[str, int]], file: str, known: _Variables, flow: Flow, shell: str) -> Iterator[Command]:
    """`known`: variables, to which assignments are added; `flow`: the conditions and loops around a line."""
    # The line of every word is carried through the lexer by marks that no Dockerfile contains.
    text = " ".join(f"\x00{number}\x00 {COMMENT.sub('', line)}" for line, number in lines)
    text, inner = _marked(text), list[str]()

    def set_aside(found: re.Match[str]) -> str:
        inner.append(MARK.sub("", found[0]))
        return f"\x03{len(inner) - 1}\x03"

    while SUBSTITUTION.search(text):  # the innermost first
        text = SUBSTITUTION.sub(set_aside, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    line, operator = (lines[0][1] if lines else 0), ""
    current: list[Word] = []
    loop: tuple[str, list[str]] = ("", [""])
    try:
        tokens = _tokens([*lexer, ";"], line)
    except ValueError:  # quotes that do not end
        return

    def value(word: str) -> str:
        return _value(word, known, inner)

    for at, token in enumerate(tokens):
        if not token.separates:
            current.append(token)
            continue
        if current[:1] == ["for"] and current[2:3] == ["in"]:
            loop = (str(current[1]), [value(word) for word in current[3:]])
        elif current[:1] == ["done"]:
            loop = ("", [""])
        repeated = any(loop[0] in word for word in current) if loop[0] else False
        words = flow.enter(current, operator, failure_counts(tokens, at - len(current)), value) if current else []
        if flow.in_pattern:
            flow.match(words, str(token))
        elif words:
            runs = flow.runs(words, operator, failure_counts(tokens, at), value)
            like = Command((), file, {}, operator, certain=runs is True, shell=shell)
            for each in loop[1] if repeated else loop[1][:1]:  # what a loop does is done for each of its words
                values = known.with_value(loop[0], each) if loop[0] else known
                if runs is not False:
                    yield from _finished(current[-len(words) :], inner, values, like)
        if token == "(" and not flow.in_pattern:
            flow.group("(", operator, failure_counts(tokens, at))
        elif token == ")" and flow.blocks and flow.blocks[-1].kind == "(":
            flow.leave()
        elif token == ";;":
            flow.next_pattern()
        current = []
        operator = operator if token == ")" and not words else str(token)


def _tokens(raw: list[str], line: int) -> list[Word]:
    """The words and separators of a text, each with its line; the marks of lines are taken out."""
    tokens: list[Word] = []
    for token in raw:
        for number in MARK.findall(token):
            line = int(number)
        plain = MARK.sub("", token).strip() if MARK.search(token) else token
        if not plain and MARK.search(token):
            continue
        if plain and set(plain) <= set(";&|()"):
            for separator in SEPARATORS.findall(plain):
                tokens.append(Word(separator).at(line))
                tokens[-1].separates = True
        else:
            tokens.append(Word(plain).at(line))
    return tokens


def _value(text: str, known: Mapping[str, str], inner: list[str]) -> str:
    """A word with its variables and the output of its $(…) put in; what is not known stays as it is."""

    def computed(found: re.Match[str]) -> str:
        written = inner[int(found[1])]
        plain = INNER.sub(computed, written)
        output = output_of(plain.removeprefix("$").strip("()`"), known)
        return "$?" + re.sub(r"[^\w.]+", "_", written) if output is None else output

    return substitute(INNER.sub(computed, text), known)


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


def _finished(words: list[Word], inner: list[str], known: _Variables, like: Command) -> Iterator[Command]:
    """A command with its variables put in; assignments and exports are remembered for those after it."""
    own: dict[str, str] = {}
    sudo = "sudo" in words[:2]
    if words[1:2] == ["[["]:
        words = words[1:]
    while words:
        assignment = re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)
        if assignment:
            own[assignment[1]] = _value(assignment[2], known, inner)
        elif words[0] not in SKIPPED:
            break
        words = words[1:]
    if not words:
        known.assign(own, certain=like.certain)
        return
    if words[0] in ("export", "declare"):
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if equals:
                known.assign({name: _value(value, known, inner)}, certain=like.certain)
            known.own.discard(name)
        return
    known.exports_all |= words[0] == "set" and bool({"-a", "allexport"} & set(words))
    if words[0] in NOT_COMMANDS:
        return
    values = {**known, **own}
    filled = tuple(Word(part).at(word.line) for word in words for part in _filled(word, values, inner))
    reads = next((str(word).replace("\x01", "<") for word in filled if "\x01" in word), "")
    writes = next((str(word).replace("\x02", ">") for word in filled if re.search("\x02=?\\d", word)), "")
    filled = tuple(Word(re.split("[\x01\x02]", word)[0]).at(word.line) for word in filled)
    if filled:
        sees = {**known.exported, **own}
        yield from _unwrapped(replace(like, words=filled, variables=sees, reads=reads, writes=writes, sudo=sudo), known)


def _filled(word: Word, values: Mapping[str, str], inner: list[str]) -> list[str]:
    """A variable or an output that is a word of its own may hold several words."""
    value = _value(word, values, inner)
    alone = re.fullmatch(r"\$\{?\w+\}?|\x03\d+\x03", word) and value != word
    return value.split() if alone else [value]


def _unwrapped(command: Command, variables: Mapping[str, str]) -> Iterator[Command]:
    """`bash -c "…"`: the commands inside."""
    words = command.words
    inner = next((n for n, word in enumerate(words[:4]) if re.fullmatch(r"-\w*c", word)), None)
    if command.program in SHELLS and inner is not None and len(words) > inner + 1:
        lines = [(str(words[inner + 1]), words[inner + 1].line)]
        within = Flow([] if command.certain else [Block("if", None)])
        yield from _commands(lines, command.file, _Variables(variables), within, command.program)
    else:
        yield command
