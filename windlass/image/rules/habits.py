"""Rules about the Dockerfile itself: what makes images large, builds unlike each other, and secrets public. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from windlass.image.bases import base_of
from windlass.image.conflict import Conflict, at, conflict
from windlass.image.edits import with_base
from windlass.image.node import Node
from windlass.image.patch import Texts, insert_after, lines_of, replace_lines
from windlass.image.recipe import Recipe
from windlass.image.shell import commands
from windlass.image.table import facts

CLEANED = re.compile(r"rm\s+(-\w+\s+)*[^&;|]*/var/lib/apt/lists")
SECRET = re.compile(r"(?i)(^|_)(token|password|passwd|secret|api_?key|access_?key)$")
MANAGED_SYSTEMS = ("ubuntu24.04", "debian12", "debian13")
KNOWN_TAGS = {
    "ubuntu": "ubuntu:24.04",
    "debian": "debian:12",
    "python": "python:3.12-slim-bookworm",
}


def latest_tag(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """:latest, or no tag: another image tomorrow."""
    for stage in recipe.dockerfile.stages:
        base = base_of(stage.image)
        if stage.parent is not None or base.pinned or base.image == "scratch" or "$" in base.image:
            continue
        right = KNOWN_TAGS.get(base.repository)
        if base.family == "cuda":
            right = facts()["bases"]["cuda_devel"].get(recipe.cuda or "13.0")
        after = None
        if right and stage.number == recipe.dockerfile.chain()[0].number:
            after = with_base(recipe, right)
        yield conflict(
            recipe,
            "latest",
            "warning",
            f"{stage.image} is another image whenever its owner pushes one; name a version or a digest",
            place=at(recipe, stage.start.first),
            after=after,
            does=f"build on {right}",
        )


def pip_cache(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """pip keeps a copy of every wheel in the layer."""
    for step in recipe.steps:
        install = step.install
        if recipe.texts.dockerfile is None or install.by_uv or install.has("--no-cache-dir"):
            continue
        if recipe.environment.get("PIP_NO_CACHE_DIR") or "cache" in install.instruction.flags.get("mount", ""):
            continue
        first, last = install.instruction.first, install.instruction.last
        text = recipe.texts.dockerfile
        part = lines_of(text, first, last)
        changed = re.sub(r"(\bpip[\d.]*\s+(?:\\\n\s*)?install)(?!\s+--no-cache-dir)\b", r"\1 --no-cache-dir", part)
        yield conflict(
            recipe,
            "pip-cache",
            "warning",
            "pip install without --no-cache-dir keeps every downloaded wheel in the image, gigabytes with torch",
            place=at(recipe, first),
            after=recipe.texts.with_dockerfile(replace_lines(text, first, last, changed)),
            does="add --no-cache-dir",
        )


def apt_habits(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """apt-get: update and install in one RUN, -y, and the lists removed in the same layer."""
    for instruction, text in recipe.runs:
        found = list(commands(text))
        apt = [words for words in found if words[0].rsplit("/", 1)[-1] in ("apt-get", "apt")]
        installs = [words for words in apt if "install" in words]
        updates = any("update" in words for words in apt)
        source = recipe.texts.get(recipe.texts.name)
        first, last = instruction.first, instruction.last
        part = lines_of(source, first, last)
        place = at(recipe, first)
        if updates and not installs and len(found) == 1:
            yield conflict(
                recipe,
                "apt-update-alone",
                "warning",
                "apt-get update in a RUN of its own is cached: later installs use old lists and fail one day",
                place=place,
                after=recipe.texts.with_dockerfile(_joined_update(source, first, last)),
                does="update in the RUN that installs",
            )
        if not installs or instruction.heredocs:
            continue
        asking = [words for words in installs if not _answers(words)]
        if asking:
            changed = re.sub(
                r"\b(apt(?:-get)?)((?:\s+-\S+)*)\s+install\b(?!\s+(?:-\w*y|--yes))", r"\1\2 install -y", part
            )
            yield conflict(
                recipe,
                "apt-asks",
                "error",
                "apt-get install without -y asks a question that nobody answers, and the build stops",
                place=place,
                after=recipe.texts.with_dockerfile(replace_lines(source, first, last, changed)),
                does="add -y",
            )
        if not CLEANED.search(text) and "cache" not in instruction.flags.get("mount", ""):
            changed = part.rstrip("\n").rstrip() + " \\\n    && rm -rf /var/lib/apt/lists/*\n"
            yield conflict(
                recipe,
                "apt-lists",
                "warning",
                "the package lists stay in the layer; nothing uses them later",
                place=place,
                after=recipe.texts.with_dockerfile(replace_lines(source, first, last, changed)),
                does="remove /var/lib/apt/lists in the same RUN",
            )


def _answers(words: list[str]) -> bool:
    return any(re.fullmatch(r"-\w*y\w*|--yes|--assume-yes", word) for word in words if word.startswith("-"))


def _joined_update(source: str, first: int, last: int) -> str:
    """The lone update goes, and the next apt-get install starts with it."""
    rest = "".join(source.splitlines(keepends=True)[last:])
    joined, count = re.subn(r"\b(apt(?:-get)?)((?:\s+-\S+)*\s+install\b)", r"\1 update && \1\2", rest, count=1)
    return "".join(source.splitlines(keepends=True)[: first - 1]) + joined if count else source


def compiler_for_torch(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """torch.compile and Triton call a C compiler and need Python's headers while a run goes."""
    base = recipe.base
    if not recipe.torch or recipe.cuda == "cpu" or not base or base.has_compiler is not False:
        return
    has = recipe.apt_packages
    gcc = bool(has & {"gcc", "g++", "build-essential", "clang"})
    headers = base.family != "system" and base.family != "cuda"
    headers = headers or any(re.fullmatch(r"(lib)?python3(\.\d+)?-dev", name) for name in has)
    missing = [*(() if gcc else ("gcc", "libc6-dev")), *(() if headers else ("python3-dev",))]
    if not missing or recipe.texts.dockerfile is None:
        return
    stage = recipe.dockerfile.chain()[0]
    line = f"RUN apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)} \\\n"
    new = line + "    && rm -rf /var/lib/apt/lists/*"
    yield conflict(
        recipe,
        "no-compiler",
        "warning",
        f"torch.compile calls a C compiler on the nodes, and {base.image} lacks {' and '.join(missing)}",
        place=at(recipe, stage.start.first),
        after=recipe.texts.with_dockerfile(insert_after(recipe.texts.dockerfile, stage.start.last, new)),
        does=f"install {', '.join(missing)}",
    )


