"""The Pythons of a stage: the system's, virtual environments and uv's own, and which of them a command finds."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

from packaging.version import Version

from windlass.image.facts.table import facts
from windlass.image.read.installs import PipInstall
from windlass.image.read.project import python_of_project
from windlass.image.read.requirements import Wanted
from windlass.image.read.shell import Command
from windlass.image.state.machine import Machine, lacks_python
from windlass.image.state.model import RELOCATABLE, SYSTEM, UV_PYTHON, Environment, Package, Step, Where
from windlass.image.state.resolver import Answer

DEFAULT_PYTHON = "3.12"


class Environments(Machine):
    """Environments of a stage: made, found and activated."""

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
        program = posixpath.basename(interpreter)
        version = version_in(program) or state.links.get(program)
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
                asked = version_in(interpreter) or version_in(variables.get("UV_PYTHON", ""))
                pinned = self.texts.files.get(posixpath.normpath(posixpath.join(folder_, ".python-version")), "")
                needs = python_of_project(self.texts.files, folder_) or ""
                exact = re.search(r"==\s*(3\.\d+)", needs)
                wanted = asked or version_in(pinned) or (exact[1] if exact else None)
                self._new_uv_environment(prefix, wanted, managed=install.arguments.has("--managed-python"))
        if posixpath.normpath(prefix or "-") in state.environments:
            return state.environments[posixpath.normpath(prefix)]
        local = posixpath.normpath(posixpath.join(self.cwd, ".venv"))
        if self.active is None and state.active == SYSTEM and local in state.environments:
            return state.environments[local]
        return state.environments[self.active or state.active]

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
            Step(
                where,
                len(self.trace.states) - 1,
                text,
                dict(before),
                dict(environment.packages),
                environment,
                tuple(wanted),
                answer or Answer(),
                kind,
                tuple(one for one in index if one),
                options,
                by_uv,
                self.state.user,
            )
        )

    def _uv_pythons(self) -> str:
        return self.state.variables.get("UV_PYTHON_INSTALL_DIR") or f"{self.state.home}/{UV_PYTHON}"

    def _new_uv_environment(self, prefix: str, wanted: str | None, *, managed: bool = False) -> None:
        """uv takes the interpreter that is there where it is the right one, else it downloads one."""
        system = self.state.environments[SYSTEM]
        fits = wanted in (None, system.python) and system.python and system.interpreter in self.state.interpreters
        has_python = self.state.base.family not in ("cuda", "system") or bool(
            {"python3", f"python{wanted}"} & {*self.state.apt, *self.state.brought}
        )
        told = self.state.variables.get("UV_PYTHON_PREFERENCE") == "only-managed"
        managed |= told or self.state.variables.get("UV_MANAGED_PYTHON") in ("1", "true")
        managed |= f"{self._uv_pythons()}/{wanted or system.python}" in self.state.interpreters  # installed before
        if fits and has_python and not managed:
            environment = Environment(prefix, system.python, system.interpreter)
        else:
            version = wanted or DEFAULT_PYTHON
            own = f"/usr/bin/python{version}"
            there = own in self.state.interpreters and not managed
            interpreter = own if there else f"{self._uv_pythons()}/{version}"
            environment = Environment(prefix, version, interpreter)
            self.state.interpreters |= {interpreter}
        environment.owner, environment.unseeded = self.state.user, True
        self.state.environments[prefix] = environment
        self._activate_by_path()

    def _activate_by_path(self) -> None:
        """PATH and VIRTUAL_ENV decide which Python and pip a command finds."""
        state = self.state
        folders = [
            state.variables.get("VIRTUAL_ENV", ""),
            *(
                part.removesuffix("/bin")
                for part in state.variables.get("PATH", "").split(":")
                if part.endswith("/bin")
            ),
        ]
        for folder in folders:
            for name in (posixpath.normpath(folder or "-"), folder.rpartition("/envs/")[2] or "-"):  # conda's by name
                if name in state.environments:
                    state.active = name
                    return

    def _pip_of(self, python: str | None) -> None:
        """pip, installed by an interpreter that is not the system's, is that one's from then on."""
        self._provide({"pip"})
        if python and python != self.state.environments[SYSTEM].python:
            self.state.links |= {"pip": python, "pip3": python}

    def _activate(self, name: str) -> None:
        fitting = (prefix for prefix in self.state.environments if prefix == name or prefix.endswith(f"/{name}"))
        self.active = next(fitting, self.active)

    def _venv(self, words: list[str], python: str | None, command: Command) -> None:
        of_system = lacks_python(self.state) and not self.active
        brought = {"python3-venv", "python3-full", f"python{python}-venv", f"python{python}-full"} & set(self.state.apt)
        if of_system and "venv" in words and not brought and "--without-pip" not in words and "/" not in words[0]:
            self._miss(f"python{python or 3}-venv", command, f"python{python or 3}-venv")
        given = words[3:] if words[1:2] == ["-m"] else words[1:]
        plain = [
            word
            for option, word in zip(("", *given), given, strict=False)
            if not word.startswith("-") and option not in ("-p", "--python", "--prompt")
        ]
        if plain:
            current = self.state.environments[SYSTEM]
            version = python or current.python
            prefix = posixpath.normpath(posixpath.join(self.cwd, plain[-1]))
            inherited = dict(current.packages) if "--system-site-packages" in words else {}
            interpreter = f"/usr/bin/python{version}" if python else current.interpreter
            owner = self.state.user
            unseeded = Version(version or "3") >= Version("3.12")
            pip = facts()["pip_of_python"].get(version)
            self.state.environments[prefix] = Environment(
                prefix, version, interpreter, False, inherited, owner, unseeded, pip
            )
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
        flags = {**self.state.variables, **dict.fromkeys(words, "1")}
        relocatable = "--relocatable" in flags or flags.get("UV_VENV_RELOCATABLE") in ("1", "true")
        self._new_uv_environment(prefix, version_in(version or ""), managed="--managed-python" in flags)
        if relocatable:
            self.state.environments[prefix].scripts = RELOCATABLE

    def _link_python(self, words: list[str]) -> None:
        """python3 is the interpreter of Debian's pip; python alone is a name of its own."""
        system, found = self.state.environments[SYSTEM], version_in(" ".join(words))
        if any(re.search(r"/python$", word) for word in words):
            self.state.links["python"] = found or system.python or DEFAULT_PYTHON
        if (
            any(re.search(r"/python3$", word) for word in words)
            and f"/usr/bin/python{found}" in self.state.interpreters
        ):
            system.python, system.interpreter, system.managed = found, f"/usr/bin/python{found}", False


def version_in(text: str) -> str | None:
    found = re.search(r"(3\.\d+)", text)
    return found[1] if found else None
