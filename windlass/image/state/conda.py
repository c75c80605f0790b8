"""What conda installs, as far as versions are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from packaging.utils import canonicalize_name
from packaging.version import Version

from windlass.image.facts.table import facts, release
from windlass.image.read.installs import Arguments, PipInstall
from windlass.image.read.project import NotUnderstoodError, conda_environment
from windlass.image.read.requirements import Place, Wanted
from windlass.image.read.shell import Command, Word
from windlass.image.state.environments import DEFAULT_PYTHON
from windlass.image.state.install import Installer
from windlass.image.state.model import SYSTEM, Environment, Package, Where
from windlass.image.state.resolver import Question

NOT_ON_PYPI = (
    "python",
    "pip",
    "torch",
    "cuda",
    "pytorch-cuda",
    "cudatoolkit",
    "cuda-version",
    "cuda-toolkit",
    "cuda-nvcc",
)
CONDA_NAMES = {"pytorch": "torch", "pytorch-gpu": "torch"}


class CondaInstaller(Installer):
    """The conda side of a stage."""

    def _conda(
        self, words: Sequence[Word], files: Sequence[Word], name: str | None, command: Command, channels: Sequence[Word]
    ) -> None:
        state, where = self.state, self._where(command.words[0].line, command)
        asked = [(str(word), Place(command.file, word.line)) for word in words]
        pip: list[Wanted] = []
        if "env" in command.words[:3]:
            files = files or (Word("environment.yml").at(command.words[0].line),)
        for file in files:
            path = self._context_file(file) if self._check_there(file, where) else None
            if path is None:
                self.trace.unknown.append(f"{where}: {file} is not in the context")
                continue
            try:
                more, own, named = conda_environment(self.texts.files, path)
                channels = (*channels, *(Word(channel) for channel in named))
            except NotUnderstoodError as error:
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
            found = re.match(r"([\w.-]+)\s*(?:([=<>!~]+)\s*([\w.*+]+))?(?:=(\S+))?", plain)
            if not found:
                continue
            version = (found[3] or "").rstrip(".*") or None
            if found[1] == "python" and version:
                environment.python = ".".join(version.split(".")[:2])
            elif found[1] in ("pytorch-cuda", "cudatoolkit", "cuda-version") and version:
                cuda = ".".join(version.split(".")[:2])
            elif found[1] in ("cuda-nvcc", "cuda-toolkit", "cuda", "cudatoolkit-dev"):
                state.nvcc, state.nvcc_known = version or cuda or state.nvcc, True
            own_name = canonicalize_name(CONDA_NAMES.get(found[1], found[1]))
            environment.packages[own_name] = Package(
                own_name,
                self._conda_version(own_name, found[2] or "", version, environment),
                replace(where, cause=place),
                "conda",
                bool(version),
            )
        torch = environment.packages.get("torch")
        self._check_conda(asked, torch, cuda, where, {str(channel) for channel in channels})
        if torch and torch.origin == "conda" and torch.where.place == where.place:
            gpu = cuda or "pytorch-gpu" in names or any("cuda" in text and "pytorch" in text for text, _ in asked)
            told = "CONDA_OVERRIDE_CUDA" in {**state.variables, **command.variables}
            # Without a GPU conda-forge gives the build for CPUs; of the other channels it is not known.
            others = {"pytorch", "nvidia", "defaults"} & {str(channel) for channel in channels}
            forge = "conda-forge" in channels or bool(re.match("condaforge|mambaorg", state.base.repository))
            cpu_only = ((forge and not others) or "cpuonly" in names) and not gpu and not told
            environment.packages["torch"] = replace(torch, cuda="cpu" if cpu_only else cuda)
        if "mambaorg" in state.base.repository or state.base.family == "conda":
            self._provide({"pip"})
        self._provide(names)
        self._record(where, str(command), before, environment, kind="conda")
        self.trace.unknown.append(f"{where}: what conda takes beside the versions that are written is not checked")
        if pip:
            self._resolve(pip, where, str(command), environment, PipInstall(command, Arguments(()), "install", False))

    def _conda_version(self, name: str, sign: str, version: str | None, environment: Environment) -> str | None:
        """`numpy=1.26` means 1.26.*, of which conda takes the newest; its channels have the releases of PyPI."""
        if version is None or sign == "==" or (sign == "=" and version.count(".") > 1) or name in NOT_ON_PYPI:
            return version
        bound = f"{name}=={version}.*" if sign == "=" else f"{name}{sign}{version}"
        question = Question((bound,), python=environment.python or DEFAULT_PYTHON, platform=self.node.platform)
        found = (one.version for one in self.index.resolve(question).packages if one.name == name)
        return next(found, version if sign == "=" else None)

    def _check_conda(
        self,
        asked: Sequence[tuple[str, Place]],
        torch: Package | None,
        cuda: str | None,
        where: Where,
        channels: set[str],
    ) -> None:
        """Versions that no channel has."""
        known, written = facts()["conda"], {text.rsplit("::", 1)[-1].split("=")[0]: place for text, place in asked}
        absent = ""
        if "pytorch-cuda" in written and cuda and cuda not in known["pytorch_cuda"]:
            name, absent = "pytorch-cuda", f"{cuda}; there are {', '.join(known['pytorch_cuda'])}"
        elif "cudatoolkit" in written and cuda and Version(cuda) > Version(known["last_cudatoolkit"]):
            name, absent = "cudatoolkit", f"{cuda}: it ends with {known['last_cudatoolkit']}"
        elif torch and torch.pinned and "pytorch" in written and channels & {"pytorch", "conda-forge"} == {"pytorch"}:
            name, build = "pytorch", release(torch.public)
            if torch.at_least("2.6"):
                absent = f"{torch.version}: the channel pytorch ends with {known['last_pytorch']}"
            elif "pytorch-cuda" in written and cuda and build and build.build(cuda) is None:
                absent = f"{torch.version} for CUDA {cuda}"
        if absent:
            self._fail("no-version", f"conda finds no {name} {absent}", replace(where, cause=written[name]))
