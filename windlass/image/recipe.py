"""What a Dockerfile and its requirement files will put into the image, as far as reading them can tell. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from windlass.image.bases import Base, base_of
from windlass.image.parsing import Dockerfile, Instruction, parse_dockerfile, substitute, variables
from windlass.image.patch import Texts, substitute_within
from windlass.image.requirements import Place, RequirementFile, Wanted, parse_requirements, wanted_of
from windlass.image.shell import AptInstall, PipInstall, apt_installs, commands, pip_installs, shell_text
from windlass.image.table import Build, Release, release, releases

CUDA_INDEX = re.compile(r"/whl/(?:nightly/|test/)?cu(\d\d)(\d)\b|/whl/(cpu)\b")


@dataclass(frozen=True)
class Step:
    """One pip command, with everything that it asks for."""

    install: PipInstall
    wanted: tuple[Wanted, ...]
    indexes: tuple[str, ...]

    def asks(self, name: str) -> Wanted | None:
        return next((one for one in self.wanted if one.name == name and not one.constraint), None)


@dataclass(frozen=True)
class Recipe:
    texts: Texts

    @cached_property
    def dockerfile(self) -> Dockerfile:
        return parse_dockerfile(self.texts.dockerfile or "")

    @cached_property
    def base(self) -> Base | None:
        chain = self.dockerfile.chain()
        return base_of(chain[0].image) if chain else None

    @cached_property
    def runs(self) -> tuple[tuple[Instruction, str], ...]:
        """The RUNs of the final image with their shell text, values put in."""
        return tuple(
            (one, substitute(shell_text(one), variables(self.dockerfile, one)))
            for stage in self.dockerfile.chain()
            for one in stage.instructions
            if one.keyword == "RUN"
        )

    @cached_property
    def environment(self) -> dict[str, str]:
        """ENV and ARG at the end of the final image."""
        last = self.dockerfile.last
        if last is None:
            return {}
        end = Instruction("END", "", {}, 10**9, 10**9, (), last.number)
        return variables(self.dockerfile, end)

    @cached_property
    def requirement_files(self) -> dict[str, RequirementFile]:
        """The requirement files that are installed; every file where there is no Dockerfile."""
        if self.texts.dockerfile is None:
            named = set(self.texts.files) - self._named_by_others()
        else:
            named = {found for step in self._installs() for one in step.files if (found := self.context_path(one))}
        return {name: parse_requirements(name, self.texts.files) for name in sorted(named)}

    def _named_by_others(self) -> set[str]:
        """Files that another file takes in by -r or -c."""
        found = set()
        for name in self.texts.files:
            places = {one.place.file for one in parse_requirements(name, self.texts.files).wanted}
            found |= places - {name}
        return found

    def context_path(self, path: str) -> str | None:
        """The context file that a path in the image was copied from: by its whole path, else by its last part."""
        plain = posixpath.normpath(path.lstrip("/"))
        if plain in self.texts.files:
            return plain
        last = [one for one in self.texts.files if one.rsplit("/", 1)[-1] == plain.rsplit("/", 1)[-1]]
        return last[0] if len(last) == 1 else None

    def _installs(self) -> Iterator[PipInstall]:
        for instruction, text in self.runs:
            yield from pip_installs(instruction, text)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The pip commands in order; without a Dockerfile one command per requirement file."""
        if self.texts.dockerfile is None:
            return tuple(_file_step(one) for one in self.requirement_files.values())
        found = []
        for install in self._installs():
            wanted = [wanted_of(text, self.place(install, text)) for text in install.requirements]
            indexes = [*install.indexes, *self._configured_indexes(install)]
            for name, constraint in [(n, False) for n in install.files] + [(n, True) for n in install.constraints]:
                path = self.context_path(name)
                if path:
                    parsed = parse_requirements(path, self.texts.files, constraint=constraint)
                    wanted += parsed.wanted
                    indexes += [value for option, value, _ in parsed.options if "index-url" in option]
            found.append(Step(install, tuple(wanted), tuple(indexes)))
        return tuple(found)

    def _configured_indexes(self, install: PipInstall) -> list[str]:
        values = variables(self.dockerfile, install.instruction)
        names = ("UV_DEFAULT_INDEX", "UV_INDEX") if install.by_uv else ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
        return [values[name] for name in names if values.get(name)]

    def place(self, install: PipInstall, text: str) -> Place:
        """The line of a Dockerfile that holds a word of a command."""
        first, last = install.instruction.first, install.instruction.last
        lines = (self.texts.dockerfile or "").splitlines()[first - 1 : last]
        name = re.split(r"[=<>!~\[ ;@]", text)[0]
        for offset, line in enumerate(lines):
            if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", line):
                return Place(self.texts.name, first + offset)
        return Place(self.texts.name, first)

    @cached_property
    def apt(self) -> tuple[AptInstall, ...]:
        return tuple(one for instruction, text in self.runs for one in apt_installs(instruction, text))

    @cached_property
    def apt_packages(self) -> frozenset[str]:
        return frozenset(re.split(r"[=:/]", name)[0] for one in self.apt for name in one.packages)

    @cached_property
    def wanted(self) -> tuple[Wanted, ...]:
        return tuple(one for step in self.steps for one in step.wanted if not one.constraint)

    def asked(self, name: str) -> Wanted | None:
        """The last requirement of a package: later commands win."""
        return next((one for one in reversed(self.wanted) if one.name == name), None)

    def step_of(self, wanted: Wanted) -> Step:
        return next(step for step in self.steps if wanted in step.wanted)

    def calls(self, program: str) -> Instruction | None:
        for instruction, text in self.runs:
            if any(words[0].rsplit("/", 1)[-1] == program for words in commands(text)):
                return instruction
        return None

    @cached_property
    def python(self) -> str | None:
        """The Python that pip will use, where base or packages tell."""
        packages = [re.fullmatch(r"python(3\.\d+)", name) for name in self.apt_packages]
        installed = [one[1] for one in packages if one]
        return installed[0] if len(installed) == 1 else self.base.python if self.base else None

    @cached_property
    def torch_wanted(self) -> Wanted | None:
        """The request that decides which torch there is: pip keeps an installed one that satisfies a later request."""
        chosen: Wanted | None = None
        for step in self.steps:
            for one in step.wanted:
                if one.name != "torch" or one.constraint:
                    continue
                there = self._version(chosen) if chosen else None
                specifier = one.requirement.specifier if one.requirement else None
                again = step.install.has("-U", "--upgrade", "--force-reinstall", "-I", "--ignore-installed")
                if there is None or specifier is None or again or not specifier.contains(there, prereleases=True):
                    chosen = one
        return chosen

    @cached_property
    def torch(self) -> str | None:
        """The version of torch in the image; a request without a pin gets the newest that it allows."""
        return self._version(self.torch_wanted) if self.torch_wanted else self.base.torch if self.base else None

    def _version(self, wanted: Wanted) -> str | None:
        if wanted.pin:
            return wanted.pin.split("+")[0]
        if wanted.requirement is None or (self.base and self.base.family == "nvidia-torch"):
            return None  # unknown, and pip keeps it
        if self.base and self.base.torch and wanted.requirement.specifier.contains(self.base.torch):
            return self.base.torch
        allowed = [one.version for one in self._releases_for_python() if one.version in wanted.requirement.specifier]
        return allowed[0] if allowed else None

    def _releases_for_python(self) -> list[Release]:
        return [one for one in releases() if self.python is None or self.python in one.python]

    @cached_property
    def cuda(self) -> str | None:
        """The CUDA that torch in the image is built with: `12.8`, `cpu`, or None where nothing tells."""
        wanted = self.torch_wanted
        if wanted is None or (wanted.pin is None and self.base and self.base.torch == self.torch):
            return self.base.cuda if self.base and self.base.torch else None
        local = re.search(r"\+(?:cu(\d\d)(\d)|(cpu))", f"{wanted.pin or ''} {wanted.url or ''}")
        if local:
            return local[3] or f"{local[1]}.{local[2]}"
        step = self.step_of(wanted)
        for tag in step.install.values("--torch-backend"):
            if found := re.fullmatch(r"cu(\d\d)(\d)|(cpu)", tag):
                return found[3] or f"{found[1]}.{found[2]}"
        for url in step.indexes:
            found = CUDA_INDEX.search(url)
            if found:
                return found[3] or f"{found[1]}.{found[2]}"
        known = release(self.torch) if self.torch else None
        return known.pypi.cuda if known else None

    @cached_property
    def release(self) -> Release | None:
        return release(self.torch) if self.torch else None

    @cached_property
    def build(self) -> Build | None:
        return self.release.build(self.cuda) if self.release and self.cuda else None

    def lines(self, place: Place) -> str:
        return self.texts.get(place.file).splitlines()[place.line - 1].strip()


