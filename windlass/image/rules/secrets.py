"""Rules about secrets: what ENV, ARG, COPY or RUN writes into a layer can be read by everyone who pulls it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from windlass.image.read.dockerfile import Instruction
from windlass.image.rules.finding import Case, Finding

NAME = re.compile(
    r"(?i)(^|_)(token|password|passwd|secret|api_?key|access_?key|secret_?key|private_?key|credentials?|pat|auth)$"
)
KEY = re.compile(r"(?i)\w+_key$")  # a secret where its value looks like one
RANDOM = re.compile(r"(?=[^/]*\d)[\w+/=-]{20,}")
GIVEN = re.compile(r"(?:\blogin|--(?:token|password|api-key))[ =](?!\$|-)['\"]?(?=\S*\d)[\w.+-]{16,}")
HARMLESS = re.compile(r"(?i)tokenizers?_|_?tokenizer|pad_token|path$|_file$|_dir$")
VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|AKIA[0-9A-Z]{16}|"
    r"sk-[A-Za-z0-9_-]{20,}|xox[bp]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
IN_ADDRESS = re.compile(r"https?://[^\s/@:'\"]+:([^\s/@'\"]+)@|https?://([A-Za-z0-9_-]{20,})@")
CLONED = re.compile(r"clone\b.*https?://[^\s@]*\$(\([^)]*\)|\{?\w+\}?)[^\s@]*@")  # git writes it to .git/config
FILES = re.compile(
    r"(^|/)(\.env(\.\w+)?|\.netrc|\.pypirc|\.git-credentials|id_rsa|id_ed25519|\.ssh/?|\.aws/?|\.aws/credentials|"
    r"kaggle\.json|credentials(\.json)?|service[-_]account\S*\.json|\.npmrc|\.docker/config\.json|\S+\.pem|"
    r"\.huggingface/?|\.cache/huggingface/token|\.kube/?)$"
)
CONTENT = re.compile(rf"{VALUE.pattern}|machine\s+\S+\s+login\s+\S+\s+password\s|(?i:aws_secret_access_key)\s*=\s*\S")
FIX = "give it to one RUN: RUN --mount=type=secret,id={name} …, and windlass image build --secret {name}=FILE"


def secrets(case: Case) -> Iterator[Finding]:
    arguments: dict[str, Instruction] = {}
    for instruction in case.dockerfile.instructions:
        if instruction.keyword == "ARG":
            yield from _argument(case, instruction, arguments)
        elif instruction.keyword == "ENV":
            yield from _environment(case, instruction, arguments)
        elif instruction.keyword in ("COPY", "ADD") and "from" not in instruction.flags:
            yield from _copied(case, instruction)
        elif instruction.keyword == "RUN":
            yield from _run(case, instruction)


def _argument(case: Case, one: Instruction, arguments: dict[str, Instruction]) -> Iterator[Finding]:
    for word in one.words.split():
        name, _, value = word.partition("=")
        if _secret_name(name) or VALUE.search(value):
            if value.strip("\"'"):
                yield _found(
                    case,
                    "secret-in-arg",
                    f"ARG {name} holds a secret, and the history of the image keeps it",
                    one.first,
                    name,
                )
            else:
                arguments[name] = one
                yield _found(
                    case, "secret-in-arg", f"the ARG {name} is for a secret, and the history keeps it", one.first, name
                )


def _environment(case: Case, one: Instruction, arguments: dict[str, Instruction]) -> Iterator[Finding]:
    pairs = re.findall(r"(\w+)=(\"[^\"]*\"|'[^']*'|\S*)", one.text) or [tuple(one.words.split(" ", 1))]
    for pair in pairs:
        name, value = pair[0], pair[1].strip("\"'") if len(pair) > 1 else ""
        line = _line_of(one, name)
        given = next((argument for argument in re.findall(r"\$\{?(\w+)", value) if argument in arguments), None)
        if given:
            yield _found(case, "secret-in-env", f"ENV {name} keeps what the ARG {given} was given", line, name)
        elif (_secret_name(name) and value and not value.startswith(("$", "/")) and len(value) > 3) or VALUE.search(
            value
        ):
            yield _found(
                case,
                "secret-in-env",
                f"ENV {name} holds a secret: everyone who pulls the image can read it",
                line,
                name,
            )


def _copied(case: Case, one: Instruction) -> Iterator[Finding]:
    for word in one.words.strip("[]").replace(",", " ").split()[:-1]:
        plain = word.strip("\"'")
        folder = posixpath.normpath(plain.lstrip("/") or ".")
        inside = [name for name in case.texts.files if folder == "." or name.startswith(f"{folder}/")]
        for name in [plain, *(name for name in inside if CONTENT.search(case.texts.files[name]))]:
            text = case.texts.files.get(posixpath.normpath(name), "")
            if (FILES.search(name) and not name.endswith((".example", ".sample", ".template"))) or CONTENT.search(text):
                yield _found(
                    case,
                    "secret-copied",
                    f"{name} is copied into the image, where all can read it",
                    one.first,
                    name.rsplit("/", 1)[-1].strip("."),
                )


def _run(case: Case, one: Instruction) -> Iterator[Finding]:
    text = "\n".join([one.text, *(heredoc.text for heredoc in one.heredocs)])
    for number, line in enumerate(text.split("\n")):
        address = IN_ADDRESS.search(line)
        literal = address and not (address[1] or address[2] or "").startswith("$")
        assigned = re.search(r"\b(?:export\s+)?(\w+)=(['\"]?)([^\s'\"$]{8,})\2", line)
        by_name = assigned and _secret_name(assigned[1]) and not assigned[3].startswith(("/", "$"))
        by_value = assigned and KEY.search(assigned[1]) and RANDOM.fullmatch(assigned[3])
        cloned = CLONED.search(line) and not re.search(r"rm -\w+ \S*\.git\b|remote set-url|remote remove", text)
        if cloned or VALUE.search(line) or literal or by_name or by_value or GIVEN.search(line):
            told = one.lines[number] if number < len(one.lines) else one.first
            yield _found(
                case,
                "secret-in-run",
                "a secret stands in this RUN, and the history of the image keeps it",
                told,
                "token",
            )
            return


def _secret_name(name: str) -> bool:
    return bool(NAME.search(name)) and not HARMLESS.search(name)


def _line_of(one: Instruction, name: str) -> int:
    for number, line in enumerate(one.text.split("\n")):
        if re.search(rf"(^|\s){re.escape(name)}[= ]", line) and number < len(one.lines):
            return one.lines[number]
    return one.first


def _found(case: Case, id: str, sentence: str, line: int, name: str) -> Finding:
    where = case.where_of(line)
    # The line itself is not shown: it holds the secret.
    return Finding(id, "error", f"{sentence}; {FIX.format(name=name.lower())}", where, ())