def externally_managed(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """Newer systems refuse pip in their own Python."""
    base = recipe.base
    if not base or base.system not in MANAGED_SYSTEMS or base.family not in ("system", "cuda"):
        return
    if recipe.environment.get("PIP_BREAK_SYSTEM_PACKAGES") or recipe.environment.get("VIRTUAL_ENV"):
        return
    if any(re.search(r"\b(venv|virtualenv|conda|EXTERNALLY-MANAGED)\b", text) for _, text in recipe.runs):
        return
    for step in recipe.steps:
        if step.install.has("--break-system-packages", "--target", "-t", "--prefix") or recipe.texts.dockerfile is None:
            continue
        if "/" in step.install.command.split()[0]:  # a pip of its own
            continue
        start = recipe.dockerfile.chain()[0].start
        new = "ENV PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1"
        yield conflict(
            recipe,
            "externally-managed",
            "error",
            f"pip refuses to install into the Python of {base.system}: externally-managed-environment",
            place=at(recipe, step.install.instruction.first),
            after=recipe.texts.with_dockerfile(insert_after(recipe.texts.dockerfile, start.last, new)),
            does="allow it: the image holds nothing that pip could break",
        )
        return


def secrets(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """A token in ENV or ARG can be read by everyone who can pull the image."""
    for one in recipe.dockerfile.instructions:
        if one.keyword not in ("ENV", "ARG"):
            continue
        for name, value in re.findall(r"(\w+)[= ](\S+)", one.words):
            if SECRET.search(name) and value.strip("\"'") and not value.strip("\"'").startswith("$"):
                yield Conflict(
                    "secret",
                    "error",
                    f"{name} is written into the image, where everyone who pulls it can read it; "
                    "give it to the run, or to one RUN by --mount=type=secret",
                    at(recipe, one.first),
                    (f"{one.keyword} {name}=…",),
                )


def conda(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """conda and pip do not know of each other's packages."""
    for program in ("conda", "mamba", "micromamba"):
        instruction = recipe.calls(program)
        if instruction and recipe.wanted:
            yield conflict(
                recipe,
                "conda-and-pip",
                "warning",
                f"{program} and pip install into one image and replace each other's packages without a word; "
                "what conda brings is not checked here",
                place=at(recipe, instruction.first),
            )
            return


def library_path(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """LD_LIBRARY_PATH and LD_PRELOAD that put another NCCL, or CUDA's compatibility libraries, before torch's own."""
    for one in recipe.dockerfile.instructions:
        if one.keyword != "ENV" or one.stage not in {stage.number for stage in recipe.dockerfile.chain()}:
            continue
        if re.search(r"LD_(LIBRARY_PATH|PRELOAD)\W+\S*cuda[^:\s]*/compat", one.words):
            yield conflict(
                recipe,
                "cuda-compat",
                "error",
                "CUDA's compatibility libraries hide the driver's own: error 803 or 804 where the driver is newer",
                place=at(recipe, one.first),
                after=_without_compat(recipe, one.first, one.last),
                does="take the compatibility libraries out of the path",
            )
        if recipe.torch and re.search(r"LD_PRELOAD\W+\S*libnccl\.so", one.words):
            yield conflict(
                recipe,
                "nccl-preloaded",
                "error",
                "LD_PRELOAD puts another NCCL under torch than the one that it was built with",
                place=at(recipe, one.first),
                after=_without_line(recipe, one.first, one.last) if len(one.words.split()) == 1 else None,
                does="leave NCCL to torch",
            )


def _without_compat(recipe: Recipe, first: int, last: int) -> Texts:
    text = recipe.texts.get(recipe.texts.name)
    folder = r"[^:\s\"'=]*cuda[^:\s\"']*/compat[^:\s\"']*"
    part = re.sub(rf"{folder}:|:{folder}|{folder}", "", lines_of(text, first, last))
    return recipe.texts.with_dockerfile(replace_lines(text, first, last, part))


def _without_line(recipe: Recipe, first: int, last: int) -> Texts:
    return recipe.texts.with_dockerfile(replace_lines(recipe.texts.get(recipe.texts.name), first, last, ""))