def rewrite(texts: Texts, wanted: Wanted, recipe: Recipe, new: str) -> Texts:
    """A requirement written anew where it stands; a version that comes from ARG or ENV is changed there."""
    text = texts.get(wanted.place.file)
    first, last = wanted.place.line, wanted.place.line
    changed = substitute_within(text, first, last, wanted.text, new)
    if changed == text and wanted.place.file == texts.name and wanted.pin:
        pin = new.partition("==")[2]
        for one in recipe.dockerfile.instructions:
            if one.keyword in ("ARG", "ENV") and pin:
                pattern = rf"=(['\"]?){re.escape(wanted.pin)}\1(?=\s|$)"
                lines = text.splitlines(keepends=True)
                for number in range(one.first - 1, one.last):
                    lines[number] = re.sub(pattern, lambda m: f"={m[1]}{pin}{m[1]}", lines[number])
                changed = "".join(lines)
                if changed != text:
                    break
    return texts.replaced(wanted.place.file, changed)


def _file_step(parsed: RequirementFile) -> Step:
    nothing = Instruction("RUN", "", {}, 1, 1)
    install = PipInstall((), (), (), {}, "pip install -r", False, nothing)
    indexes = [value for option, value, _ in parsed.options if "index-url" in option or option == "-i"]
    return Step(install, parsed.wanted, tuple(indexes))
