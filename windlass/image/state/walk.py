"""Walk a Dockerfile step by step and keep what is installed after each, by resolving what every command asks for."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from windlass.image.facts.bases import Base, base_of
from windlass.image.facts.node import Node
from windlass.image.facts.table import facts
from windlass.image.read.dockerfile import (
    PREDEFINED,
    Dockerfile,
    Instruction,
    Stage,
    assignments,
    parse_dockerfile,
    substitute,
)
from windlass.image.read.installs import (
    PIP,
    PYTHON,
    PipInstall,
    apt_packages,
    conda_install,
    pip_install,
    pip_uninstall,
)
from windlass.image.read.project import (
    NotUnderstood,
    conda_environment,
    locked_requirements,
    project_requirements,
    python_of_project,
)
from windlass.image.read.requirements import Place, Wanted, parse_requirements, wanted_of, wheel_of
from windlass.image.read.shell import SHELLS, Command, Word, run_commands, script_commands
from windlass.image.read.texts import Texts
from windlass.image.state.model import (
    UV_PYTHON,
    Compiled,
    Environment,
    Missing,
    Package,
    State,
    Step,
    Trace,
    Where,
    torch_cuda,
)
from windlass.image.state.resolver import Answer, Index, Question, Stub, find_uv, torch_tag

DEFAULT_PYTHON = "3.12"
SYSTEM = "system"
CALLED = ("git", "curl", "wget", "pip", "gcc", "make", "conda", "uv", "nvcc")  # programs whose absence is said
PROVIDES = {  # Debian's package → programs
    "git": {"git"}, "curl": {"curl"}, "wget": {"wget"}, "build-essential": {"gcc", "g++", "make"}, "gcc": {"gcc"},
    "g++": {"g++", "gcc"}, "clang": {"gcc", "g++"}, "make": {"make"}, "python3-pip": {"pip"}, "cmake": {"cmake"},
    "ninja-build": {"ninja"}, "python3-dev": {"headers"}, "python-is-python3": set(), "git-lfs": {"git"},
    "python3-full": {"pip"},
}  # fmt: skip
CONDA_NAMES = {"pytorch": "torch", "pytorch-gpu": "torch"}


def walk(
    texts: Texts,
    node: Node,
    index: Index,
    *,
    arguments: Mapping[str, str] | None = None,
    target: str | None = None,
) -> Trace:
    dockerfile = parse_dockerfile(texts.dockerfile or "", arguments)
    walker = _Walker(texts, node, index, dockerfile, dict(arguments or {}))
    final = dockerfile.stage(target)
    if final is None:
        return Trace([], unknown=["there is no FROM in the Dockerfile"])
    walker.trace.final_stage = final.number
    used = _used_stages(dockerfile, final.number)
    walker.trace.used_stages = used
    for stage in dockerfile.stages[: final.number + 1]:
        walker.stage(stage, skip=stage.number not in used)
    return walker.trace


def _used_stages(dockerfile: Dockerfile, final: int) -> frozenset[int]:
    """The stages that the final one is made from: its parents, and those that it copies from."""
    used: set[int] = set()
    waiting = [final]
    while waiting:
        number = waiting.pop()
        if number in used:
            continue
        used.add(number)
        stage = dockerfile.stages[number]
        waiting += [stage.parent] if stage.parent is not None else []
        for one in stage.instructions:
            sources = [one.flags.get("from"), *re.findall(r"from=([\w.-]+)", one.flags.get("mount", ""))]
            waiting += [found.number for name in sources if name and (found := dockerfile.stage(name))]
    return frozenset(used)


class _Walker:
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
        self.inline: dict[str, tuple[str, int]] = {}  # files that a heredoc writes

    # Stages and instructions

    def stage(self, stage: Stage, *, skip: bool) -> None:
        if stage.parent is not None:
            self.state = self.trace.states[stage.parent].copy()
        else:
            self.state = self._start(stage, quiet=skip)
        self.trace.states.append(self.state)
        if skip:
            return
        given: dict[str, str] = dict(PREDEFINED)
        for one in self.dockerfile.instructions:
            if one.stage == -1 and one.keyword == "ARG":
                given.update(assignments(one.text, given))
        given |= self.arguments
        for instruction in stage.instructions:
            self.instruction = instruction
            self._instruction(instruction, given)

    def _start(self, stage: Stage, *, quiet: bool) -> State:
        base = base_of(stage.image)
        where = Where(Place(self.texts.name, stage.start.first), Place(self.texts.name, stage.start.first),
                      stage.start.first, stage.start.last)  # fmt: skip
        if "$" in stage.image and not quiet:
            self.trace.unknown.append(f"{where}: {stage.image}: an ARG has no value; give it by --build-arg")
        elif base.family is None and not quiet and base.image != "scratch":
            self.trace.unknown.append(f"{where}: the base image {base.image} is not known: what it brings is not checked")
        known = facts()["systems"].get(base.system or "", {})
        own = base.own_python
        python = base.python or (known.get("python") if base.family in ("cuda", "system", "nvidia-torch") else None)
        if base.family in ("torch", "nvidia-torch") and python is None and not quiet:
            self.trace.unknown.append(f"{where}: which Python {base.image} has is not known")
        interpreter = f"/usr/local/bin/python{python}" if own else f"/usr/bin/python{python}"
        packages = {
            name: Package(name, version, where, "base", cuda=base.cuda if name.startswith("torch") else None)
            for name, version in base.packages
        }
        managed = bool(known.get("managed")) and not own and base.family != "nvidia-torch"
        environment = Environment(SYSTEM, python, interpreter, managed, packages)
        return State(
            base=base,
            platform=self.node.platform,
            environments={SYSTEM: environment},
            active=SYSTEM,
            system=base.system,
            nvcc=base.cuda if base.has_nvcc else None,
            nvcc_known=base.has_nvcc is not None,
            programs=base.programs if base.family in ("python", "cuda", "system") else None,
            interpreters=frozenset({interpreter} if python else ()),
        )

    def _instruction(self, one: Instruction, given: Mapping[str, str]) -> None:
        state = self.state
        if one.keyword == "ENV":
            values = assignments(one.text, state.variables)
            state.variables.update(values)
            state.exported.update({name: self._where(one.first) for name in values})
            self._activate_by_path()
        elif one.keyword == "ARG":
            for name, value in assignments(one.text, {**given, **state.variables}).items():
                state.variables.setdefault(name, value)
                if name in self.arguments:
                    state.variables[name] = self.arguments[name]
            for name in one.words.split():
                if "=" not in name and name in given:
                    state.variables.setdefault(name, given[name])
        elif one.keyword == "WORKDIR":
            state.workdir = posixpath.normpath(posixpath.join(state.workdir, substitute(one.words, state.variables).strip("\"'")))
        elif one.keyword == "USER":
            state.user = one.words
        elif one.keyword in ("COPY", "ADD"):
            self._copy(one)
        elif one.keyword == "RUN":
            self.cwd, self.active = state.workdir, None
            for command in run_commands(one, self.texts.name, state.variables):
                if command.after != "||":
                    self._command(command)

    def _activate_by_path(self) -> None:
        """PATH and VIRTUAL_ENV decide which Python and pip a command finds."""
        state = self.state
        folders = [state.variables.get("VIRTUAL_ENV", ""), *(
            one.removesuffix("/bin") for one in state.variables.get("PATH", "").split(":") if one.endswith("/bin"))]  # fmt: skip
        for folder in folders:
            if posixpath.normpath(folder or "-") in state.environments:
                state.active = posixpath.normpath(folder)
                return

    def _copy(self, one: Instruction) -> None:
        state = self.state
        try:
            words = [str(word) for word in json.loads(one.text)] if one.text.startswith("[") else one.words.split()
        except ValueError:
            words = one.words.split()
        words = [substitute(word, state.variables) for word in words if not word.startswith("<<")]
        if one.heredocs and words:
            self.inline[posixpath.join(state.workdir, words[-1])] = (one.heredocs[0].text, one.heredocs[0].first)
            return
        if len(words) < 2:
            return
        *sources, destination = words
        target = posixpath.join(state.workdir, destination)
        source_stage = one.flags.get("from")
        if source_stage is None:
            for source in sources:
                plain = posixpath.normpath(source.lstrip("/")) if source not in (".", "./", "/") else "."
                into = target.endswith("/") or len(sources) > 1 or destination in (".", "./")
                folder = any(name.startswith(f"{plain}/") for name in self.texts.files)
                is_file = plain in self.texts.files or (not folder and "." in posixpath.basename(plain).strip("."))
                state.folders[posixpath.normpath(posixpath.join(target, posixpath.basename(plain)) if is_file and into else target)] = plain
            return
        stage = self.dockerfile.stage(source_stage)
        if stage is None:
            if re.search(r"astral-sh/uv", source_stage):
                self._provide({"uv"})
            return
        other = self.trace.states[stage.number]
        for source in sources:
            self._copy_environment(other, posixpath.normpath(source), posixpath.normpath(target), one)

    def _copy_environment(self, other: State, source: str, target: str, one: Instruction) -> None:
        state, where = self.state, self._where(one.first)
        if source in ("/usr/local", "/usr", "/opt", "/root/.local/share/uv", UV_PYTHON, "/opt/uv", "/root/.local", "/python"):
            state.interpreters |= other.interpreters
        site = re.fullmatch(r"(.*)/lib/python(3\.\d+)(?:/(?:site|dist)-packages)?", source)
        for prefix, environment in other.environments.items():
            in_system = prefix == SYSTEM and (bool(site) or source in ("/usr/local", "/usr", "/usr/local/lib"))
            below = prefix != SYSTEM and (prefix == source or prefix.startswith(source.rstrip("/") + "/"))
            if not (in_system or below):
                continue
            own = SYSTEM if in_system else target + prefix.removeprefix(source)
            copied = Environment(own, environment.python, environment.interpreter, environment.managed,
                                 {name: replace(package, where=where) for name, package in environment.packages.items()})  # fmt: skip
            if in_system and SYSTEM in state.environments:
                self.trace.copied.append((environment, state.copy(), where))
                state.environments[SYSTEM].packages.update(copied.packages)
            else:
                state.environments[own] = copied
                self.trace.copied.append((copied, state.copy(), where))
            self._activate_by_path()

    # Commands

    def _command(self, command: Command) -> None:
        self._check_program(command)
        install = pip_install(command)
        if install:
            if install.arguments.has("--dry-run", "--help"):
                return
            self._pip(install)
        elif removed := pip_uninstall(command):
            self._uninstall(command, removed)
        elif (packages := apt_packages(command)) is not None:
            self._apt(packages, command)
        elif (conda := conda_install(command)) is not None:
            self._conda(conda.arguments.words, conda.files, conda.environment, command, conda.arguments.values("--channel"))
        else:
            self._other(command)

    def _check_program(self, command: Command) -> None:
        known = self.state.programs
        program = "pip" if PIP.match(command.program) else command.program
        if PYTHON.match(command.program) and "pip" in command.words[1:3]:
            program = "pip"
        if self.active or self.state.active != SYSTEM or "/" in command.words[0]:
            return  # a virtual environment has a pip of its own
        if known is not None and program in CALLED and program not in known:
            if program in ("gcc", "make", "nvcc"):
                return
            self._miss(program, command)

    def _miss(self, program: str, command: Command) -> None:
        self.trace.missing.append(Missing(program, self._where(command.words[0].line, command), str(command)))

    def _provide(self, programs: set[str] | frozenset[str]) -> None:
        if self.state.programs is not None:
            self.state.programs |= programs

    def _other(self, command: Command) -> None:
        words, program = [str(word) for word in command.words], command.program
        if program == "cd" and len(words) > 1:
            self.cwd = posixpath.normpath(posixpath.join(self.cwd, words[1]))
        elif program == "git" and "clone" in words:
            self._clone(words)
        elif program in ("source", ".") and len(words) > 1 and words[1].endswith("/bin/activate"):
            self._activate(posixpath.normpath(posixpath.join(self.cwd, words[1].removesuffix("/bin/activate"))))
        elif program in ("conda", "mamba", "micromamba") and len(words) > 2 and words[1] == "activate":
            self._activate(words[2])
        elif program in ("conda", "mamba", "micromamba") and len(words) > 3 and words[1] == "run":
            self._conda_run(command)
        elif (PYTHON.match(program) and words[1:3] in (["-m", "venv"], ["-m", "virtualenv"])) or program == "virtualenv":
            self._venv(words, python=_version_in(program))
        elif program == "uv" and words[1:2] == ["venv"]:
            self._uv_venv(words)
        elif program in ("poetry", "pdm") and "install" in words:
            self._poetry(command)
        elif PYTHON.match(program) and len(words) > 2 and words[1].endswith("setup.py"):
            self._setup_py(command, words)
        elif program in ("ln", "update-alternatives") and (found := re.search(r"python(3\.\d+)", " ".join(words))):
            self._link_python(found[1], words)
        elif program in SHELLS or words[0].endswith(".sh"):
            self._script(command)
        elif PYTHON.match(program) and any("get-pip" in word for word in words):
            self._provide({"pip"})
        elif program == "pip" or (program == "uv" and words[1:2] == ["python"]):
            self._configure(words)
        elif "efa_installer.sh" in words[0]:
            self.state.efa_where = self._where(command.words[0].line, command)
        if any("get-pip.py" in word for word in words):
            self._provide({"pip"})
        if any("astral.sh/uv" in word for word in words):
            self._provide({"uv"})
        if any("iniconda" in word or "iniforge" in word for word in words):
            self._provide({"conda"})
        if installer := re.search(r"aws-efa-installer-(latest|\d+\.\d+(?:\.\d+)?)\.tar", " ".join(words)):
            self.state.efa = installer[1]
            self.state.efa_where = self._where(command.words[0].line, command)
        if runfile := re.search(r"cuda_(\d+\.\d+)\.\d+_\S*linux\S*\.run", " ".join(words)):
            self.state.nvcc, self.state.nvcc_known = runfile[1], True

    def _configure(self, words: list[str]) -> None:
        if words[1:3] == ["config", "set"] and len(words) > 4:
            name = "PIP_" + words[3].rpartition(".")[2].upper().replace("-", "_")
            self.state.variables[name] = words[4]
        elif words[1:3] == ["python", "install"] and len(words) > 3 and (found := _version_in(words[3])):
            self.state.variables.setdefault("UV_PYTHON", found)

    def _clone(self, words: list[str]) -> None:
        rest = [one for one in words[words.index("clone") + 1 :] if not one.startswith("-")]
        url = next((one for one in rest if "://" in one or one.startswith("git@")), None)
        if url is None:
            return
        after = rest[rest.index(url) + 1 :]
        name = after[0] if after else url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
        branch = re.search(r"(?:-b|--branch)[ =](\S+)", " ".join(words))
        self.state.folders[posixpath.normpath(posixpath.join(self.cwd, name))] = f"git+{url}" + (f"@{branch[1]}" if branch else "")

    def _activate(self, name: str) -> None:
        prefix = next((one for one in self.state.environments if one == name or one.endswith(f"/{name}")), None)
        self.active = prefix or self.active

    def _conda_run(self, command: Command) -> None:
        words = list(command.words)
        at = next((n for n, word in enumerate(words) if word in ("-n", "-p", "--name")), None)
        before = self.active
        if at is not None and len(words) > at + 2:
            self._activate(str(words[at + 1]))
            rest = [word for word in words[at + 2 :] if not word.startswith("--")]
            self._command(Command(tuple(rest), command.file, command.variables, command.after))
        self.active = before

    def _venv(self, words: list[str], python: str | None) -> None:
        plain = [one for one in words[1:] if not one.startswith("-") and one not in ("venv", "virtualenv")]
        if plain:
            current = self.state.environments[SYSTEM]
            version = python or current.python
            prefix = posixpath.normpath(posixpath.join(self.cwd, plain[-1]))
            inherited = dict(current.packages) if "--system-site-packages" in words else {}
            interpreter = f"/usr/bin/python{version}" if python else current.interpreter
            self.state.environments[prefix] = Environment(prefix, version, interpreter, False, inherited)
            self._activate_by_path()

    def _uv_venv(self, words: list[str]) -> None:
        version, plain, rest = self.state.variables.get("UV_PYTHON"), [], words[2:]
        while rest:
            word = rest.pop(0)
            if word in ("--python", "-p") and rest:
                version = rest.pop(0)
            elif word.startswith("--python="):
                version = word.partition("=")[2]
            elif not word.startswith("-"):
                plain.append(word)
        prefix = posixpath.normpath(posixpath.join(self.cwd, plain[-1] if plain else ".venv"))
        self._new_uv_environment(prefix, _version_in(version or ""))

    def _new_uv_environment(self, prefix: str, wanted: str | None) -> None:
        """uv takes the interpreter that is there where it is the right one, else it downloads one."""
        system = self.state.environments[SYSTEM]
        fits = wanted in (None, system.python) and system.python and system.interpreter in self.state.interpreters
        has_python = self.state.base.family != "cuda" or "python3" in self.state.apt or f"python{wanted}" in self.state.apt
        if fits and has_python:
            environment = Environment(prefix, system.python, system.interpreter)
        else:
            version = wanted or DEFAULT_PYTHON
            own = f"/usr/bin/python{version}"
            interpreter = own if own in self.state.interpreters else f"{UV_PYTHON}/{version}"
            environment = Environment(prefix, version, interpreter)
            self.state.interpreters |= {interpreter}
        self.state.environments[prefix] = environment
        self._activate_by_path()

    def _link_python(self, version: str, words: list[str]) -> None:
        if any(re.search(r"/python3?$", word) for word in words) and f"/usr/bin/python{version}" in self.state.interpreters:
            system = self.state.environments[SYSTEM]
            system.python, system.interpreter, system.managed = version, f"/usr/bin/python{version}", False

    def _script(self, command: Command) -> None:
        word = next((one for one in command.words if one.endswith(".sh")), None)
        path = self._context_file(word) if word else None
        if path is None:
            if word and command.program in (*SHELLS, word.rsplit("/", 1)[-1]) and "efa" not in word and "conda" not in word.lower():
                self.trace.unknown.append(f"{self._where(command.words[0].line, command)}: the script {word} is not in the context")
            return
        folder = self.cwd
        for inner in script_commands(self.texts.files[path], path, command.variables):
            if inner.after != "||":
                self._command(inner)
        self.cwd = folder

    def _uninstall(self, command: Command, names: Sequence[str]) -> None:
        environment = self._environment(str(command.words[0]))
        before = dict(environment.packages)
        for name in names:
            environment.packages.pop(canonicalize_name(name), None)
        self._record(self._where(command.words[0].line, command), str(command), before, environment, kind="uninstall")

    def _apt(self, packages: Sequence[Word], command: Command) -> None:
        state = self.state
        known = facts()["systems"].get(state.system or "", {})
        for word in packages:
            name = re.split(r"[=:/]", word)[0]
            where = self._where(word.line, command)
            state.apt[name] = where
            self._provide(PROVIDES.get(name, set()))
            if python := re.fullmatch(r"python(3\.\d+)(-\w+)?", name):
                state.interpreters |= {f"/usr/bin/python{python[1]}"}
            if name in ("python3", "python3-pip", "python3-dev") and known:
                state.interpreters |= {f"/usr/bin/python{known['python']}"}
            if gcc := re.fullmatch(r"(gcc|g\+\+)-(\d+)", name):
                self._provide({gcc[1], name})
            if name == "nvidia-cuda-toolkit" and not state.nvcc:
                state.nvcc, state.nvcc_known = known.get("cuda"), True
            elif toolkit := re.fullmatch(r"cuda(?:-toolkit|-nvcc|-compiler)?-(\d+)-(\d+)", name):
                state.nvcc, state.nvcc_known = f"{toolkit[1]}.{toolkit[2]}", True

    def _conda(
        self, words: Sequence[Word], files: Sequence[Word], name: str | None, command: Command, channels: Sequence[Word]
    ) -> None:
        state, where = self.state, self._where(command.words[0].line, command)
        asked = [(str(word), Place(command.file, word.line)) for word in words]
        pip: list[Wanted] = []
        if "env" in command.words[:3]:
            files = files or (Word("environment.yml").at(command.words[0].line),)
        for file in files:
            path = self._context_file(file)
            if path is None:
                self.trace.unknown.append(f"{where}: {file} is not in the context")
                continue
            try:
                more, own = conda_environment(self.texts.files, path)
            except NotUnderstood as error:
                self.trace.unknown.append(f"{where}: {error}")
                continue
            asked += more
            pip += own
        prefix = SYSTEM if name in (None, "base") else str(name)
        if prefix not in state.environments:
            state.environments[prefix] = Environment(prefix, None, f"/opt/conda/{prefix}")
        environment = state.environments[prefix]
        environment.managed = False
        before = dict(environment.packages)
        names = {re.split(r"[=<>! ]", text.rsplit("::", 1)[-1])[0] for text, _ in asked}
        cuda = None
        for text, place in asked:
            plain = text.rsplit("::", 1)[-1]
            found = re.match(r"([\w.-]+)\s*(?:[=<>!~]+\s*([\w.*+]+))?(?:=(\S+))?", plain)
            if not found:
                continue
            version = (found[2] or "").rstrip(".*") or None
            if found[1] == "python" and version:
                environment.python = ".".join(version.split(".")[:2])
            elif found[1] in ("pytorch-cuda", "cudatoolkit", "cuda-version") and version:
                cuda = ".".join(version.split(".")[:2])
            elif found[1] in ("cuda-nvcc", "cuda-toolkit", "cuda", "cudatoolkit-dev"):
                state.nvcc, state.nvcc_known = version or cuda or state.nvcc, True
            own_name = canonicalize_name(CONDA_NAMES.get(found[1], found[1]))
            environment.packages[own_name] = Package(own_name, version, replace(where, cause=place), "conda", bool(version))
        torch = environment.packages.get("torch")
        if torch and torch.origin == "conda" and torch.where.place == where.place:
            gpu = cuda or "pytorch-gpu" in names or any("cuda" in text and "pytorch" in text for text, _ in asked)
            told = "CONDA_OVERRIDE_CUDA" in {**state.variables, **command.variables}
            environment.packages["torch"] = replace(torch, cuda=cuda if gpu or told else "cpu")
        if "mambaorg" in state.base.repository or state.base.family == "conda":
            self._provide({"pip"})
        self._record(where, str(command), before, environment, kind="conda")
        self.trace.unknown.append(f"{where}: what conda takes beside the versions that are written is not checked")
        if pip:
            self._resolve(pip, where, str(command), environment, PipInstall(command, _no_arguments(), "install", False))

    def _setup_py(self, command: Command, words: list[str]) -> None:
        source = self.state.folders.get(self.cwd)
        if source and source.startswith("git+") and any(verb in words for verb in ("install", "develop", "bdist_wheel")):
            self._built(_project_name(source), None, self._where(command.words[0].line, command), str(command), isolated=False)

    def _poetry(self, command: Command) -> None:
        where = self._where(command.words[0].line, command)
        folder = self._context_folder(".")
        try:
            wanted = project_requirements(self.texts.files, folder if folder is not None else ".")
        except NotUnderstood as error:
            self.trace.unknown.append(f"{where}: {error}")
            return
        flat = {**self.state.variables, **command.variables}
        environment = self._environment("")
        if flat.get("POETRY_VIRTUALENVS_CREATE", "").lower() in ("false", "0"):
            environment = self.state.environment
        self._resolve(wanted, where, str(command), environment, PipInstall(command, _no_arguments(), "install", True))

    # pip and uv

    def _pip(self, install: PipInstall) -> None:
        where = self._where(install.command.words[0].line, install.command)
        environment = self._environment(install.interpreter, install)
        wanted: list[Wanted] = []
        extras = [str(one) for one in install.arguments.values("--extra")]
        groups = [str(one) for one in install.arguments.values("--group")]
        if install.verb == "sync":
            wanted += self._synced(install, where, extras, groups)
        for word in (*install.arguments.words, *install.arguments.values("--editable")):
            wanted += self._wanted(word, install, where, editable=word in install.arguments.values("--editable"))
        files = [(word, False) for word in install.arguments.values("--requirement")]
        files += [(word, True) for word in install.arguments.values("--constraint")]
        variables = {**self.state.variables, **install.command.variables}
        files += [(Word(one).at(where.place.line), True) for one in variables.get("PIP_CONSTRAINT", "").split() if not install.by_uv]
        options: list[tuple[str, str]] = []
        for word, constraint in files:
            more, own = self._file(word, where, constraint=constraint)
            wanted += more
            options += own
        provided = {one.name for one in wanted} & {"uv", "poetry", "ninja", "cmake"}
        self._provide(frozenset(provided))
        if wanted:
            self._resolve(wanted, where, str(install.command), environment, install, options)

    def _synced(self, install: PipInstall, where: Where, extras: list[str], groups: list[str]) -> list[Wanted]:
        folder = self._context_folder(".")
        folder = "." if folder is None else folder
        lock = posixpath.normpath(posixpath.join(folder, "uv.lock"))
        options = [f"--{name}={value}" for name in ("extra", "group", "only-group", "no-group")
                   for value in install.arguments.values(f"--{name}")]  # fmt: skip
        options += [name for name in ("--no-dev", "--all-extras", "--no-default-groups") if install.arguments.has(name)]
        try:
            if lock in self.texts.files and posixpath.normpath(posixpath.join(folder, "pyproject.toml")) in self.texts.files:
                return locked_requirements(self.texts.files, folder, options, find_uv())
            default = [] if install.arguments.has("--no-dev", "--no-default-groups") else ["dev"]
            return project_requirements(self.texts.files, folder, extras, [*groups, *default])
        except NotUnderstood as error:
            self.trace.unknown.append(f"{where}: {error}")
            return []

    def _wanted(self, word: Word, install: PipInstall, where: Where, *, editable: bool = False) -> list[Wanted]:
        place = Place(install.command.file, word.line)
        if "$" in word:
            self.trace.unknown.append(f"{where}: {word}: its value is not known before the build")
            return []
        path, _, extra = str(word).partition("[")
        extras = [one.strip() for one in extra.rstrip("]").split(",") if one.strip()]
        is_path = path in (".", "..") or path.startswith(("./", "../", "/", "file:")) or (editable and "+" not in path)
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        if path.endswith(".whl") and "://" not in path:
            wheel = wheel_of(path)
            return [wanted_of(path, place)] if wheel else []
        if not is_path and not (absolute in self.state.folders and "/" in path):
            return [wanted_of(str(word), place)]
        source = self.state.folders.get(absolute) or next(
            (self.state.folders[one] for one in self.state.folders if absolute.startswith(one.rstrip("/") + "/")
             and self.state.folders[one].startswith("git+")), None)  # fmt: skip
        if source and source.startswith("git+"):
            return [wanted_of(f"{_project_name(source)} @ {source}", place)]
        folder = self._context_folder(path)
        try:
            if folder is None:
                raise NotUnderstood(f"{path} is not in the context")
            return project_requirements(self.texts.files, folder, extras)
        except NotUnderstood as error:
            self.trace.unknown.append(f"{where}: {error}")
            return []

    def _file(self, word: Word, where: Where, *, constraint: bool) -> tuple[list[Wanted], list[tuple[str, str]]]:
        absolute = posixpath.normpath(posixpath.join(self.cwd, word))
        if absolute in self.inline:
            text, first = self.inline[absolute]
            parsed = parse_requirements("inline", {"inline": text}, constraint=constraint)
            wanted = [replace(one, place=Place(self.texts.name, first + one.place.line - 1)) for one in parsed.wanted]
            return wanted, [(option, value) for option, value, _ in parsed.options]
        path = self._context_file(word)
        if path is None:
            self.trace.unknown.append(f"{where}: {word} is not in the context, so what it asks for is not checked")
            return [], []
        if path.endswith("pyproject.toml"):
            try:
                return project_requirements(self.texts.files, posixpath.dirname(path) or "."), []
            except NotUnderstood as error:
                self.trace.unknown.append(f"{where}: {error}")
                return [], []
        parsed = parse_requirements(path, self.texts.files, constraint=constraint)
        for name, place in parsed.missing:
            self.trace.unknown.append(f"{place}: {name} is not in the context")
        wanted = []
        for one in parsed.wanted:
            if one.requirement is None and one.url in (".", "-e ."):
                try:
                    wanted += project_requirements(self.texts.files, posixpath.dirname(path) or ".")
                except NotUnderstood as error:
                    self.trace.unknown.append(f"{place}: {error}" if parsed.missing else f"{path}: {error}")
            else:
                wanted.append(one)
        return wanted, [(option, value) for option, value, _ in parsed.options]

    def _resolve(
        self,
        wanted: list[Wanted],
        where: Where,
        text: str,
        environment: Environment,
        install: PipInstall,
        file_options: Sequence[tuple[str, str]] = (),
    ) -> None:
        before = dict(environment.packages)
        wanted = [one for one in wanted if _applies(one, environment.python or DEFAULT_PYTHON, self.node.platform)]
        requirements: list[str] = []
        constraints: list[str] = []
        stubs: list[Stub] = []
        for one in wanted:
            if one.requirement is None or one.url:
                stubs += self._by_address(one, where, environment, install, text, requirements)
            elif one.constraint:
                constraints.append(_plain(one.requirement))
            else:
                requirements.append(_plain(one.requirement))
        arguments = install.arguments
        indexes, extra = self._indexes(install, file_options)
        named = {one.name for one in wanted}
        fresh = arguments.has("--force-reinstall", "--ignore-installed", "-I") or arguments.values("--upgrade-strategy") == ("eager",)
        upgraded = named if arguments.has("--upgrade") else {str(one) for one in arguments.values("--upgrade-package")}
        held = {} if fresh else {name: package for name, package in before.items() if name not in upgraded and package.version}
        stubs += [Stub(name, package.version or "") for name, package in held.items() if _not_on_an_index(package)]
        if self.state.base.family == "nvidia-torch" and environment.prefix == SYSTEM and not install.by_uv:
            constraints += [f"torch=={before['torch'].version}"] if "torch" in before else []  # its own PIP_CONSTRAINT
        constraints += [f"{name}>={package.public}" for name, package in held.items() if re.search(r"\d(a|b|rc)\d", package.public)]
        question = Question(
            requirements=tuple(requirements),
            constraints=tuple(constraints),
            python=environment.python or DEFAULT_PYTHON,
            platform=self.node.platform,
            glibc=facts()["systems"].get(self.state.system or "", {}).get("glibc", Question.glibc),
            index=indexes,
            extra_indexes=tuple(extra),
            held=tuple(sorted((name, package.version or "") for name, package in held.items())),
            stubs=tuple(dict.fromkeys(stubs)),
            by_uv=install.by_uv,
            no_deps=arguments.has("--no-deps"),
            prereleases=arguments.has("--pre"),
        )
        answer = self.index.resolve(question) if requirements else Answer()
        self.trace.assumed += answer.notes
        self.trace.unknown += [f"{where}: {one}" for one in answer.unknown]
        if answer.trouble and not answer.checked:
            self.trace.unknown.append(f"{where}: {answer.trouble.splitlines()[-1][:160]}")
        by_name = {one.name: one for one in wanted if not one.constraint}
        for found in answer.packages:
            asked = by_name.get(found.name)
            old = before.get(found.name)
            if old and old.version == found.version and not fresh:
                continue
            cause = replace(where, cause=asked.place if asked else where.cause)
            environment.packages[found.name] = Package(
                found.name,
                found.version,
                cause,
                pinned=bool(asked and asked.pin),
                wheel=found.wheel,
                url=found.url,
                uploaded=found.uploaded,
                cuda=self._cuda_of(found.name, found.version, environment),
                compiled=None if found.wheel else self._compiled(install, environment, before, text),
            )
        if answer.trouble:  # what was asked for by version is there as far as the rules are concerned
            for one in by_name.values():
                if one.pin and one.requirement:
                    environment.packages[one.name] = Package(
                        one.name, one.pin, replace(where, cause=one.place), pinned=True,
                        wheel="", cuda=self._cuda_of(one.name, one.pin, environment))  # fmt: skip
        options = frozenset(arguments.options)
        self._record(where, text, before, environment, wanted, answer, (indexes or "", *extra), options, install.by_uv)

    def _by_address(
        self, one: Wanted, where: Where, environment: Environment, install: PipInstall, text: str, requirements: list[str]
    ) -> list[Stub]:
        """A wheel or a repository that is named by its address: no index is asked for it, but the rest must fit."""
        cause = replace(where, cause=one.place)
        wheel = wheel_of(one.url or one.text)
        if wheel:
            name, version = canonicalize_name(wheel[0]), str(wheel[1])
            file = re.split(r"[/\\]", (one.url or one.text).split("#")[0])[-1].replace("%2B", "+")
            environment.packages[name] = Package(name, version, cause, pinned=True, wheel=file, url=one.url,
                                                 cuda=self._cuda_of(name, version, environment))  # fmt: skip
            self.trace.unknown.append(f"{cause}: {file}: what this wheel requires is not checked")
            requirements.append(f"{name}=={version}")
            return [Stub(name, version)]
        address = one.url or one.text
        if address.startswith("git+") or "git+" in one.text:
            if self.state.programs is not None and "git" not in self.state.programs and environment.prefix == SYSTEM:
                self._miss("git", install.command)
        tagged = re.search(r"@v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)(?:#.*)?$", address)
        known = one.name in facts()["builds_against_torch"]["names"]
        if tagged and not known:
            requirements.append(f"{one.name}=={tagged[1]}")
            self.trace.assumed.append(f"{cause}: {one.name} of its repository is taken to be release {tagged[1]}")
            return []
        self.trace.unknown.append(f"{cause}: {address[:100]}: what it requires is known when it is fetched")
        self._built(one.name, tagged[1] if tagged else None, cause, text, environment=environment,
                    isolated=not install.arguments.has("--no-build-isolation"), install=install)  # fmt: skip
        return []

    def _built(
        self,
        name: str,
        version: str | None,
        where: Where,
        text: str,
        *,
        isolated: bool,
        environment: Environment | None = None,
        install: PipInstall | None = None,
    ) -> None:
        place = environment or self._environment("")
        before = dict(place.packages)
        compiled = self._compiled(install, place, before, text) if install else Compiled(
            isolated, before.get("torch"), self.state.nvcc, self.state.nvcc_known, self.state.programs,
            dict(self.state.variables), text)  # fmt: skip
        place.packages[name] = Package(name, version, where, compiled=compiled)
        if environment is None:
            self._record(where, text, before, place)

    def _compiled(
        self, install: PipInstall, environment: Environment, before: Mapping[str, Package], text: str
    ) -> Compiled:
        variables = {**self.state.variables, **install.command.variables}
        isolated = not install.arguments.has("--no-build-isolation", "--no-build-isolation-package")
        isolated = isolated and variables.get("PIP_NO_BUILD_ISOLATION", "") == "" and not variables.get("UV_NO_BUILD_ISOLATION")
        if environment.prefix == SYSTEM and environment.packages is self.state.environments[SYSTEM].packages:
            torch = before.get("torch")
        else:
            torch = before.get("torch")
        return Compiled(isolated, torch, self.state.nvcc, self.state.nvcc_known, self.state.programs, variables, text)

    def _cuda_of(self, name: str, version: str, environment: Environment) -> str | None:
        if name not in ("torch", "torchvision", "torchaudio"):
            return None
        if name == "torch":
            return torch_cuda(version, self.node.platform)
        local = version.partition("+")[2]
        if local:
            return torch_cuda(f"0+{local}", self.node.platform)
        torch = environment.packages.get("torch")
        return torch_cuda(torch.public, self.node.platform) if torch and torch.version else None

    def _indexes(self, install: PipInstall, file_options: Sequence[tuple[str, str]]) -> tuple[str | None, list[str]]:
        variables = {**self.state.variables, **install.command.variables}
        names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL") if install.by_uv else ("PIP_INDEX_URL",)
        index = next((variables[name] for name in names if variables.get(name)), None)
        extras = ("UV_INDEX", "UV_EXTRA_INDEX_URL") if install.by_uv else ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
        extra = [url for name in extras for url in variables.get(name, "").split()]
        values = install.arguments.values("--index-url", "--default-index")
        index = str(values[-1]) if values else index
        extra += [str(one) for one in install.arguments.values("--extra-index-url", "--index", "--find-links")]
        for option, value in file_options:
            if option in ("--index-url", "-i"):
                index = value
            elif option in ("--extra-index-url", "--find-links", "-f"):
                extra.append(value)
        for backend in (*install.arguments.values("--torch-backend"), variables.get("UV_TORCH_BACKEND", "")):
            if re.fullmatch(r"cu\d+|cpu", backend):
                extra.append(f"{facts()['torch_index']['url']}{backend}")
        plain = [url.partition("=")[2] if re.match(r"[\w-]+=http", url) else url for url in extra]
        return index, [url for url in dict.fromkeys(plain) if not url.startswith(("/", "./", "file:"))]

    # Where things are

    def _where(self, line: int, command: Command | None = None) -> Where:
        cause = Place(command.file if command else self.texts.name, line)
        outside = command is not None and command.file != self.texts.name
        place = Place(self.texts.name, self.instruction.first if outside else line)
        return Where(place, cause, self.instruction.first, self.instruction.last)

    def _environment(self, interpreter: str, install: PipInstall | None = None) -> Environment:
        """The environment that a pip installs into, by its path, its version, and what is active."""
        state = self.state
        variables = {**state.variables, **(install.command.variables if install else {})}
        if install and install.by_uv:
            return self._uv_environment(install, interpreter, variables)
        folder = posixpath.normpath(posixpath.join(self.cwd, posixpath.dirname(interpreter), ".."))
        if "/" in interpreter and folder in state.environments:
            return state.environments[folder]
        name = self.active or state.active
        version = _version_in(posixpath.basename(interpreter))
        environment = state.environments[name]
        if version and environment.python and version != environment.python and name == SYSTEM:
            own = f"python{version}"
            if own not in state.environments:
                state.environments[own] = Environment(own, version, f"/usr/bin/python{version}", False)
            return state.environments[own]
        return environment

    def _uv_environment(self, install: PipInstall, interpreter: str, variables: Mapping[str, str]) -> Environment:
        state = self.state
        folder = posixpath.normpath(posixpath.join(self.cwd, interpreter))
        for candidate in (folder, posixpath.dirname(posixpath.dirname(folder))):
            if interpreter and candidate in state.environments:
                return state.environments[candidate]
        if install.arguments.has("--system") or variables.get("UV_SYSTEM_PYTHON") in ("1", "true"):
            return state.environments[SYSTEM]
        prefix = variables.get("VIRTUAL_ENV") or ""
        if install.verb in ("sync", "add"):
            prefix = variables.get("UV_PROJECT_ENVIRONMENT") or posixpath.join(self.cwd, ".venv")
            prefix = posixpath.normpath(posixpath.join(self.cwd, prefix))
            if prefix in ("/usr/local", "/usr"):
                return state.environments[SYSTEM]
            if prefix not in state.environments:
                folder_ = self._context_folder(".") or "."
                asked = _version_in(interpreter) or _version_in(variables.get("UV_PYTHON", ""))
                pinned = self.texts.files.get(posixpath.normpath(posixpath.join(folder_, ".python-version")), "")
                needs = python_of_project(self.texts.files, folder_) or ""
                exact = re.search(r"==\s*(3\.\d+)", needs)
                self._new_uv_environment(prefix, asked or _version_in(pinned) or (exact[1] if exact else None))
        if posixpath.normpath(prefix or "-") in state.environments:
            return state.environments[posixpath.normpath(prefix)]
        local = posixpath.normpath(posixpath.join(self.cwd, ".venv"))
        if self.active is None and state.active == SYSTEM and local in state.environments:
            return state.environments[local]
        return state.environments[self.active or state.active]

    def _context_file(self, path: str) -> str | None:
        """The file of the context that a path in the image was copied from."""
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        best: str | None = None
        for folder, source in self.state.folders.items():
            if source.startswith("git+"):
                continue
            if absolute == folder and source in self.texts.files:
                return source
            if absolute.startswith(folder.rstrip("/") + "/"):
                inside = posixpath.normpath(posixpath.join(source, absolute[len(folder.rstrip("/")) + 1 :]))
                best = inside if inside in self.texts.files else best
        if best:
            return best
        plain = posixpath.normpath(str(path).lstrip("/"))
        if plain in self.texts.files:  # a bind mount, or a copy that was not understood
            return plain
        same = [one for one in self.texts.files if posixpath.basename(one) == posixpath.basename(plain)]
        return same[0] if len(same) == 1 else None

    def _context_folder(self, path: str) -> str | None:
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        for folder, source in sorted(self.state.folders.items(), key=lambda one: -len(one[0])):
            if source.startswith("git+"):
                continue
            if absolute == folder or absolute.startswith(folder.rstrip("/") + "/"):
                inside = posixpath.normpath(posixpath.join(source, absolute[len(folder.rstrip("/")) + 1 :]))
                if source in self.texts.files:
                    continue
                return inside
        # Single files were copied into it: the folder of the context that they came from.
        inside_ = [posixpath.dirname(source) or "." for folder, source in self.state.folders.items()
                   if posixpath.dirname(folder) == absolute and posixpath.basename(source) in
                   ("pyproject.toml", "setup.py", "setup.cfg", "uv.lock")]  # fmt: skip
        if inside_:
            return inside_[0]
        return "." if absolute == self.cwd and "pyproject.toml" in self.texts.files else None

    def _record(
        self,
        where: Where,
        text: str,
        before: Mapping[str, Package],
        environment: Environment,
        wanted: Sequence[Wanted] = (),
        answer: Answer | None = None,
        index: Sequence[str] = (),
        options: frozenset[str] = frozenset(),
        by_uv: bool = False,
        kind: str = "pip",
    ) -> None:
        self.trace.steps.append(
            Step(where, len(self.trace.states) - 1, text, dict(before), dict(environment.packages), environment,
                 tuple(wanted), answer or Answer(), kind, tuple(one for one in index if one), options, by_uv)
        )  # fmt: skip


def _applies(wanted: Wanted, python: str, platform: str) -> bool:
    """Whether the marker of a requirement is true in the image."""
    marker = wanted.requirement.marker if wanted.requirement else None
    machine = "x86_64" if platform == "linux/amd64" else "aarch64"
    environment = {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": machine,
                   "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
                   "platform_python_implementation": "CPython", "implementation_name": "cpython", "extra": ""}  # fmt: skip
    return marker is None or marker.evaluate(environment)


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _not_on_an_index(package: Package) -> bool:
    return "+" in (package.version or "") or package.origin != "pip" or package.wheel is None


def _version_in(text: str) -> str | None:
    found = re.search(r"(3\.\d+)", text)
    return found[1] if found else None


def _project_name(source: str) -> str:
    """apex of git+https://github.com/NVIDIA/apex.git@24.04"""
    address = re.sub(r"@[\w.-]+$", "", source.split("#")[0])
    name = address.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    return {"flash-attention": "flash-attn", "TransformerEngine": "transformer-engine"}.get(name, canonicalize_name(name))


def _no_arguments() -> "object":
    from windlass.image.read.installs import Arguments

    return Arguments(())


__all__ = ["walk", "torch_tag", "Base"]
