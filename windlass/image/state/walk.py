"""Walk a Dockerfile step by step and keep what is installed after each, by resolving what every command asks for."""

from __future__ import annotations

import configparser
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from packaging.utils import canonicalize_name
from packaging.version import Version

from windlass.image.facts.bases import Base, base_of
from windlass.image.facts.node import Node
from windlass.image.facts.table import facts, minor
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
    PYTHON,
    Arguments,
    PipInstall,
    apt_packages,
    conda_install,
    pip_install,
    pip_uninstall,
)
from windlass.image.read.project import project_requirements
from windlass.image.read.requirements import Place
from windlass.image.read.shell import SHELLS, Command, run_commands, script_commands
from windlass.image.read.texts import Texts
from windlass.image.state.conda import CondaInstaller
from windlass.image.state.environments import DEFAULT_PYTHON, version_in
from windlass.image.state.files import KNOWN
from windlass.image.state.model import SYSTEM, Environment, Package, State, Trace, Where
from windlass.image.state.resolver import Found, Index, Question

INSTALL_NOTHING = (
    *("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "VOLUME", "HEALTHCHECK", "SHELL", "STOPSIGNAL", "MAINTAINER", "FROM"),
)
CHANGE_NOTHING = ("echo", "printf", "exit", "true", "false", "set", "test", "[[", ":", "cat", "ls", "sleep", "break")
OTHER_ARCHIVES = re.compile(  # commands after which apt has more than the archive of the system
    r"/sources\.list|\.sources\b|apt-add|apt-key|/setup_|keyring|\.deb\b|nodesource|packagecloud|ppa:(?!deadsnakes)"
)
BY_SCRIPT = {"get-pip.py": "pip", "rustup": "cargo", "astral.sh/uv": "uv", "iniconda": "conda", "iniforge": "conda"}


# What base images of a family set themselves: the ENV lines of docker-library/python and of NVIDIA's cuda images.
BASE_VARIABLES = {
    "system": re.compile(r"PATH$"),
    "python": re.compile(r"(PATH|LANG|GPG_KEY|PYTHON_\w+)$"),
    "cuda": re.compile(r"(PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CUDA_VERSION|NCCL_VERSION|NVARCH|NV_\w+|NVIDIA_\w+)$"),
}


def walk(
    texts: Texts,
    node: Node,
    index: Index,
    *,
    arguments: Mapping[str, str] | None = None,
    target: str | None = None,
    guarded: bool = True,
) -> Trace:
    """`guarded`: whether the commands are run of which a condition or `||` decides, and nobody knows how."""
    dockerfile = parse_dockerfile(texts.dockerfile or "", arguments)
    walker = _Walker(texts, node, index, dockerfile, dict(arguments or {}))
    walker.runs_guarded = guarded
    final = dockerfile.stage(target)
    if final is None:
        return Trace([], unknown=[f"there is no stage {target}" if dockerfile.stages else "there is no FROM"])
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
        for instruction in stage.instructions:
            sources = [
                instruction.flags.get("from"),
                *re.findall(r"from=([\w.-]+)", instruction.flags.get("mount", "")),
            ]
            waiting += [found.number for name in sources if name and (found := dockerfile.stage(name))]
    return frozenset(used)


def _users_of(base: Base) -> dict[str, str]:
    own = {"ubuntu": "1000"} if base.system == "ubuntu24.04" else {}
    own |= {"ubuntu": ""} if base.family == "torch" else {}  # the newest of them may be 24.04
    return {**dict.fromkeys(facts()["users"]["names"], ""), "root": "0", **own}


def _cuda_version(base: Base) -> dict[str, str]:
    """CUDA_VERSION of NVIDIA's images and of those made from them; a $ stands for digits that a tag leaves out."""
    if base.repository.endswith("nvidia/cuda"):
        version = re.match(r"\d+\.\d+\.\d+", base.tag or "")
        return {"CUDA_VERSION": version[0]} if version else {}
    if base.cuda and base.cuda != "cpu" and base.repository.endswith(("nvidia/cuda-dl-base", "nvidia/pytorch")):
        return {"CUDA_VERSION": f"{base.cuda}.$PATCH.$BUILD"}  # 13.4.0.012
    if base.cuda and base.repository == "pytorch/pytorch" and base.has_nvcc:
        return {"CUDA_VERSION": f"{base.cuda}.$PATCH"}
    return {}


class _Walker(CondaInstaller):
    runs_guarded = True

    # Stages and instructions

    def stage(self, stage: Stage, *, skip: bool) -> None:
        if stage.parent is not None:
            self.state = self.trace.states[stage.parent].copy()
        else:
            self.state = self._start(stage, quiet=skip)
        self.trace.states.append(self.state)
        if skip:
            return
        platform = self.node.platform
        given = {**PREDEFINED, "TARGETPLATFORM": platform, "TARGETARCH": platform.rpartition("/")[2]}
        for argument in self.dockerfile.instructions:
            if argument.stage == -1 and argument.keyword == "ARG":
                given.update(assignments(argument.text, given))
        self.before_from = given.keys() - PREDEFINED.keys()
        given |= self.arguments
        self._check_context()
        for instruction in stage.instructions:
            self.instruction = instruction
            self._instruction(instruction, given)
        if stage.number == self.trace.final_stage:
            self._check_start()

    def _start(self, stage: Stage, *, quiet: bool) -> State:
        self.instruction = stage.start
        words = stage.start.words.split()
        if not quiet and (len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS")):
            self._fail(
                "syntax", f"FROM takes an image, or an image AS a name, and not {stage.start.words}", stage.start.first
            )
        base = base_of(stage.image)
        where = Where(
            Place(self.texts.name, stage.start.first),
            Place(self.texts.name, stage.start.first),
            stage.start.first,
            stage.start.last,
        )
        if "$" in stage.image and not quiet:
            self.trace.unknown.append(f"{where}: {stage.image}: an ARG has no value; give it by --build-arg")
        elif base.family is None and not quiet and base.image != "scratch":
            self.trace.unknown.append(
                f"{where}: the base image {base.image} is not known: what it brings is not checked"
            )
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
        if base.installs and not quiet:
            answer = self.index.resolve(Question((base.installs,), python=python or DEFAULT_PYTHON))
            packages = {
                found.name: Package(
                    found.name,
                    found.version,
                    where,
                    "base",
                    False,
                    found.wheel,
                    found.url,
                    found.uploaded,
                    self._cuda_of(found.name, found.version, None),
                )
                for found in answer.packages or [Found(*base.installs.split("=="))]
            }
        managed = bool(known.get("managed")) and not own and base.family != "nvidia-torch"
        if base.repository == "pytorch/pytorch" and base.torch:
            managed = bool(facts()["pytorch_images"]["managed"].get(minor(base.torch)))
        environment = Environment(SYSTEM, python, interpreter, managed, packages)
        environment.unseeded = base.family == "python" and Version(python or "3") >= Version("3.12")
        if base.family in ("cuda", "system"):
            environment.pip = known.get("pip")
        elif base.family == "python":
            environment.pip = facts()["pip_of_python"].get(python)
        return State(
            base=base,
            platform=self.node.platform,
            environments={SYSTEM: environment},
            active=SYSTEM,
            system=base.system,
            nvcc=base.cuda if base.has_nvcc else None,
            nvcc_known=base.has_nvcc is not None,
            programs=base.programs if base.family in KNOWN or base.repository == "pytorch/pytorch" else None,
            brought=set(facts()["programs"]["bases"].get(base.family or "", ())),
            users=_users_of(base) if base.family in (*KNOWN, "torch") and not base.alpine else None,
            groups={"ubuntu": "1000"} if base.system == "ubuntu24.04" else {},
            interpreters=frozenset({interpreter} if python and base.family not in ("cuda", "system") else ()),
            variables=_cuda_version(base),
            workdir="/workspace" if base.repository.endswith(("pytorch/pytorch", "nvidia/pytorch")) else "/",
        )

    def _instruction(self, one: Instruction, given: Mapping[str, str]) -> None:
        state = self.state
        if any(not heredoc.ends for heredoc in one.heredocs):
            self._fail("syntax", "the file ends before the heredoc that begins here does", one.first)
        if one.keyword == "ENV":
            values, written = assignments(one.text, state.variables), assignments(one.text, {})
            state.variables.update(values)
            for name in values:
                argument = re.fullmatch(r"\$\{?(\w+)\}?", written.get(name, ""))
                default = state.defaults.get(argument[1]) if argument else None
                where = self._where(one.first)
                state.exported[name] = replace(where, cause=default) if default else where
            self._activate_by_path()
        elif one.keyword == "ARG":
            for name, value in assignments(one.text, {**given, **state.variables}).items():
                state.variables.setdefault(name, value)
                state.defaults[name] = Place(self.texts.name, one.first)
                if name in self.arguments:
                    state.variables[name] = self.arguments[name]
            for name in one.words.split():
                if "=" not in name and name in given:
                    state.variables.setdefault(name, given[name])
        elif one.keyword == "WORKDIR":
            state.workdir = posixpath.normpath(
                posixpath.join(state.workdir, substitute(one.words, state.variables).strip("\"'"))
            )
            state.owners.setdefault(state.workdir, state.user.split(":")[0])
        elif one.keyword == "USER":
            state.user = substitute(one.words, state.variables)
            self._check_user(one.words, one.first)
        elif one.keyword == "SHELL":
            shells = re.findall(r"\b(bash|zsh|sh|ash|dash|pwsh|cmd)\b", one.words)
            state.shell, state.login = (shells or ["?"])[-1], "--login" in one.words or '"-l' in one.words
            if found := re.search(r'run".*"-n", *"([^"]+)"', one.words):  # conda run -n NAME
                state.active = found[1] if found[1] in state.environments else state.active
        elif one.keyword in ("COPY", "ADD"):
            self._copy(one)
        elif one.keyword in ("CMD", "ENTRYPOINT"):
            state.started[one.keyword] = tuple(run_commands(one, self.texts.name, state.variables))
        elif one.keyword == "RUN":
            self.cwd, self.active = state.workdir, None
            self._note_empty_arguments(one)
            self._check_shell(one)
            self._check_lost(one)
            for command in run_commands(one, self.texts.name, state.variables, state.shell):
                self._command(command)
        elif one.keyword == "ONBUILD":
            self.trace.unknown.append(f"{self._where(one.first)}: ONBUILD runs in images that are built on this one")
        elif one.keyword not in INSTALL_NOTHING:
            self._fail(
                "syntax",
                f"{one.keyword[:20]} is no instruction of a Dockerfile: the line before it may lack its \\",
                one.first,
            )
        if one.keyword in ("CMD", "ENTRYPOINT", "RUN", "SHELL") and re.match(r"\['|\[\s*'", one.text):
            self._fail(
                "syntax",
                f"{one.keyword} [ … ] is JSON with double quotes alone; with others it is a command "
                "of the shell, which finds no such program",
                one.first,
            )

    def _note_empty_arguments(self, run: Instruction) -> None:
        """The ARGs before FROM that a RUN reads though its stage has not declared them again."""
        written = set(re.findall(r"\b(\w+)=", run.text)) | set(re.findall(r"\b(?:for|read) (\w+)", run.text))
        family = self.state.base.family
        if family not in BASE_VARIABLES:
            return  # the base image may set them, as NVIDIA's and torch's do
        own = {name for name in self.before_from if BASE_VARIABLES[family].match(name)}
        empty = self.before_from - self.state.variables.keys() - written - own
        lines = (self.texts.dockerfile or "").splitlines()
        for line in range(run.first, run.last + 1):
            for braced, plain in re.findall(r"\$(?:\{(\w+)\}|(\w+))", lines[line - 1]):
                if (name := braced or plain) in empty:
                    self.trace.empty.setdefault(name, self._where(line))

    def _copy(self, one: Instruction) -> None:
        state = self.state
        try:
            words = [str(word) for word in json.loads(one.text)] if one.text.startswith("[") else one.words.split()
        except ValueError:
            words = one.words.split()
        words = [substitute(word, state.variables) for word in words if not word.startswith("<<")]
        if one.heredocs and words:
            if posixpath.basename(words[-1]) == "pip.conf":
                self._configure_pip(one.heredocs[0].text)
            self.inline[posixpath.join(state.workdir, words[-1])] = (one.heredocs[0].text, one.heredocs[0].first)
            return
        if len(words) < 2:
            return
        *sources, destination = words
        target = posixpath.join(state.workdir, destination)
        source_stage = one.flags.get("from")
        owner = one.flags.get("chown", "0").split(":")[0]
        if not owner.isdigit() and "$" not in owner:
            self._check_user(owner, one.first)
        state.owners[posixpath.normpath(target)] = "root" if owner == "0" else owner
        self._provide({posixpath.basename(source) for source in sources if "/bin" in f"{source} {target}"})
        if one.keyword == "ADD" and any(re.search(r"://|\.(tar|tgz|txz|tbz)", source) for source in sources):
            state.opaque.add(posixpath.normpath(target))
        if source_stage is None:
            self._check_copied(one, sources, destination)
            for source in sources:
                plain = posixpath.normpath(source.lstrip("/")) if source not in (".", "./", "/") else "."
                into = target.endswith("/") or len(sources) > 1 or destination in (".", "./")
                folder = any(name.startswith(f"{plain}/") for name in self.texts.files)
                is_file = plain in self.texts.files or (not folder and "." in posixpath.basename(plain).strip("."))
                path = posixpath.normpath(
                    posixpath.join(target, posixpath.basename(plain)) if is_file and into else target
                )
                state.folders[path] = plain
                if posixpath.basename(path) == "pip.conf":
                    self._configure_pip(self.texts.files.get(plain))
            return
        stage = self.dockerfile.stage(source_stage)
        stage = stage if stage and stage.number < one.stage else None
        state.opaque.add(posixpath.normpath(target))
        state.wheels |= self.trace.states[stage.number].wheels if stage else {}
        if stage is None and not self._check_stage(source_stage, one):
            return
        if stage is None:
            if re.search(r"astral-sh/uv", source_stage):
                self._provide({"uv"})
            elif not re.search(r"[/:.$]", source_stage) and source_stage not in facts()["programs"]["images"]:
                self.trace.unknown.append(
                    f"{self._where(one.first)}: no stage is called {source_stage}: an image of that name is not checked"
                )
            return
        other = self.trace.states[stage.number]
        if other.efa and any(f"{one.rstrip('/')}/".startswith("/opt/amazon/") for one in sources):
            state.efa, state.efa_where, state.efa_copied = other.efa, self._where(one.first), True
        for source in sources:
            plain = posixpath.normpath(posixpath.join("/", re.sub(r"/\*(\.whl)?$", "", source)))
            state.wheelhouses |= {
                posixpath.normpath(target + folder.removeprefix(plain)): packages
                for folder, packages in other.wheelhouses.items()
                if folder == plain or folder.startswith(f"{plain}/")
            }
            self._check_other(other, source, one)
            self._copy_environment(other, posixpath.normpath(source), posixpath.normpath(target), one)

    def _copy_environment(self, other: State, source: str, target: str, one: Instruction) -> None:
        state, where = self.state, self._where(one.first)
        within = source.rstrip("/") + "/"
        state.interpreters |= {
            target + interpreter.removeprefix(source)
            for interpreter in other.interpreters
            if interpreter.startswith(within)
        }
        site = re.fullmatch(r"(.*)/lib/python(3\.\d+)(?:/(?:site|dist)-packages)?", source)
        for prefix, environment in other.environments.items():
            whole = source in ("/usr/local", "/usr", "/usr/local/lib")
            overlaid = any(folder == source or folder.startswith(within) for folder in other.overlays)
            in_system = prefix == SYSTEM and (bool(site) or whole or overlaid)
            below = prefix != SYSTEM and (prefix == source or prefix.startswith(source.rstrip("/") + "/"))
            if not (in_system or below):
                continue
            own = SYSTEM if in_system else target + prefix.removeprefix(source)
            copied = Environment(
                own,
                environment.python,
                environment.interpreter,
                environment.managed,
                dict(environment.packages),
                one.flags.get("chown", "root"),
                scripts=environment.scripts or prefix if below else "",
                moved=where,
            )
            if in_system and SYSTEM in state.environments:
                self.trace.copied.append((environment, state.copy(), where))
                state.environments[SYSTEM].packages.update(copied.packages)
            else:
                state.environments[own] = copied
                self.trace.copied.append((copied, state.copy(), where))
            self._activate_by_path()

    # Commands

    def _command(self, command: Command) -> None:
        if not command.certain and command.program not in CHANGE_NOTHING:
            self.trace.guarded = True
            where = self._where(command.words[0].line, command)
            if pip_install(command) or conda_install(command) or apt_packages(command) or pip_uninstall(command):
                first = Place(where.place.file, where.first)
                self.trace.unknown.append(f"{first}: a condition or || decides what this step installs")
        if command.certain or self.runs_guarded:
            self._run(command)
        else:
            self._check_command(command)
        self._mention(command)

    def _run(self, command: Command) -> None:
        self._check_command(command)
        self.piped = self.piped if command.after == "|" else str(command)
        self.state.other_archives |= bool(OTHER_ARCHIVES.search(str(command)))
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
            self._conda(
                conda.arguments.words, conda.files, conda.environment, command, conda.arguments.values("--channel")
            )
        else:
            self._other(command)

    def _other(self, command: Command) -> None:
        words, program = [str(word) for word in command.words], command.program
        if program == "cd" and len(words) > 1:
            self.cwd = posixpath.normpath(posixpath.join(self.cwd, words[1]))
        elif program == "git" and "clone" in words:
            self._clone(words)
        elif program == "add-apt-repository":
            self.state.listed = True
            self.state.apt |= {word: self._where(command.words[0].line, command) for word in words[1:]}
        elif program in ("source", ".") and len(words) > 1 and words[1].endswith("/bin/activate"):
            self._activate(posixpath.normpath(posixpath.join(self.cwd, words[1].removesuffix("/bin/activate"))))
        elif program in ("conda", "mamba", "micromamba", "source", ".") and words[1:2] == ["activate"] and words[2:]:
            self._activate(words[2])
        elif program in ("conda", "mamba", "micromamba") and len(words) > 3 and words[1] == "run":
            self._conda_run(command)
        elif (
            PYTHON.match(program) and words[1:3] in (["-m", "venv"], ["-m", "virtualenv"])
        ) or program == "virtualenv":
            self._venv(words, version_in(program), command)
        elif program == "uv" and words[1:2] == ["venv"]:
            self._uv_venv(words)
        elif program in ("poetry", "pdm") and "install" in words:
            self._poetry(command)
        elif PYTHON.match(program) and len(words) > 2 and re.search(r"(^|/)setup\w*\.py$", words[1]):
            self._setup_py(command, words)
        elif program in ("ln", "update-alternatives") and any("python" in word for word in words):
            self._link_python(words)
        elif program in ("ln", "update-alternatives") and (
            gcc := re.search(r"/(?:gcc|g\+\+)-(\d+)\b", " ".join(words))
        ):
            self.state.links["gcc"] = gcc[1]
        elif program == "rm" and any(word.startswith("/var/lib/apt/lists") for word in words):
            self.state.listed = False
        elif program in ("apt", "apt-get") and "update" in words:
            self._check_key(command)
            self.state.listed = True
        elif program in ("useradd", "adduser", "groupadd", "addgroup", "userdel", "deluser", "groupdel", "usermod"):
            self._users(command)
        elif program == "mkdir":
            self._make_folders(command)
        elif program in ("mv", "cp") and len(words) > 2:
            self._move_environments(command, words)
        elif program in ("apk", "yum", "dnf", "microdnf") and {"add", "install", "groupinstall"} & set(words):
            self._other_manager(words[1:])
        elif program in ("chown", "chmod") and len(words) > 2:
            self._own(words)
            for prefix, environment in self.state.environments.items():
                if any(prefix == one.rstrip("/") or prefix.startswith(one.rstrip("/") + "/") for one in words[2:]):
                    environment.owner = "given away"
        elif any("efa_installer.sh" in word for word in words[:2]):
            self._efa(command)
        elif program in SHELLS or words[0].endswith(".sh"):
            self._script(command)
        elif PYTHON.match(program) and re.search("get-pip|ensurepip", f"{command} {self.piped}"):
            self._pip_of(version_in(program) or self.state.links.get(program))
        elif program in ("pip", "poetry") or (program == "uv" and words[1:2] == ["python"]):
            self._configure(words)
        elif program in ("pixi", "pipenv", "pip-sync", "hatch", "rye", "spack", "easy_install"):
            self.trace.unknown.append(f"{self._where(command.words[0].line, command)}: what {program} installs")
        self._provide({program for part, program in BY_SCRIPT.items() if part in str(command)})
        self._put_away(command)
        if installer := re.search(r"aws-efa-installer-(latest|\d+\.\d+(?:\.\d+)?)\.tar", " ".join(words)):
            self.state.efa = installer[1]
            self.state.efa_where = self._where(command.words[0].line, command)
        if plugin := re.search(
            r"aws-ofi-nccl\S*?[-/]v?(\d+\.\d+\.\d+)|v(\d+\.\d+\.\d+)\S* .*aws-ofi-nccl", " ".join(words)
        ):
            self.state.ofi = (plugin[1] or plugin[2], self._where(command.words[0].line, command))
        prefix = next((word.partition("=")[2] for word in words if word.startswith("--prefix=")), "")
        if program == "configure" and prefix and any(word.startswith("--with-libfabric") for word in words):
            self.state.ofi_prefix = (posixpath.normpath(prefix), self._where(command.words[0].line, command))
        if runfile := re.search(r"cuda_(\d+\.\d+)\.\d+_\S*linux\S*\.run", " ".join(words)):
            self.state.nvcc, self.state.nvcc_known = runfile[1], True

    def _move_environments(self, command: Command, words: list[str]) -> None:
        """mv and cp of a folder take the environments in it along; their scripts keep the old path."""
        plain = [posixpath.normpath(posixpath.join(self.cwd, word)) for word in words[1:] if not word.startswith("-")]
        if len(plain) != 2 or words[-1].endswith("/"):
            return
        source, target = plain
        for prefix, environment in list(self.state.environments.items()):
            if prefix == source or prefix.startswith(f"{source}/"):
                own = target + prefix.removeprefix(source)
                where = self._where(command.words[0].line, command)
                made = replace(environment, prefix=own, scripts=environment.scripts or prefix, moved=where)
                self.state.environments[own] = made
                if words[0] == "mv":
                    del self.state.environments[prefix]
                    self.state.active = SYSTEM if self.state.active == prefix else self.state.active
        self._activate_by_path()

    def _efa(self, command: Command) -> None:
        self.state.efa_where = self._where(command.words[0].line, command)
        if not {"--skip-kmod", "-k"} & set(command.words):
            self._fail(
                "efa-kernel-module",
                "EFA's installer builds a module for the kernel of the machine that builds, whose headers an image "
                "does not have: --skip-kmod is missing; nodes bring the module",
                command,
                "replace",
                "efa_installer.sh",
                "efa_installer.sh --skip-kmod",
            )

    def _check_key(self, command: Command) -> None:
        """NVIDIA changed the key of its archive; older devel images of torch have the archive and the former key."""
        base, known = self.state.base, facts()["pytorch_images"]
        old = base.repository == "pytorch/pytorch" and "devel" in (base.tag or "") and base.torch
        told = re.search(r"3bf863cc|cuda-keyring|sources\.list\.d|apt-key|allow-unauth", self._so_far(command))
        if old and Version(base.torch or "0") < Version(known["old_key_before"]) and not told:
            self._fail(
                "missing-package",
                f"apt-get update fails: {base.image} asks NVIDIA's archive, whose key has changed since it was made",
                command,
                "before",
                "RUN rm -f /etc/apt/sources.list.d/cuda.list /etc/apt/sources.list.d/nvidia-ml.list",
            )

    def _so_far(self, command: Command) -> str:
        """The text of the stage up to a command."""
        lines = (self.texts.dockerfile or "").splitlines()
        return "\n".join(lines[: command.words[0].line])

    def _configure(self, words: list[str]) -> None:
        if words[:2] == ["poetry", "config"]:
            plain = [word for word in words[2:] if not word.startswith("-")]
            if len(plain) > 1:
                self.state.variables["POETRY_" + plain[0].upper().replace(".", "_").replace("-", "_")] = plain[1]
        elif words[1:3] == ["config", "set"] and len(words) > 4:
            name = "PIP_" + words[3].rpartition(".")[2].upper().replace("-", "_")
            self.state.variables[name] = words[4]
        elif words[1:3] == ["python", "install"] and len(words) > 3 and (found := version_in(words[3])):
            self.state.variables.setdefault("UV_PYTHON", found)
            self.state.interpreters |= {f"{self._uv_pythons()}/{found}"}

    def _configure_pip(self, text: str | None) -> None:
        """A pip.conf says the same as pip's variables, which go before it."""
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text or "")
        except configparser.Error as error:
            self.trace.unknown.append(f"{self._where(self.instruction.first)}: pip.conf: {str(error).splitlines()[0]}")
            return
        for section in ("install", "global"):
            for name, value in parser.items(section) if parser.has_section(section) else ():
                self.state.variables.setdefault("PIP_" + name.upper().replace("-", "_"), " ".join(value.split()))

    def _conda_run(self, command: Command) -> None:
        words = list(command.words)
        at = next((n for n, word in enumerate(words) if word in ("-n", "-p", "--name")), None)
        before = self.active
        if at is not None and len(words) > at + 2:
            self._activate(str(words[at + 1]))
            rest = [word for word in words[at + 2 :] if not word.startswith("--")]
            self._command(replace(command, words=tuple(rest)))
        self.active = before

    def _script(self, command: Command) -> None:
        word = next((word for word in command.words if word.endswith(".sh")), None)
        if word and command.certain:
            self._check_there(word, self._where(command.words[0].line, command))
        path = self._context_file(word) if word else None
        if path is None:
            if (
                word
                and command.program in (*SHELLS, word.rsplit("/", 1)[-1])
                and "efa" not in word
                and "conda" not in word.lower()
            ):
                self.trace.unknown.append(
                    f"{self._where(command.words[0].line, command)}: the script {word} is not in the context"
                )
            return
        folder = self.cwd
        for inner in script_commands(self.texts.files[path], path, command.variables):
            self._command(replace(inner, certain=inner.certain and command.certain))
        self.cwd = folder

    def _uninstall(self, command: Command, names: Sequence[str]) -> None:
        environment = self._environment(str(command.words[0]))
        before = dict(environment.packages)
        for name in names:
            environment.packages.pop(canonicalize_name(name), None)
        self._record(self._where(command.words[0].line, command), str(command), before, environment, kind="uninstall")

    def _setup_py(self, command: Command, words: list[str]) -> None:
        where = self._where(command.words[0].line, command)
        if not {"install", "develop", "bdist_wheel", "build_ext"} & set(words):
            return
        if cloned := self._cloned(posixpath.normpath(posixpath.join(self.cwd, posixpath.dirname(words[1])))):
            self._built(cloned[0], None, where, command, isolated=False)
        elif (folder := self._context_folder(posixpath.dirname(words[1]) or ".")) is not None:
            self._built_here(folder, where, command, None, None)

    def _poetry(self, command: Command) -> None:
        where = self._where(command.words[0].line, command)
        folder = self._context_folder(".")
        self._check_there(self.cwd, where, folder=("pyproject.toml",))
        words = " ".join(command.words)
        groups = [part for given in re.findall(r"--(?:with|only)[= ](\S+)", words) for part in given.split(",")]
        extras = re.findall(r"(?:--extras|-E)[= ](\S+)", words)
        wanted = self._read(where, lambda: project_requirements(self.texts.files, folder or ".", extras, groups))
        environment = self._environment("")
        create = {**self.state.variables, **command.variables}.get("POETRY_VIRTUALENVS_CREATE", "true").lower()
        if environment.prefix == SYSTEM and create in ("true", "1") and command.program == "poetry":
            own = (
                f"{self.cwd.rstrip('/')}/.venv"
                if self.state.variables.get("POETRY_VIRTUALENVS_IN_PROJECT")
                else "poetry"
            )
            made = Environment(own, environment.python, environment.interpreter)
            environment = self.state.environments.setdefault(own, made)
        self._resolve(wanted, where, str(command), environment, PipInstall(command, Arguments(()), "install", True))
