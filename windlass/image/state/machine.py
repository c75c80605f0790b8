"""The machine that a step runs on: its shell, programs, packages of the system and users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from windlass.image.facts.bases import CODENAMES
from windlass.image.facts.table import facts
from windlass.image.read.dockerfile import Instruction, substitute
from windlass.image.read.installs import PIP, PYTHON
from windlass.image.read.shell import Command, Word
from windlass.image.state.archive import installed_by
from windlass.image.state.files import KNOWN, Files
from windlass.image.state.model import SYSTEM, Failure, State, Where

DASH_LACKS = ("source", "[[", "pushd", "popd", "shopt", "mapfile", "readarray")
BASHISM = re.compile(r"<\(|<<<|(?<![\w$])\w+=\(")
EXPANSION = re.compile(r"\$\{\w+(?:/|\^|,,|:\d)[^}]*\}")
MANAGERS = {  # a package manager → the systems that have it
    "apt-get": "ubuntu|debian",
    "apt": "ubuntu|debian",
    "dpkg": "ubuntu|debian",
    "apk": "alpine",
    "yum": "rocky|ubi|centos|amazon",
    "dnf": "rocky|ubi9|ubi8|centos8|amazonlinux2023",
    "microdnf": "ubi",
}
ROOT_ONLY = (
    *MANAGERS,
    "useradd",
    "adduser",
    "groupadd",
    "addgroup",
    "usermod",
    "chown",
    "ldconfig",
    "update-alternatives",
    "add-apt-repository",
    "locale-gen",
    "update-ca-certificates",
)
WRITES = {"mkdir": None, "touch": None, "git": "clone", "uv": "sync", "unzip": None, "tar": None, "wget": None}
WITH_VALUE = re.compile(
    r"-[ugGdsckpefbKh]|--(uid|gid|groups|home|home-dir|shell|comment|gecos|skel|password|base-dir|ingroup)"
)
AWAY = {"astral.sh/uv": ("uv", ".local/bin"), "sh.rustup.rs": ("cargo", ".cargo/bin")}  # by their installers
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")  # a RUN may read them without setting them
NVIDIA = re.compile(r"cuda|libcu|libnccl|libnv|nsight|nvidia|tensorrt")  # of the archive that their images have


class Machine(Files):
    """The system side of a stage; `Installer` adds packages to it, and `walk` calls both command by command."""

    # The shell, and what it finds

    @property
    def _dash(self) -> bool:
        return bool(re.match("ubuntu|debian", self.state.system or "")) and not self.state.base.alpine

    def _check_shell(self, run: Instruction) -> None:
        """What dash, the sh of Debian and Ubuntu, takes for a mistake."""
        shell = not run.text.lstrip().startswith("[") and "debug" not in (self.state.base.tag or "")
        bare = "distroless" in self.state.base.repository or self.state.base.image == "scratch"
        if shell and bare:
            copies = [
                one.text for one in self.dockerfile.stages[run.stage].instructions if one.keyword in ("COPY", "ADD")
            ]
            if not any(re.search(r"bin\b|busybox|\s/(usr)?/?$", text) for text in copies):
                self._fail(
                    "missing-program", f"{self.state.base.image} has no shell: RUN cannot start /bin/sh", run.first
                )
            return
        lines = run.text.split("\n")
        quoted = any(line.count(mark) % 2 for line in lines for mark in "'\"")  # a text of several lines
        if self.state.shell != "sh" or not self._dash or quoted or re.search(r"\b(bash|zsh)\b", run.text):
            return
        for text, line in zip(lines, run.lines, strict=False):
            plain = re.sub(r"'[^']*'", "", text)
            if found := EXPANSION.search(plain) or BASHISM.search(re.sub(r'"[^"]*"|\$\([^)]*\)', "", plain)):
                self._only_bash(found[0], line)
                return

    def _only_bash(self, word: str, line: int | Command) -> None:
        self._fail(
            "not-in-sh",
            f"{word} is bash's, and RUN runs /bin/sh, which is dash on {self.state.system}; SHELL names another",
            line,
            "before",
            'SHELL ["/bin/bash", "-c"]',
        )

    def _check_command(self, command: Command) -> None:
        """Whether a command can run at all: its shell knows it, the program is there, and the user may."""
        state, program, words = self.state, command.program, command.words
        if command.shell == "sh" and self._dash and state.shell == "sh":
            old = state.system in facts()["dash"]["without_pipefail"]
            if program in DASH_LACKS or (program == "set" and "pipefail" in words and old):
                self._only_bash("set -o pipefail" if program == "set" else program, command)
                return
        if not command.certain:
            return
        system = "alpine" if state.base.alpine else state.system or ""
        if system and not re.match(MANAGERS.get(program, ""), system):
            self._fail("missing-program", f"{program} is not the package manager of {state.base.image}", command)
            return
        if program == "apt-key" and system in facts()["systems"]["without_apt_key"]:
            self._fail("missing-program", f"apt of {system} has no apt-key any more", command)
        if program == "nvidia-smi" and state.base.family:
            self._fail(
                "no-gpu-in-build", "nvidia-smi is the driver's, and a build has no driver: it is not found", command
            )
        if PYTHON.match(program) and words[1:2] == ("-c",) and len(words) > 2 and _needs_gpu(str(words[2])):
            self._fail(
                "no-gpu-in-build", "this Python asks for a GPU, and a build sees none: it ends with an error", command
            )
        if program in ("conda", "mamba") and words[1:2] == ("activate",) and not self._conda_ready(command):
            self._fail(
                "not-in-sh",
                "conda activate is a function of an interactive shell: `conda init` has not run "
                "here, and the next RUN has another shell",
                command,
            )
        nonroot = state.user.split(":")[0] not in ("root", "0", "") and not command.sudo
        if nonroot and program in ROOT_ONLY and not (program in MANAGERS and "--version" in words):
            self._fail("permission", f"{program} needs root, and this step runs as {state.user}", command)
        elif nonroot and program in WRITES and WRITES[program] in (None, *words):
            self._check_writes(command)
        self._check_program(command)

    def _check_lost(self, run: Instruction) -> None:
        """Every RUN has a shell of its own: what one exports is gone in the next."""
        state = self.state
        read = set(re.findall(r"(?<!\\)\$\{?(\w+)", run.text)) - set(re.findall(r"\b(\w+)=", run.text))
        for name in sorted(read & state.lost.keys() - state.variables.keys()):
            where = state.lost.pop(name)
            self._fail(
                "lost-variable",
                f"{name} is set for this RUN alone, and is empty at {self.texts.name}:{run.first}, which reads it; ENV "
                "keeps it",
                where,
            )
        parts = [part.strip() for part in re.split(r"&&|;|\n", run.text) if part.strip()]
        exports = [re.fullmatch(r"export\s+(\w+)=.*", part) for part in parts]
        if all(exports):
            state.lost |= {one[1]: self._where(run.first) for one in exports if one and one[1] not in INHERITED}

    def _conda_ready(self, command: Command) -> bool:
        text = " ".join([self.instruction.text, *(str(heredoc.text) for heredoc in self.instruction.heredocs)])
        return (
            bool(re.search(r"profile\.d/conda|shell\.bash hook|conda init|bashrc|profile", text))
            or (self.state.shell != "sh" and self.state.login)
            or command.shell not in ("sh", "bash")
        )

    def _check_program(self, command: Command) -> None:
        state, table = self.state, facts()["programs"]["packages"]
        program = "pip" if PIP.match(command.program) else command.program
        if PYTHON.match(program) and "pip" in command.words[1:3]:
            program = "pip"
        if command.sudo:
            program = "sudo"
        if program == "git" and command.words[1:2] == ("lfs",):
            program = "git-lfs"
        if "/" in command.words[0]:
            return
        venv = self.active or state.active != SYSTEM
        used = state.environments.get(self.active or state.active)
        if used and used.is_moved and PIP.match(command.program) and used.scripts not in state.environments:
            self._fail(
                "copied-environment",
                f"{command.program} of {used.prefix} begins with #!{used.scripts}/bin/python, where the environment "
                "was made and is no more; python -m pip does not need it",
                command,
            )
            return
        if program == "python" and not venv and lacks_python(state):
            self._miss(program, command, "python-is-python3")
        if program in state.hidden and ".local/bin" not in state.variables.get("PATH", "") and not venv:
            self._fail(
                "missing-program",
                f"pip, run as {state.user}, puts {program} into {state.home}/.local/bin, which PATH does not name",
                command,
                "before",
                f"ENV PATH={state.home}/.local/bin:$PATH",
            )
            return
        folder = state.away.get(program, "")
        path = {**state.variables, **command.variables}.get("PATH", "")
        sourced = re.search(r"(\.|source) \S*(/env|profile|bashrc)\b", self.instruction.text)
        if folder and folder not in path and not venv and not sourced and not state.login:
            self._fail(
                "missing-program",
                f"{program} was installed into {state.home}/{folder}, which PATH does not name here",
                command,
                "before",
                f"ENV PATH={state.home}/{folder}:$PATH",
            )
            state.away.pop(program)  # said once
            return
        folders = [folder for folder in state.variables.get("PATH", "").split(":") if folder.endswith("/bin")]
        filled = any(
            folder.startswith(f"{made.rstrip('/')}/") for folder in folders for made in state.opaque if made != "/"
        )
        if state.programs is None or program not in table or state.base.family == "conda" or filled:
            return
        packages, there = table[program], program in state.programs
        if (venv and program in ("pip", "uv", "python3")) or (state.other_archives and set(packages) & set(state.apt)):
            return
        if not there and state.brought.isdisjoint(packages):
            self._miss(program, command, "" if program == "uv" else packages[0])
            state.programs |= {program}  # said once
        elif program in ("curl", "wget", "git") and re.search(r"https://", str(command)):
            lacks = state.base.image.startswith(("ubuntu", "debian")) and "ca-certificates" not in state.brought
            if lacks and not state.unread and not re.search(r"(^|\s)-\w*k\b|--insecure|no-check-cert", str(command)):
                self._fail(
                    "missing-package",
                    f"{program} cannot verify https here: nothing installs ca-certificates",
                    command,
                    "apt",
                    "ca-certificates",
                )
                state.brought |= {"ca-certificates"}

    def _put_away(self, command: Command) -> None:
        """Installers that are fetched and piped into a shell put their program below the home of the user."""
        told = " ".join([*self.state.variables, *command.variables, self.instruction.text])
        for part, (program, folder) in AWAY.items():
            moved = re.search(rf"(ln|mv|cp|install) [^&;]*/{program}\b", told)
            if (
                part in str(command)
                and not moved
                and not re.search(r"INSTALL_DIR|_BIN_HOME|_HOME=|UNMANAGED|CARGO_HOME", told)
            ):
                self.state.away[program] = folder

    # apt

    def _apt(self, packages: Sequence[Word], command: Command) -> None:
        state = self.state
        known: dict[str, Any] = facts()["systems"].get(state.system or "", {})
        cached = "/var/lib/apt" in self.instruction.flags.get("mount", "")
        if not (state.listed or state.other_archives or cached) and state.programs is not None and command.certain:
            self._fail(
                "missing-package",
                "apt-get has no lists here, and finds no package: nothing updates them before",
                command,
                "replace",
                "apt-get install",
                "apt-get update && apt-get install",
            )
            state.listed = True
        places = {str(word): self._where(word.line, command) for word in packages}
        state.apt.update({re.split(r"[=:/]", name)[0]: where for name, where in places.items()})
        options = " ".join(word for word in command.words if word.startswith("-"))
        recommends = "no-install-recommends" not in options and "Install-Recommends" not in str(command)
        self._from_archive(places, command, recommends=recommends)
        names = {re.split(r"[=:/]", name)[0] for name in places}
        state.brought |= names
        yes = re.search(r"(^|\s)-\w*y|--yes|--assume-yes|-\w*qq|-q=2|\$", f"{options} {command}")
        agreed = yes or "Assume-Yes" in (self.texts.dockerfile or "")
        if command.certain and state.base.family in KNOWN and not agreed and not self.piped.startswith(("yes", "echo")):
            self._fail(
                "missing-option",
                f"{command.program} install asks whether to continue, and nobody answers: -y is missing",
                command,
                "replace",
                f"{command.program} install",
                f"{command.program} install -y",
            )
        self._bring(names, command, known, recommends=recommends)

    def _from_archive(self, places: dict[str, Where], command: Command, *, recommends: bool) -> None:
        """What the archive of the system does not have, or has no more; and what comes along."""
        state, system = self.state, self.state.system or ""
        codenames = {known: name for name, known in CODENAMES.items()}
        if system not in codenames or state.other_archives:
            return
        served = "ppa:deadsnakes/ppa" in state.apt and facts()["systems"][system].get("deadsnakes")
        asked = {
            name: where
            for name, where in places.items()
            if re.fullmatch(r"[a-z0-9][a-z0-9+.-]+(=\S+)?", name)
            and "$" not in name
            and not (state.base.cuda and NVIDIA.match(name))
            and not (served and re.match(r"python3\.", name))
        }
        told = installed_by(self.index, system, codenames[system], asked, recommends=recommends) if asked else {}
        absent = told.get("lacking", []) if told is not None else None
        if absent is None and "ppa:deadsnakes/ppa" in state.apt and not served:
            own = facts()["systems"][system]["python"]
            absent = [name for name in asked if re.match(r"python3\.", name) and not name.startswith(f"python{own}")]
        if absent is None:
            self.trace.unknown.append(f"{state.base.image}: whether the archive of {system} has what apt-get installs")
            state.unread = True
        state.brought |= set((told or {}).get("brings", ()))
        noninteractive = "DEBIAN_FRONTEND" in {**state.variables, **command.variables} or "TZ" in state.variables
        asks = set((told or {}).get("brings", ())) & set(facts()["debconf"]["asks"])
        if asks and not noninteractive and system in facts()["debconf"]["waits"] and state.base.family in KNOWN:
            self._fail(
                "missing-option",
                f"{sorted(asks)[0]}, which comes along, asks questions while it is "
                "installed, and nobody answers: DEBIAN_FRONTEND=noninteractive is missing",
                command,
                "before",
                "ENV DEBIAN_FRONTEND=noninteractive",
            )
        gone = len(absent or ()) == len(asked) and len(asked) > 2
        for where in dict.fromkeys(asked[name] for name in absent or () if command.certain):
            names = [name for name in absent or () if asked[name].first == where.first]
            python = any(name.startswith("python3.") for name in names)
            sentence = f"the archive of {system} has no {', '.join(names)}: apt-get cannot install it"
            sentence = f"the archive of {system} is gone: apt-get update ends with 404" if gone else sentence
            self.trace.failures.append(Failure("no-such-python" if python else "missing-package", sentence, where, ()))

    def _bring(self, names: set[str], command: Command, known: dict[str, Any], *, recommends: bool) -> None:
        """What packages mean for Python and compilers."""
        state = self.state
        brought = state.brought
        self._provide(
            {program for program, packages in facts()["programs"]["packages"].items() if brought & set(packages)}
        )
        if "python3-pip" in names and recommends:
            self._provide({"gcc", "g++", "make", "headers"})  # it recommends build-essential and python3-dev
        if {"python3-dev", "python3-full"} & brought or any(
            re.fullmatch(r"python3\.\d+-(dev|full)", name) for name in names
        ):
            self._provide({"headers"})
        for name in names:
            if python := re.fullmatch(r"python(3\.\d+)(-\w+)?", name):
                state.interpreters |= {f"/usr/bin/python{python[1]}"}
            if gcc := re.fullmatch(r"(gcc|g\+\+)-(\d+)", name):
                self._provide({gcc[1], name})
            if toolkit := re.fullmatch(r"cuda(?:-toolkit|-nvcc|-compiler)?-(\d+)-(\d+)", name):
                state.nvcc, state.nvcc_known = f"{toolkit[1]}.{toolkit[2]}", True
        if "python-is-python3" in names:
            state.links["python"] = known.get("python", "3")
        if {"python3", "python3-pip", "python3-dev"} & (names | brought) and known:
            state.interpreters |= {f"/usr/bin/python{known['python']}"}
        if "nvidia-cuda-toolkit" in names and not state.nvcc:
            state.nvcc, state.nvcc_known = known.get("cuda"), True

    def _other_manager(self, words: Sequence[str]) -> None:
        """apk, dnf and yum: what they bring is known by its names alone."""
        names = {word for word in words if not word.startswith("-")}
        compilers = {"build-base", "gcc", "gcc-c++", "g++", "@development"} & names or "Development" in " ".join(words)
        self.state.brought |= names
        tables = facts()["programs"]["packages"].items()
        self._provide(names | {program for program, packages in tables if names & set(packages)})
        self._provide(
            {"gcc", "g++", "make", "headers"} if compilers else {"headers"} if "python3-devel" in names else set()
        )

    # Users, and what they may write

    def _users(self, command: Command) -> None:
        """useradd, groupadd, userdel: the names and numbers that are taken."""
        state, words = self.state, [str(word) for word in command.words[1:]]
        plain, options = [], {}
        while words:
            word = words.pop(0)
            if WITH_VALUE.fullmatch(word) and words:
                options[word] = words.pop(0)
            elif word.startswith("--") and "=" in word:
                options[word.partition("=")[0]] = word.partition("=")[2]
            elif word.startswith("-"):
                combined = re.fullmatch(r"-\w*([udgs])", word)  # -ms /bin/bash, -mu 1000
                if combined and words and len(word) > 2:
                    options[f"-{combined[1]}"] = words.pop(0)
                options.setdefault(word, "")
            else:
                plain.append(word)
        name = plain[0] if plain else ""
        group = command.program in ("groupadd", "addgroup", "groupdel", "delgroup")
        taken = state.groups if group else state.users
        if taken is None or "$" in name or not name or len(plain) > 1:  # adduser NAME GROUP adds to a group
            return
        if "del" in command.program or command.program == "usermod":
            taken.pop(name, None)
            state.groups.pop(name, None)
            return
        number = options.get("-g" if group else "-u") or options.get("--gid" if group else "--uid") or ""
        owner = next((other for other, own in taken.items() if own == number and number), None)
        loose = {"-o", "--non-unique", "-f", "--force"} & options.keys() or re.search(
            r"(^| )-[a-z]*[of]", " ".join(options)
        )
        if owner and command.certain and not loose:
            self._fail(
                "permission",
                f"{'GID' if group else 'UID'} {number} belongs to {owner} of {state.base.image} "
                f"already: {command.program} ends with an error",
                command,
            )
        taken[name] = number
        made = {"--create-home"} & options.keys() or re.search(r"(^| )-[a-z]*m", " ".join(options))
        if not group and (made or command.program == "adduser"):
            state.owners[options.get("-d") or options.get("--home") or f"/home/{name}"] = name

    def _check_user(self, text: str, line: int) -> None:
        user = substitute(text, self.state.variables).split(":")[0]
        if "/etc/passwd" in (self.texts.dockerfile or "") or user in self.state.brought:
            return
        if self.state.users is not None and not user.isdigit() and "$" not in user and user not in self.state.users:
            self._fail(
                "no-such-user",
                f"{user} is no user of {self.state.base.image}, and nothing adds one: unable to find user",
                line,
                "before",
                f"RUN useradd --create-home {user}",
            )
            self.state.users[user] = ""

    def _check_start(self) -> None:
        """What the image starts is there, and the kernel can start it."""
        for instruction in (one for one in self.dockerfile.stages[self.trace.final_stage].instructions):
            command = next(iter(self.state.started.get(instruction.keyword, ())), None)
            if command is None or command.place.line not in range(instruction.first, instruction.last + 1):
                continue
            self.instruction, self.cwd, started = instruction, self.state.workdir, str(command.words[0])
            name = str(next((word for word in command.words if word.endswith(".sh")), started))
            if command.program in ("tini", "dumb-init", "gosu", "bash", "sh") or command.program in self.state.hidden:
                self._check_program(command)
            elif "/" not in started:
                continue
            if "/" in name and self._check_there(name, self._where(instruction.first)):
                path = self._context_file(name)
                text = self.texts.files.get(path or "", "#!")
                if "\r\n" in text.partition("#!")[2][:200]:
                    self._fail(
                        "line-endings",
                        f"{path} ends its lines with CR LF: the kernel looks for an "
                        "interpreter whose name ends with CR",
                        self._where(instruction.first),
                    )
                elif not text.startswith("#!") and name == started and instruction.text.lstrip().startswith("["):
                    self._fail("syntax", f"{path} has no #! line: exec format error", self._where(instruction.first))


def _needs_gpu(code: str) -> bool:
    """Whether a piece of Python fails where there is no GPU."""
    asks = re.search(
        r"assert\s*\(?\s*torch\.cuda\.(is_available\(\)|device_count\(\))(?!\s*(==|<|or\b))"
        r"|\.cuda\(\)|\.to\(\s*['\"]cuda|device\s*=\s*['\"]cuda"
        r"|torch\.cuda\.(get_device_(name|properties|capability)|current_device|init)\(",
        code,
    )
    return bool(asks) and not re.search(r"\b(if|try|and)\b", code)


def lacks_python(state: State) -> bool:
    """Debian and Ubuntu have python3; python is there where somebody made it."""
    folders = (state.variables.get("PATH") or "").split(":")
    known = all(re.match(r"\$|/usr/|/s?bin$|/root/\.(local|cargo)/|$", folder) for folder in folders)
    named = "python" in state.links or any("/usr/" not in path or "local" in path for path in state.interpreters)
    debian = (state.system or "").startswith(("ubuntu", "debian")) and "distroless" not in state.base.repository
    return (
        state.base.family in ("cuda", "system")
        and debian
        and state.active == SYSTEM
        and known
        and (not named and "conda" not in (state.programs or ()) and not state.variables.get("VIRTUAL_ENV"))
    )
