"""What a pip or uv command installs: its requirements gathered, resolved, and put into the environment."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from windlass.image.facts.table import facts
from windlass.image.read.installs import PipInstall
from windlass.image.read.project import NotUnderstoodError, locked_requirements, project_requirements, python_of_project
from windlass.image.read.requirements import Place, Wanted, parse_requirements, project_name, wanted_of, wheel_of
from windlass.image.read.shell import Command, Word
from windlass.image.state.contents import source_in
from windlass.image.state.environments import DEFAULT_PYTHON, Environments
from windlass.image.state.files import copied_from
from windlass.image.state.model import SYSTEM, Compiled, Environment, Package, Where, torch_cuda
from windlass.image.state.resolver import MACHINES, Answer, Question, Stub, answers, find_uv, torch_tag

OTHER_PYTHONS = ("3.10", "3.8")  # tried where it is not known which an image has
LOCAL = "local:"  # a project of the context, in place of an address


class Installer(Environments):
    """What pip, uv and conda commands do to the state of a stage; `walk` calls it command by command."""

    # pip and uv

    def _pip(self, install: PipInstall) -> None:
        where = self._where(install.command.words[0].line, install.command)
        if word := install.command.reads or install.command.writes:
            _, sign, file = re.split("([<>])", word, maxsplit=1)
            does = f"reads a file named {file}, which is not there"
            if sign == ">":
                does = f"writes a file named {file}, and pip takes any version"
            self._fail(
                "shell-redirect",
                f"{word} is not quoted: the shell {does}",
                install.command,
                "replace",
                word,
                f'"{word}"',
            )
        before, folders = self.cwd, install.arguments.values("--project", "--directory")
        self.cwd = posixpath.normpath(posixpath.join(before, folders[-1])) if folders and install.by_uv else before
        self._installed(install, where)
        self.cwd = before

    def _check_options(self, install: PipInstall, environment: Environment) -> None:
        """Options that the pip of the system does not know yet."""
        moved = any(step.asks("pip") and step.environment.prefix == environment.prefix for step in self.trace.steps)
        moved |= bool(re.search(r"get-pip|ensurepip|virtualenv", self.texts.dockerfile or ""))
        if (
            install.by_uv
            or moved
            or environment.prefix != SYSTEM
            or not environment.pip
            or "pip" in environment.packages
        ):
            return
        for option, since in facts()["pip_options"]["since"].items():
            if install.arguments.has(option) and Version(environment.pip) < Version(since):
                self._fail(
                    "missing-option",
                    f"pip {environment.pip} of this image has no {option}, which came with pip {since}",
                    install.command,
                    *(("replace", f" {option}", "") if option == "--break-system-packages" else ()),
                )

    def _installed(self, install: PipInstall, where: Where) -> None:
        environment = self._environment(install.interpreter, install)
        self._check_options(install, environment)
        if install.verb == "wheel":  # what it builds waits in a folder
            environment = replace(environment, prefix="wheels", packages=dict(environment.packages))
        wanted: list[Wanted] = []
        extras = [str(argument) for argument in install.arguments.values("--extra")]
        groups = [str(argument) for argument in install.arguments.values("--group")]
        if install.verb == "sync":
            wanted += self._synced(install, where, extras, groups)
        for word in (*install.arguments.words, *install.arguments.values("--editable")):
            wanted += self._wanted(word, install, where, editable=word in install.arguments.values("--editable"))
        files = [(word, False) for word in install.arguments.values("--requirement")]
        files += [(word, True) for word in install.arguments.values("--constraint")]
        variables = {**self.state.variables, **install.command.variables}
        files += [
            (Word(part).at(where.place.line), True)
            for part in variables.get("PIP_CONSTRAINT", "").split()
            if not install.by_uv
        ]
        options: list[tuple[str, str]] = []
        for word, constraint in files:
            more, own = self._file(word, where, constraint=constraint)
            wanted += more
            options += own
        names = {one.name for one in wanted}
        self._provide(names)
        if "pip" in names and environment.prefix.startswith("python3"):
            self._pip_of(environment.python)
        folders = [posixpath.join(self.cwd, value) for value in install.arguments.values("--prefix", "--target")]
        nonroot = self.state.user.split(":")[0] not in ("root", "0", "") and environment.prefix == SYSTEM
        if (install.arguments.has("--user") or nonroot) and not install.by_uv and not folders:
            folders.append(f"{self.state.home}/.local")
            self.state.hidden |= names
        self.state.overlays |= {posixpath.normpath(folder) for folder in folders}
        if wanted:
            self._resolve(wanted, where, str(install.command), environment, install, options)
            self._remove_others(install, where, environment)
        elif not (install.by_uv or install.arguments.words or install.arguments.has("--editable", "--group") or files):
            self._fail("missing-option", "pip install names nothing to install, and ends with an error", where)
        if install.verb == "wheel":
            self.state.wheels |= {name: package for name, package in environment.packages.items() if package.compiled}
            folder = next(iter(install.arguments.values("--wheel-dir", "-w")), ".")
            kept = self.state.wheelhouses.setdefault(posixpath.normpath(posixpath.join(self.cwd, folder)), {})
            kept |= environment.packages
        globs = [posixpath.basename(word) for word in install.arguments.words if re.search(r"\*\S*\.whl$", word)]
        waiting = {
            name: package
            for name, package in self.state.wheels.items()
            if any(fnmatchcase(f"{name.replace('-', '_')}-0.whl", glob) for glob in globs)
        }
        if waiting and install.verb == "install":
            before = dict(environment.packages)
            environment.packages.update(waiting)
            self._record(where, str(install.command), before, environment)

    def _remove_others(self, install: PipInstall, where: Where, environment: Environment) -> None:
        """`uv sync` takes out what is not of the project."""
        step = self.trace.steps[-1] if self.trace.steps else None
        if install.verb != "sync" or install.arguments.has("--inexact") or step is None or step.answer.trouble:
            return
        own = {found.name for found in step.answer.packages} | {one.name for one in step.wanted}
        for name, package in list(environment.packages.items()):
            earlier = any(before.asks(name) for before in self.trace.steps[:-1] if before.where == package.where)
            if name in own or package.where.first == where.first or not step.answer.packages:
                continue
            del environment.packages[name]
            if earlier and name not in ("pip", "setuptools", "wheel"):
                self._fail(
                    "removed-by-sync",
                    f"uv sync takes out {name}, which {package.where} installed: it is not among what the project "
                    "requires; --inexact keeps it",
                    where,
                    "replace",
                    "uv sync",
                    "uv sync --inexact",
                )

    def _synced(self, install: PipInstall, where: Where, extras: list[str], groups: list[str]) -> list[Wanted]:
        folder = self._context_folder(".")
        folder = "." if folder is None else folder
        lock = posixpath.normpath(posixpath.join(folder, "uv.lock"))
        self._check_there(self.cwd, where, folder=("pyproject.toml",))
        if install.arguments.has("--frozen", "--locked") and "pyproject.toml" in self.texts.files:
            self._check_there("uv.lock", where)
        options = [
            f"--{name}={value}"
            for name in ("extra", "group", "only-group", "no-group")
            for value in install.arguments.values(f"--{name}")
        ]
        options += [name for name in ("--no-dev", "--all-extras", "--no-default-groups") if install.arguments.has(name)]
        if {lock, posixpath.normpath(posixpath.join(folder, "pyproject.toml"))} <= self.texts.files.keys():
            return self._read(where, lambda: locked_requirements(self.texts.files, folder, options, find_uv()))
        default = [] if install.arguments.has("--no-dev", "--no-default-groups") else ["dev"]
        return self._read(where, lambda: project_requirements(self.texts.files, folder, extras, [*groups, *default]))

    def _read(self, at: object, read: Callable[[], list[Wanted]]) -> list[Wanted]:
        """What a project asks for; what cannot be read is said."""
        try:
            return read()
        except NotUnderstoodError as error:
            self.trace.unknown.append(f"{at}: {error}")
            return []

    def _wanted(self, word: Word, install: PipInstall, where: Where, *, editable: bool = False) -> list[Wanted]:
        place = Place(install.command.file, word.line)
        if any(f"${name}" in word or f"${{{name}}}" in word for name in self.trace.empty):
            return []  # it has no value, which is a finding of its own
        if "$" in word:
            self.trace.unknown.append(f"{where}: {word}: its value is not known before the build")
            return []
        path, _, extra = str(word).partition("[")
        extras = [part.strip() for part in extra.rstrip("]").split(",") if part.strip()]
        is_path = path in (".", "..") or path.startswith(("./", "../", "/", "file:")) or (editable and "+" not in path)
        absolute = posixpath.normpath(posixpath.join(self.cwd, path))
        if path.endswith(".whl") and "://" not in path:
            wheel = wheel_of(path)
            return [wanted_of(path, place)] if wheel else []
        if not is_path and not (absolute in self.state.folders and "/" in path):
            return [wanted_of(str(word), place)]
        if cloned := self._cloned(absolute):
            return [wanted_of(f"{cloned[0]} @ {cloned[1]}", place)]
        folder = self._context_folder(path)
        self._check_there(path, where, folder=("pyproject.toml", "setup.py", "setup.cfg"))
        if folder is None:
            self.trace.unknown.append(f"{where}: {path} is not in the context")
            return []
        self._check_python(folder, where, install)
        own = Wanted(_project_in(folder), str(word), None, place, url=f"{LOCAL}{folder}")
        return [own, *self._read(where, lambda: project_requirements(self.texts.files, folder, extras))]

    def _cloned(self, absolute: str) -> tuple[str, str] | None:
        """The project at a path of a clone, and the address; a folder of it may be a project that is known by name."""
        source = next((source for source, _ in copied_from(self.state, absolute)), "")
        if not source.startswith("git+"):
            return None
        below = canonicalize_name(posixpath.basename(absolute))
        known = below in facts()["builds_against_torch"]["names"]
        return below if known else project_name(source), source

    def _check_python(self, folder: str, where: Where, install: PipInstall) -> None:
        """pip refuses a project that asks for another Python."""
        environment = self._environment(install.interpreter, install)
        needs = python_of_project(self.texts.files, folder)
        if needs and environment.python and not SpecifierSet(needs).contains(f"{environment.python}.99"):
            trouble = (
                f"the project requires Python {needs}, and Python {environment.python} does not satisfy Python{needs}"
            )
            self._record(where, str(install.command), environment.packages, environment, answer=Answer(trouble=trouble))

    def _file(self, word: Word, where: Where, *, constraint: bool) -> tuple[list[Wanted], list[tuple[str, str]]]:
        absolute = posixpath.normpath(posixpath.join(self.cwd, word))
        if absolute in self.inline:
            text, first = self.inline[absolute]
            parsed = parse_requirements("inline", {"inline": text}, constraint=constraint)
            wanted = [replace(one, place=Place(self.texts.name, first + one.place.line - 1)) for one in parsed.wanted]
            return wanted, [(option, value) for option, value, _ in parsed.options]
        path = self._context_file(word) if self._check_there(word, where) else None
        if path is None:
            self.trace.unknown.append(f"{where}: {word} is not in the context, so what it asks for is not checked")
            return [], []
        beside = posixpath.dirname(path) or "."
        if path.endswith("pyproject.toml"):
            return self._read(where, lambda: project_requirements(self.texts.files, beside)), []
        parsed = parse_requirements(path, self.texts.files, constraint=constraint)
        for name, place in parsed.missing:
            self.trace.unknown.append(f"{place}: {name} is not in the context")
        wanted = []
        for line in parsed.wanted:
            itself = line.requirement is None and line.url in (".", "-e .")
            wanted += self._read(path, lambda: project_requirements(self.texts.files, beside)) if itself else [line]
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
        python = environment.python or DEFAULT_PYTHON
        wanted = [one for one in wanted if applies(one.requirement, python, self.node.platform)]
        if install.arguments.has("--no-index") or self.state.variables.get("PIP_NO_INDEX"):
            self._from_wheels(wanted, where, text, environment, install)
            return
        requirements: list[str] = []
        constraints: list[str] = []
        stubs: list[Stub] = []
        for one in wanted:
            if _satisfied(one, before, install):
                continue
            if one.requirement is None or one.url:
                stubs += self._by_address(one, where, environment, install, text, requirements)
            elif one.constraint:
                constraints.append(_plain(one.requirement))
            else:
                requirements.append(_plain(one.requirement))
        arguments = install.arguments
        indexes, extra = self._indexes(install, file_options)
        extra += [one.index for one in wanted if one.index and one.index not in extra]
        named = {one.name for one in wanted}
        eager = arguments.values("--upgrade-strategy") == ("eager",)
        fresh = arguments.has("--force-reinstall", "--ignore-installed", "-I") or eager
        upgraded = (
            named if arguments.has("--upgrade") else {str(name) for name in arguments.values("--upgrade-package")}
        )
        kept = {} if fresh else before
        held = {name: package for name, package in kept.items() if name not in upgraded and package.version}
        stubs += [Stub(name, package.version or "") for name, package in held.items() if _not_on_an_index(package)]
        if self.state.base.family == "nvidia-torch" and environment.prefix == SYSTEM and not install.by_uv:
            constraints += [f"torch=={before['torch'].version}"] if "torch" in before else []  # its own PIP_CONSTRAINT
        constraints += [
            f"{name}>={package.public}" for name, package in held.items() if re.search(r"\d(a|b|rc)\d", package.public)
        ]
        system = facts()["systems"].get(self.state.system or "", {})
        question = Question(
            requirements=tuple(sorted(set(requirements))),  # in one order, wherever a line stands
            constraints=tuple(sorted(set(constraints))),
            python=environment.python or DEFAULT_PYTHON,
            platform=self.node.platform,
            glibc="musl" if self.state.base.alpine else system.get("glibc", Question.glibc),
            index=indexes,
            extra_indexes=tuple(extra),
            held=tuple(sorted((name, package.version or "") for name, package in held.items())),
            stubs=tuple(dict.fromkeys(stubs)),
            by_uv=install.by_uv,
            no_deps=arguments.has("--no-deps"),
            prereleases=arguments.has("--pre"),
        )
        answer = self._answered(question, environment) if requirements else Answer()
        self.trace.assumed += answer.notes
        self.trace.unknown += [f"{where}: {one}" for one in answer.unknown]
        if answer.trouble and not answer.checked:
            self.trace.unknown.append(f"{where}: {answer.trouble.splitlines()[-1][:160]}")
        by_name = {one.name: one for one in wanted if not one.constraint}
        # A page of ready wheels that could not be asked: what PyPI has as source alone comes from there.
        page = next((url for url in extra if url.endswith(".html") and not torch_tag(url) and not answers(url)), None)
        for found in answer.packages:
            asked = by_name.get(found.name)
            old = before.get(found.name)
            if (old and old.version == found.version and not fresh) or (asked and asked.url):
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
                page=page if not found.wheel else None,
                compiled=None if found.wheel or page else self._compiled(install, environment, before, text),
            )
        if answer.trouble:  # what was asked for by version is there as far as the rules are concerned
            for part in by_name.values():
                if part.pin and part.requirement:
                    environment.packages[part.name] = Package(
                        part.name,
                        part.pin,
                        replace(where, cause=part.place),
                        pinned=True,
                        wheel="",
                        page=page if part.name in facts()["builds_against_torch"]["names"] else None,
                        cuda=self._cuda_of(part.name, part.pin, environment),
                    )
        options = frozenset(arguments.options)
        self._record(where, text, before, environment, wanted, answer, (indexes or "", *extra), options, install.by_uv)

    def _from_wheels(
        self, wanted: list[Wanted], where: Where, text: str, environment: Environment, install: PipInstall
    ) -> None:
        """`pip install --no-index`: the wheels of a folder, which a step built or which the context has."""
        before, python = dict(environment.packages), environment.python or DEFAULT_PYTHON
        links = (*install.arguments.values("--find-links"), *self.state.variables.get("PIP_FIND_LINKS", "").split())
        house = self._wheelhouse([str(link) for link in links], where, python)
        waiting = [one for one in wanted if not one.constraint]
        for one in waiting:
            if one.name not in before and one.name not in house:
                environment.packages[one.name] = Package(one.name, None, replace(where, cause=one.place))
                self.trace.unknown.append(
                    f"{where}: no index is asked, and which wheel of {one.name} waits is not known"
                )
        names = [one.name for one in waiting if one.name not in before]
        places, others = {one.name: one for one in waiting}, list[Package]()
        while names:
            package = house.get(names.pop())
            if package is None or environment.packages.get(package.name) not in (None, before.get(package.name)):
                continue
            asked = places.get(package.name)
            environment.packages[package.name] = replace(
                package, where=replace(where, cause=asked.place if asked else where.cause), pinned=False
            )
            if not _fits_python(package.wheel, python) and environment.python:
                others.append(package)
            for line in self.index.requires(package.found) if not install.arguments.has("--no-deps") else ():
                try:
                    requirement = Requirement(line)
                except InvalidRequirement:
                    continue
                if applies(requirement, python, self.node.platform):
                    names.append(canonicalize_name(requirement.name))
        if first := next((one for one in others if one.name in places), next(iter(others), None)):
            self._fail(
                "wheel-python",
                f"{first.wheel} is for another Python, and the image has Python {python}: pip finds no {first.name}",
                where,
            )
        self._record(where, text, before, environment, wanted, options=frozenset(install.arguments.options))

    def _wheelhouse(self, links: Sequence[str], where: Where, python: str) -> dict[str, Package]:
        house: dict[str, Package] = {}
        for link in links:
            folder = posixpath.normpath(posixpath.join(self.cwd, link.removeprefix("file://")))
            for path, packages in self.state.wheelhouses.items():
                house |= packages if path == folder else {}
            inside = self._context_folder(link) if "://" not in link else None
            for name in sorted(self.texts.names or ()) if inside is not None else ():
                wheel = wheel_of(posixpath.basename(name)) if posixpath.dirname(name) == inside else None
                if wheel:
                    own, version = canonicalize_name(wheel[0]), str(wheel[1])
                    package = Package(own, version, where, wheel=posixpath.basename(name))
                    if own not in house or _fits_python(package.wheel, python):
                        house[own] = replace(package, cuda=self._cuda_of(own, version, None))
        return house

    def _answered(self, question: Question, environment: Environment) -> Answer:
        """What pip would install; where the Python is not known, the first that has what is asked for."""
        answer = self.index.resolve(question)
        for python in OTHER_PYTHONS if environment.python is None else ():
            if answer.checked and answer.trouble and re.search(r"Python|wheel", answer.trouble):
                answer = self.index.resolve(replace(question, python=python))
        if question.by_uv or question.no_deps or not answer.packages or "torch" not in dict(question.held):
            return answer
        return self._newest_first(question, answer)

    def _newest_first(self, question: Question, answer: Answer) -> Answer:
        """pip takes the newest of what is not there yet, and moves what is there where that asks for it.

        uv holds what is there, and takes an older release of the rest instead.
        """
        held = dict(question.held)
        free = self.index.resolve(replace(question, held=()))
        newest = {found.name: found for found in free.packages if found.name not in held}
        older = {
            found.name
            for found in answer.packages
            if found.name in newest
            and newest[found.name].version != found.version
            and any(re.match(r"torch(?![\w-])", text) for text in self.index.requires(newest[found.name]))
        }
        if not older:
            return answer
        pins = tuple(f"{name}=={newest[name].version}" for name in sorted(older))
        moved = self.index.resolve(replace(question, constraints=(*question.constraints, *pins)))
        return moved if moved.packages else answer

    def _by_address(
        self,
        one: Wanted,
        where: Where,
        environment: Environment,
        install: PipInstall,
        text: str,
        requirements: list[str],
    ) -> list[Stub]:
        """A wheel or a repository that is named by its address: no index is asked for it, but the rest must fit."""
        cause = replace(where, cause=one.place)
        if (one.url or "").startswith(LOCAL):
            self._built_here((one.url or "").removeprefix(LOCAL), cause, install.command, environment, install)
            return []
        wheel = wheel_of(one.url or one.text)
        if wheel:
            name, version = canonicalize_name(wheel[0]), str(wheel[1])
            file = re.split(r"[/\\]", (one.url or one.text).split("#")[0])[-1].replace("%2B", "+")
            environment.packages[name] = Package(
                name,
                version,
                cause,
                pinned=True,
                wheel=file,
                url=one.url,
                cuda=self._cuda_of(name, version, environment),
            )
            self.trace.unknown.append(f"{cause}: {file}: what this wheel requires is not checked")
            requirements.append(f"{name}=={version}")
            return [Stub(name, version)]
        address = one.url or one.text
        known_lack = self.state.programs is not None and "git" not in self.state.programs
        if "git+" in f"{address} {one.text}" and known_lack and environment.prefix == SYSTEM:
            self._miss("git", install.command, "git")
        tagged = re.search(r"@v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)(?:#.*)?$", address)
        known = one.name in facts()["builds_against_torch"]["names"]
        if tagged and not known:
            requirements.append(f"{one.name}=={tagged[1]}")
            self.trace.assumed.append(f"{cause}: {one.name} of its repository is taken to be release {tagged[1]}")
            return []
        self.trace.unknown.append(f"{cause}: {address[:100]}: what it requires is known when it is fetched")
        self._built(
            one.name,
            tagged[1] if tagged else None,
            cause,
            install.command,
            environment=environment,
            isolated=not install.arguments.has("--no-build-isolation"),
            install=install,
        )
        return []

    def _built_here(
        self, folder: str, where: Where, command: Command, environment: Environment | None, install: PipInstall | None
    ) -> None:
        """A project of the context, where its setup.py needs torch; without a pip it is `python setup.py`."""
        if source_in(self.texts.files, folder).needs in ("nvcc", "c++"):
            self._built(
                _project_in(folder),
                None,
                where,
                command,
                isolated=False,
                environment=environment,
                install=install,
                local=folder,
            )

    def _built(
        self,
        name: str,
        version: str | None,
        where: Where,
        command: Command,
        *,
        isolated: bool,
        environment: Environment | None = None,
        install: PipInstall | None = None,
        local: str | None = None,
    ) -> None:
        place, text = environment or self._environment(""), str(command)
        before = dict(place.packages)
        compiled = (
            self._compiled(install, place, before, text)
            if install
            else Compiled(
                isolated,
                before.get("torch"),
                self.state.nvcc,
                self.state.nvcc_known,
                self.state.programs,
                {**self.state.variables, **command.variables},
                text,
            )
        )
        place.packages[name] = Package(name, version, where, compiled=compiled, local=local)
        if "bdist_wheel" in text:
            self.state.wheels[name] = place.packages[name]
        if environment is None:
            self._record(where, text, before, place)

    def _compiled(
        self, install: PipInstall, environment: Environment, before: Mapping[str, Package], text: str
    ) -> Compiled:
        variables = {**self.state.variables, **install.command.variables}
        told = install.arguments.has("--no-build-isolation", "--no-build-isolation-package")
        isolated = not (told or variables.get("PIP_NO_BUILD_ISOLATION") or variables.get("UV_NO_BUILD_ISOLATION"))
        seeded = frozenset({"setuptools", "wheel"} if not environment.unseeded else ())
        programs, system = self.state.programs, facts()["systems"].get(self.state.system or "", {})
        gcc = re.search(r"-(\d+)$", variables.get("CUDAHOSTCXX") or variables.get("CXX") or variables.get("CC") or "")
        of_system = environment.interpreter.startswith("/usr/bin/")
        return Compiled(
            isolated,
            before.get("torch"),
            self.state.nvcc,
            self.state.nvcc_known,
            programs,
            variables,
            text,
            before,
            seeded,
            bare=self.state.base.family in ("python", "cuda", "system"),
            python=environment.python,
            gcc=gcc[1] if gcc else self.state.links.get("gcc") or system.get("gcc"),
            headers=programs is None or "headers" in programs or not of_system,
            system=self.state.system if of_system and environment.prefix == SYSTEM else None,
        )

    def _cuda_of(self, name: str, version: str, environment: Environment | None) -> str | None:
        if name not in ("torch", "torchvision", "torchaudio"):
            return None
        if name == "torch":
            return torch_cuda(version, self.node.platform)
        local = version.partition("+")[2]
        if local:
            return torch_cuda(f"0+{local}", self.node.platform)
        torch = environment.packages.get("torch") if environment else None
        return torch_cuda(torch.public, self.node.platform) if torch and torch.version else None

    def _indexes(self, install: PipInstall, file_options: Sequence[tuple[str, str]]) -> tuple[str | None, list[str]]:
        variables = {**self.state.variables, **install.command.variables}
        names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL") if install.by_uv else ("PIP_INDEX_URL",)
        index = next((variables[name] for name in names if variables.get(name)), None)
        extras = ("UV_INDEX", "UV_EXTRA_INDEX_URL") if install.by_uv else ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
        extra = [url for name in extras for url in variables.get(name, "").split()]
        values = install.arguments.values("--index-url", "--default-index")
        index = str(values[-1]) if values else index
        extra += [
            str(argument) for argument in install.arguments.values("--extra-index-url", "--index", "--find-links")
        ]
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


def _project_in(folder: str) -> str:
    return canonicalize_name(posixpath.basename(folder) if folder != "." else "the project")


def applies(requirement: Requirement | None, python: str, platform: str = "linux/amd64") -> bool:
    """Whether the marker of a requirement is true in the image."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": MACHINES[platform],
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    return requirement is None or requirement.marker is None or requirement.marker.evaluate(environment)


def _satisfied(wanted: Wanted, before: Mapping[str, Package], install: PipInstall) -> bool:
    """Whether the base image has it already, which pip then leaves alone."""
    there = before.get(wanted.name)
    if there is None or there.origin != "base" or not there.version or wanted.requirement is None or wanted.url:
        return False
    anew = install.arguments.has("--upgrade", "--force-reinstall", "--ignore-installed", "-I") or wanted.constraint
    return not anew and wanted.requirement.specifier.contains(there.version, prereleases=True)


def _plain(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _fits_python(wheel: str | None, python: str) -> bool:
    """Whether a compiled wheel is for a Python; of a wheel without a name nothing is known."""
    parsed = wheel_of(wheel) if wheel else None
    if not parsed:
        return True
    tags = [tag.split("-") for tag in map(str, parsed[2])]
    own = f"cp{python.replace('.', '')}"
    return any(tag[0] == own or tag[0].startswith("py") or tag[1] == "abi3" for tag in tags)


def _not_on_an_index(package: Package) -> bool:
    return "+" in (package.version or "") or package.origin != "pip" or package.wheel is None
