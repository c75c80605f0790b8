"""The files of a stage: what the context and earlier steps put where, who owns it, and what a step cannot read."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from windlass.image.facts.node import Node
from windlass.image.facts.table import facts
from windlass.image.read.dockerfile import Dockerfile, Instruction
from windlass.image.read.installs import PYTHON
from windlass.image.read.requirements import Place
from windlass.image.read.shell import Command
from windlass.image.read.texts import Texts
from windlass.image.state.model import Failure, State, Trace, Where
from windlass.image.state.resolver import Index

KNOWN = ("python", "cuda", "system")  # families of which every program is known
PRIVATE = re.compile(r"type=(cache|secret|ssh|tmpfs)")  # mounts that bring no file of the context
SAFE = re.compile(r"mkdir|cd|ch(own|mod)|rm|ls|apt(-get)?|echo|useradd|adduser|test|source|\.")  # fill no folder
OPAQUE = re.compile(  # fill a folder with what is not known
    r"tar|unzip|7z|git|c?make|npm|cargo|go|cp|mv|rsync|aws|gsutil|azcopy|gdown|dvc|kaggle|huggingface-cli|hf"
)
NOT_OURS = re.compile(  # of the base
    r"/(usr|s?bin|lib\w*|etc|var|proc|sys|dev|run|boot|root|opt/(conda|nvidia|amazon))(/|$)"
)

CLONE_VALUES = re.compile(  # options of git clone that take a word of their own
    r"-[bjcou]|--(branch|depth|jobs|config|origin|upload-pack|reference|filter|shallow-since|template|separate-git-dir)"
)


class Files:
    """The files of a stage: which are there, where they come from, and who owns them."""

    def __init__(
        self, texts: Texts, node: Node, index: Index, dockerfile: Dockerfile, arguments: dict[str, str]
    ) -> None:
        self.texts, self.node, self.index, self.dockerfile = texts, node, index, dockerfile
        self.arguments = arguments
        self.trace = Trace([])
        self.state: State
        self.instruction: Instruction
        self.cwd = "/"
        self.active: str | None = None  # an environment that a command activated for the rest of its RUN
        self.piped = ""  # the command whose output the next one reads
        self.inline: dict[str, tuple[str, int]] = {}  # files that a heredoc writes
        self.before_from: set[str] = set()  # names of the ARGs that stand before the first FROM

    def _fail(self, id: str, sentence: str, at: Command | Where | int, *fix: str) -> None:
        """`fix`: what may heal it, as rules/system.py understands it."""
        if isinstance(at, Command):
            at = self._where(at.words[0].line, at)
        self.trace.failures.append(Failure(id, sentence, self._where(at) if isinstance(at, int) else at, fix))

    def _miss(self, program: str, command: Command, package: str = "") -> None:
        sentence = f"{program} is called here, and nothing installs it before"
        self._fail("missing-program", sentence, command, *(("apt", package) if package else ()))

    def _where(self, line: int, command: Command | None = None) -> Where:
        cause = Place(command.file if command else self.texts.name, line)
        outside = command is not None and command.file != self.texts.name
        place = Place(self.texts.name, self.instruction.first if outside else line)
        return Where(place, cause, self.instruction.first, self.instruction.last)

    def _provide(self, programs: Collection[str]) -> None:
        for program in programs:
            self.state.away.pop(program, None)
        if self.state.programs is not None:
            self.state.programs |= frozenset(programs)

    def _check_writes(self, command: Command) -> None:
        """A folder of root that another user would write to."""
        words = [str(word) for word in command.words]
        plain = [word for word in words[1:] if not word.startswith("-") and word not in ("clone", "sync")]
        named = command.program in ("mkdir", "touch") or (command.program == "git" and not re.search("[:@]", plain[-1]))
        target = posixpath.normpath(posixpath.join(self.cwd, plain[-1])) if plain and named else f"{self.cwd}/x"
        goal = posixpath.dirname(target)
        if target in self.state.owners or (command.program == "uv" and "UV_PROJECT_ENVIRONMENT" in command.variables):
            return
        if command.program in ("tar", "unzip", "wget") and any(
            word in ("-C", "-d", "-O", "-P") or ">" in word for word in words
        ):
            return
        if self._owner(goal) == "root":
            self._fail(
                "permission",
                f"{goal} belongs to root, and this step runs as {self.state.user}: permission denied",
                command,
            )

    def _owner(self, path: str) -> str:
        """Who owns a folder; nothing where that is not known."""
        if self.state.base.family not in (*KNOWN, "torch") or "$" in path:
            return ""
        at = posixpath.normpath(path)
        while at not in self.state.owners and at != "/":
            if re.fullmatch(r"/(tmp|var/tmp|dev/shm|home/[^/]+)", at):
                return ""
            at = posixpath.dirname(at)
        return self.state.owners.get(at, "root")

    def _make_folders(self, command: Command) -> None:
        for word in (word for word in command.words[1:] if not word.startswith("-") and "$" not in word):
            made = posixpath.normpath(posixpath.join(self.cwd, word))
            parents = any(re.fullmatch(r"-\w*p\w*|--parents|-m", option) for option in command.words)
            if (
                not parents
                and command.certain
                and self._there(posixpath.dirname(made)) is False
                and made.count("/") > 1
            ):
                self._fail(
                    "missing-file",
                    f"{posixpath.dirname(made)} is not there, and mkdir makes it with -p alone",
                    command,
                    "replace",
                    "mkdir ",
                    "mkdir -p ",
                )
            self.state.owners.setdefault(made, self.state.user.split(":")[0])

    def _own(self, words: Sequence[str]) -> None:
        """chown and chmod give a folder away."""
        for path in words[2:]:
            if path.startswith("-"):
                continue
            given = posixpath.normpath(posixpath.join(self.cwd, path))
            for owned in [given, *(known for known in self.state.owners if known.startswith(given.rstrip("/") + "/"))]:
                self.state.owners[owned] = "given away"

    # Files

    def _in_context(self, source: str) -> bool | None:
        """Whether the context has what COPY names; None where the whole of it is not known."""
        names = self.texts.names
        plain = posixpath.normpath("/" + source).lstrip("/")
        if names is None or not plain or "$" in source or "://" in source:
            return None
        depth = plain.count("/") + 1
        return any(
            fnmatchcase(part, plain.replace("[", "[[]"))
            for name in names
            for part in ("/".join(name.split("/")[:depth]),)
            if part.count("/") + 1 == depth
        )

    def _check_context(self) -> None:
        """A context that has nothing of what is copied is another folder than the one that is built from."""
        copies = [
            one for one in self.dockerfile.instructions if one.keyword in ("COPY", "ADD") and "from" not in one.flags
        ]
        sources = {
            word for copy in copies if not copy.heredocs for word in copy.words.split()[:-1] if word[:1] not in "[."
        }
        if (
            len(sources) > 1
            and not any(self._in_context(source) for source in sources)
            and self.texts.names is not None
        ):
            self.texts = replace(self.texts, names=None)
            self.trace.unknown.append(
                f"the context has nothing of {', '.join(sorted(sources)[:3])}: is it another folder?"
            )

    def _check_copied(self, copy: Instruction, sources: Sequence[str], destination: str) -> None:
        for source in sources:
            if self._in_context(source) is False:
                left_out = f" ({self.texts.left_out(source)})" if self.texts.left_out(source) else ""
                self._fail(
                    "missing-file", f"{source} is not in the context{left_out}: {copy.keyword} fails", copy.first
                )
        many = len(sources) > 1 or any(re.search(r"[*?]", source) for source in sources)
        several = (
            len(sources) > 1
            or sum(fnmatchcase(name, posixpath.normpath(sources[0])) for name in self.texts.names or ()) > 1
        )
        if many and several and not destination.endswith("/") and destination not in (".", ".."):
            self._fail(
                "missing-file",
                f"{copy.keyword} of several files needs a folder to go to, and {destination} does not end with /",
                copy.first,
                "replace",
                destination,
                f"{destination}/",
            )

    def _check_stage(self, name: str, copy: Instruction) -> bool:
        """COPY --from a stage that is not there is taken for an image's name."""
        names = [stage.name for stage in self.dockerfile.stages[: copy.stage] if stage.name]
        if (
            re.search(r"[/:.$]", name)
            or not get_close_matches(name.lower(), names)
            or name in facts()["programs"]["images"]
        ):
            return True  # an image, or a context of its own (--build-context)
        self._fail(
            "no-such-stage",
            f"no earlier stage is called {name} ({', '.join(names)}), and it is taken for an image of that name",
            copy.first,
        )
        return False

    def _check_other(self, other: State, source: str, copy: Instruction) -> None:
        """What a stage has certainly not made cannot be copied from it."""
        last, folder = posixpath.basename(source.rstrip("/")), self.cwd
        here, self.state = self.state, other
        self.cwd = other.workdir
        made = {last} & other.mentioned or {source.rstrip("/")} & {*other.environments, *other.overlays}
        made = made or {path for path in other.interpreters if path.startswith(f"{source.rstrip('/')}/")}
        if not made and not re.search(r"[*?\[]", source) and self._there(source) is False:
            self._fail("missing-file", f"{source} is not in the other stage: nothing there makes it", copy.first)
        self.state, self.cwd = here, folder

    def _there(self, path: str) -> bool | None:
        """Whether a file is in the image now; None where that cannot be told."""
        state, names = self.state, self.texts.names
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        if names is None or state.base.family not in (*KNOWN, "torch") or "$" in absolute or NOT_OURS.match(absolute):
            return None
        mounts = self.instruction.flags.get("mount", "").split()
        if absolute in self.inline or "~" in absolute or any(not PRIVATE.search(mount) for mount in mounts):
            return None
        known = any(
            f"/{absolute.split('/')[1]}" in (other, posixpath.dirname(other))
            for other in (*state.owners, *state.folders)
        )
        if any(absolute.startswith(made.rstrip("/") + "/") for made in state.opaque if made != "/" or not known):
            return None
        if any(folder.startswith(absolute.rstrip("/") + "/") for folder in state.folders):
            return True
        for source, inside in self._copied_from(absolute):
            if source.startswith("git+"):
                return None
            if inside in names or inside in (".", source) or any(name.startswith(f"{inside}/") for name in names):
                return True
        made = any(known == absolute or known.startswith(absolute.rstrip("/") + "/") for known in state.owners)
        return None if made or posixpath.basename(absolute) in state.mentioned else False

    def _copied_from(self, absolute: str) -> Iterator[tuple[str, str]]:
        """What was copied to a path, or to a folder above it, the nearest first: the source, and the path below it."""
        yield from copied_from(self.state, absolute)

    def _context_file(self, path: str) -> str | None:
        """The file of the context that a path in the image was copied from."""
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        plain = posixpath.normpath(str(path).lstrip("/"))  # a bind mount, or a copy that was not understood
        named = [file for file in self.texts.files if posixpath.basename(file) == posixpath.basename(plain)]
        told = [*(inside for _, inside in self._copied_from(absolute)), plain, *(named if len(named) == 1 else ())]
        return next((file for file in told if file in self.texts.files), None)

    def _context_folder(self, path: str) -> str | None:
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        for source, inside in self._copied_from(absolute):
            if not source.startswith("git+") and source not in self.texts.files:
                return inside
        # Single files were copied into it: the folder of the context that they came from.
        single = (
            posixpath.dirname(source) or "."
            for folder, source in self.state.folders.items()
            if posixpath.dirname(folder) == absolute
            and posixpath.basename(source) in ("pyproject.toml", "setup.py", "setup.cfg", "uv.lock")
        )
        return next(single, "." if absolute == self.cwd and "pyproject.toml" in self.texts.files else None)

    def _check_there(self, path: str, at: Where, *, folder: Sequence[str] = ()) -> bool:
        """Whether a step can read a file, or one of some files of a folder; what is certainly not there is noted."""
        if all(self._there(posixpath.join(path, name)) is False for name in folder or ("",)):
            there = self._in_context(posixpath.basename(path)) and not folder
            why = "the context has it, but no earlier step copies it here" if there else "no earlier step puts it there"
            what = f"{path} has no {' or '.join(folder)}" if folder else f"{path} is not in the image"
            self._fail("missing-file", f"{what}: {why}", at)
            return False
        return True

    def _clone(self, words: list[str]) -> None:
        rest: list[str] = []
        given = words[words.index("clone") + 1 :]
        while given:
            word = given.pop(0)
            if CLONE_VALUES.fullmatch(word):
                given = given[1:]
            elif not word.startswith("-"):
                rest.append(word)
        if not rest or not re.search(r"://|^[\w.-]+@[\w.-]+:", rest[0]):
            self.state.opaque.add(self.cwd)
            return
        url = rest[0]
        name = rest[1] if len(rest) > 1 else url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
        branch = re.search(r"(?:-b|--branch)[ =](\S+)", " ".join(words))
        self.state.folders[posixpath.normpath(posixpath.join(self.cwd, name))] = f"git+{url}" + (
            f"@{branch[1]}" if branch else ""
        )

    def _mention(self, command: Command) -> None:
        """Names that commands speak of may be files that they make; what unpacks or copies fills a folder."""
        state = self.state
        for option, word in zip(("", *command.words), command.words, strict=False):
            if option == "-m":  # a module, not a file
                continue
            state.mentioned.add(posixpath.basename(str(word).rstrip("/")))
            if "/bin/" in word or word.startswith(("-o/", "-O/")):
                self._provide({posixpath.basename(word)})
        if not SAFE.fullmatch(command.program):
            state.opaque |= {posixpath.normpath(word) for word in command.words[1:] if word.startswith("/")}
        if command.program == "make" and "install" in command.words:
            state.programs = None  # whatever it builds
        script = PYTHON.match(command.program) and command.words[1:2] and not command.words[1].startswith("-")
        cloned = command.program == "git" and "clone" in command.words  # which fills a folder of its own alone
        if (OPAQUE.fullmatch(command.program) and not cloned) or script:
            targets = [
                word for flag, word in zip(command.words, command.words[1:], strict=False) if flag in ("-C", "-d")
            ]
            last = str(command.words[-1]) if command.program in ("cp", "mv", "rsync") else ""
            for target in (*targets, *([last] if last else ()), *(() if targets or last else (self.cwd,))):
                state.opaque.add(posixpath.normpath(posixpath.join(self.cwd, str(target))))


def copied_from(state: State, absolute: str) -> Iterator[tuple[str, str]]:
    """What was copied to a path, or to a folder above it, the nearest first: the source, and the path below it."""
    for folder, source in sorted(state.folders.items(), key=lambda pair: -len(pair[0])):
        if absolute == folder or absolute.startswith(folder.rstrip("/") + "/"):
            below = absolute[len(folder.rstrip("/")) + 1 :]
            yield source, source if source.startswith("git+") else posixpath.normpath(posixpath.join(source, below))
