"""What an image holds after each step: packages with the line that brought them, interpreters, compilers, programs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from packaging.version import InvalidVersion, Version

from windlass.image.facts.bases import Base
from windlass.image.facts.table import release
from windlass.image.read.requirements import Place, Wanted
from windlass.image.read.shell import Command
from windlass.image.state.resolver import Answer, Found

SYSTEM = "system"
RELOCATABLE = "relocatable"  # scripts that find the Python beside them
UV_PYTHON = ".local/share/uv/python"  # where uv puts the interpreters that it downloads, below the user's home


@dataclass(frozen=True)
class Where:
    """The line of the Dockerfile, and the line of the file that asks where that is another one."""

    place: Place  # the command in the Dockerfile
    cause: Place  # the requirement; the same place where it stands in the command
    first: int  # first line of the instruction
    last: int

    def __str__(self) -> str:
        return str(self.place) if self.cause == self.place else f"{self.place} ({self.cause})"


@dataclass(frozen=True)
class Package:
    """One installed distribution."""

    name: str
    version: str | None  # None: not known before it is built
    where: Where
    origin: str = "pip"  # pip, base, conda
    pinned: bool = False  # the user named this version
    wheel: str | None = None
    url: str | None = None
    uploaded: str | None = None
    cuda: str | None = None  # that it is built with: 12.1, cpu; None: it is not said
    page: str | None = None  # of ready wheels, out of reach, that it may come from
    compiled: Compiled | None = None  # it is built from source in the image
    local: str | None = None  # the folder of the context that it is built from

    @property
    def public(self) -> str:
        return (self.version or "").split("+")[0]

    def at_least(self, version: str) -> bool:
        try:
            return Version(self.public) >= Version(version)
        except InvalidVersion:
            return False

    @property
    def found(self) -> Found:
        return Found(self.name, self.version or "", self.wheel, self.url, self.uploaded)


@dataclass(frozen=True)
class Compiled:
    """What stood around a package while it was built from source."""

    isolated: bool
    torch: Package | None  # before the step
    nvcc: str | None  # its CUDA; None: there is none
    nvcc_known: bool
    programs: frozenset[str] | None
    variables: Mapping[str, str]
    command: str
    installed: Mapping[str, Package] = field(default_factory=dict)  # before the step
    seeded: frozenset[str] = frozenset()  # what the environment was made with, in versions that are not known
    bare: bool = False  # the environment has nothing that is not in `installed` or `seeded`
    python: str | None = None
    headers: bool = True  # of that Python
    gcc: str | None = None  # its major version
    system: str | None = None  # where the Python is the system's own


@dataclass
class Environment:
    """A Python with its packages: the system's, a venv, one of conda."""

    prefix: str
    python: str | None
    interpreter: str  # the real one that it links to
    managed: bool = False  # pip refuses to install here (PEP 668)
    packages: dict[str, Package] = field(default_factory=dict)
    owner: str = "root"
    unseeded: bool = False  # made without setuptools and wheel, as uv does it
    pip: str | None = None  # its own version, before a step installs another
    scripts: str = ""  # the path that its scripts name, where it was made elsewhere
    moved: Where | None = None  # the step that put it where it is

    @property
    def is_moved(self) -> bool:
        """Whether its scripts name a Python of another path."""
        return self.moved is not None and self.scripts not in ("", RELOCATABLE, self.prefix)


@dataclass
class State:
    """A stage at one moment."""

    base: Base
    platform: str
    environments: dict[str, Environment]
    active: str
    system: str | None = None
    nvcc: str | None = None
    nvcc_known: bool = True
    programs: frozenset[str] | None = None  # None: the base is not known well enough
    interpreters: frozenset[str] = frozenset()
    apt: dict[str, Where] = field(default_factory=dict)  # packages that were named
    brought: set[str] = field(default_factory=set)  # those, and what comes along
    unread: bool = False  # the archive of the system is out of reach
    shell: str = "sh"  # that runs RUN
    login: bool = False  # and reads its startup files
    users: dict[str, str] | None = None  # name → number, which may be empty; None: not known
    groups: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # of folders
    wheels: dict[str, Package] = field(default_factory=dict)  # that were built and wait in a folder
    wheelhouses: dict[str, dict[str, Package]] = field(default_factory=dict)  # folder → what `pip wheel` put there
    hidden: set[str] = field(default_factory=set)  # programs in ~/.local/bin, by their packages
    away: dict[str, str] = field(default_factory=dict)  # programs that an installer put into a folder of its own
    lost: dict[str, Where] = field(default_factory=dict)  # variables that a RUN exported for itself alone
    mentioned: set[str] = field(default_factory=set)  # names in commands, which may be files that they make
    opaque: set[str] = field(default_factory=set)  # folders that commands fill with what is not known
    variables: dict[str, str] = field(default_factory=dict)
    exported: dict[str, Where] = field(default_factory=dict)  # where ENV set a variable
    defaults: dict[str, Place] = field(default_factory=dict)  # where an ARG has its value
    folders: dict[str, str] = field(
        default_factory=dict
    )  # folder in the image → context path, or address it was cloned from
    workdir: str = "/"
    user: str = "root"
    overlays: frozenset[str] = frozenset()  # folders that pip was told to install into: --user, --prefix, --target
    links: dict[str, str] = field(default_factory=dict)  # python, pip → the version that the name was given
    started: dict[str, tuple[Command, ...]] = field(default_factory=dict)  # by ENTRYPOINT and CMD
    other_archives: bool = False  # apt was given more than the system's own
    listed: bool = False  # apt has its lists
    efa: str | None = None
    efa_where: Where | None = None
    efa_copied: bool = False  # from another stage, without what its installer takes from apt
    ofi: tuple[str, Where] | None = None  # version of aws-ofi-nccl where it is built here
    ofi_prefix: tuple[str, Where] | None = None  # the folder that it goes to, where that is named

    def copy(self) -> State:
        return copy.deepcopy(self)

    @property
    def environment(self) -> Environment:
        return self.environments[self.active]

    @property
    def packages(self) -> dict[str, Package]:
        return self.environment.packages

    @property
    def torch(self) -> Package | None:
        return self.packages.get("torch")

    @property
    def home(self) -> str:
        return "/root" if self.user.split(":")[0] in ("root", "0", "") else f"/home/{self.user.split(':')[0]}"

    @property
    def everywhere(self) -> Iterator[tuple[Environment, Package]]:
        for environment in self.environments.values():
            for package in environment.packages.values():
                yield environment, package


@dataclass(frozen=True)
class Step:
    """One command that changes what is installed."""

    where: Where
    stage: int
    text: str
    before: Mapping[str, Package]
    after: Mapping[str, Package]
    environment: Environment
    wanted: tuple[Wanted, ...] = ()
    answer: Answer = field(default_factory=Answer)
    kind: str = "pip"
    index: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    by_uv: bool = False
    user: str = "root"

    def asks(self, name: str) -> Wanted | None:
        return next((one for one in reversed(self.wanted) if one.name == name and not one.constraint), None)


@dataclass(frozen=True)
class Failure:
    """What cannot succeed, as the walk found it."""

    id: str
    sentence: str
    where: Where
    fix: tuple[str, ...] = ()  # apt PACKAGE, replace OLD NEW, before LINE, or nothing


@dataclass
class Trace:
    """Everything that is known of a Dockerfile after it was walked."""

    states: list[State]  # of each stage at its end
    steps: list[Step] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    empty: dict[str, Where] = field(default_factory=dict)  # ARGs that end at FROM, and where a stage reads them
    copied: list[tuple[Environment, State, Where]] = field(default_factory=list)  # environments of other stages
    assumed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    guarded: bool = False  # there are commands of which a condition or `||` decides, and nobody knows how
    final_stage: int = -1
    used_stages: frozenset[int] = frozenset()

    @property
    def final(self) -> State:
        return self.states[self.final_stage]

    def steps_of(self, name: str) -> list[Step]:
        """The steps that changed a package."""
        return [step for step in self.steps if step.before.get(name) != step.after.get(name)]


def torch_cuda(version: str, platform: str) -> str | None:
    """The CUDA of a torch build by its version: the local part, else what PyPI's wheel for the platform has."""
    local = version.partition("+")[2]
    if local.startswith("cu") and local[2:].isdigit():
        return f"{local[2:-1]}.{local[-1]}"
    if local == "cpu":
        return "cpu"
    known = release(version)
    if known is None or local:
        return None
    if platform in known.cpu_only:
        return "cpu"
    return known.pypi.cuda if known.pypi else None


def moved(package: Package, where: Where) -> Package:
    return replace(package, where=where)
