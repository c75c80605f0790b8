"""The changes that rules and fixes make: another build of torch, another base, a requirement less. Pure."""

from __future__ import annotations

import re

from packaging.version import Version

from windlass.image.node import Node
from windlass.image.parsing import parse_dockerfile
from windlass.image.patch import Texts, insert_after, lines_of, remove_word, replace_lines, substitute_within
from windlass.image.recipe import CUDA_INDEX, Recipe, Step, rewrite
from windlass.image.requirements import Wanted
from windlass.image.table import PYPI, Build, companion, release, version_of


def best_build(torch: str, node: Node) -> Build | None:
    """The build of a torch release that a node can run: PyPI's where it can, else the newest CUDA."""
    known = release(torch)
    for build in known.builds if known else ():
        fits = not node.driver or version_of(node.driver) >= Version(build.minimum_driver)
        if (
            fits
            and build.status != "experimental"
            and (not node.capability or build.runs_on(node.capability, node.platform))
        ):
            return build
    return None


def with_build(recipe: Recipe, build: Build) -> Texts:
    """The texts with torch and its companions of one build, from that build's index."""
    texts = recipe.texts
    for name in ("torch", "torchvision", "torchaudio"):
        wanted = recipe.asked(name)
        version = build.torch if name == "torch" else companion(name, build.torch)
        if wanted and version and not wanted.url:
            texts = rewrite(texts, wanted, Recipe(texts), f"{name}=={version}")
    wanted = Recipe(texts).torch_wanted
    if wanted is None:
        return texts
    step = Recipe(texts).step_of(wanted)
    return _with_index(texts, step, wanted, build.index)


def _with_index(texts: Texts, step: Step, wanted: Wanted, index: str | None) -> Texts:
    """torch's index in the command or the file that has it; a new one beside the request for torch."""
    backend = next(iter(step.install.values("--torch-backend")), None)
    if backend and texts.dockerfile is not None:
        tag = index.rsplit("/", 1)[-1] if index else "auto"
        first, last = step.install.instruction.first, step.install.instruction.last
        part = lines_of(texts.dockerfile, first, last).replace(backend, tag)
        return texts.with_dockerfile(replace_lines(texts.dockerfile, first, last, part))
    for name in (wanted.place.file, *({texts.name} if texts.dockerfile else ())):
        text = texts.get(name)
        for url in step.indexes:
            if CUDA_INDEX.search(url) and url in text:
                return texts.replaced(name, text.replace(url, index or PYPI))
    if index is None:
        return texts
    text = texts.get(wanted.place.file)
    local = re.search(r"whl/(cu\d+)", index)
    pinned = f"{wanted.text}+{local[1]}" if local and wanted.pin and "+" not in wanted.text else wanted.text
    line = wanted.place.line
    if wanted.place.file == texts.name:
        new = f"{pinned} --extra-index-url {index}"
        changed = substitute_within(text, line, line, wanted.text, new)
        return texts.with_dockerfile(
            changed if changed != text else with_option(text, step, f"--extra-index-url {index}")
        )
    return texts.replaced(wanted.place.file, replace_lines(text, line, line, f"--extra-index-url {index}\n{pinned}"))


def with_option(text: str, step: Step, option: str) -> str:
    """A Dockerfile with one more option of a pip command."""
    first, last = step.install.instruction.first, step.install.instruction.last
    changed = re.sub(
        r"(\bpip[\d.]*\s+install)\b", lambda match: f"{match[1]} {option}", lines_of(text, first, last), count=1
    )
    return replace_lines(text, first, last, changed)


def with_base(recipe: Recipe, image: str) -> Texts:
    """The texts with another base image in the FROM that the final image goes back to."""
    start = recipe.dockerfile.chain()[0].start
    text = recipe.texts.get(recipe.texts.name)
    line = lines_of(text, start.first, start.last).replace(start.words.split()[0], image, 1)
    return recipe.texts.with_dockerfile(replace_lines(text, start.first, start.last, line))


def without(recipe: Recipe, wanted: Wanted) -> Texts:
    """The texts without one requirement; the same where a command would be left with nothing to install."""
    text = recipe.texts.get(wanted.place.file)
    if wanted.place.file != recipe.texts.name:
        return recipe.texts.replaced(wanted.place.file, replace_lines(text, wanted.place.line, wanted.place.line, ""))
    step = recipe.step_of(wanted)
    if len(step.install.requirements) + len(step.install.files) < 2:
        return recipe.texts
    first, last = step.install.instruction.first, step.install.instruction.last
    return recipe.texts.with_dockerfile(remove_word(text, first, last, wanted.text))


def compiled_alone(recipe: Recipe, wanted: Wanted, requirement: str) -> Texts | None:
    """A package that compiles against torch, moved to a command of its own after everything else."""
    if recipe.texts.dockerfile is None:
        return None
    step = recipe.step_of(wanted)
    alone = len(step.wanted) == 1 and not step.asks("torch")
    text, instruction = recipe.texts.dockerfile, step.install.instruction
    if alone and wanted.place.file == recipe.texts.name:
        line = wanted.place.line
        changed = substitute_within(text, line, line, wanted.text, f"--no-build-isolation {requirement}")
        return recipe.texts.with_dockerfile(changed)
    texts = without(recipe, wanted)
    text = texts.dockerfile or ""
    last = next((one.last for one in parse_dockerfile(text).instructions if one.first == instruction.first), None)
    if last is None:
        return None
    command = "uv pip install" if step.install.by_uv else "pip install --no-cache-dir"
    return texts.with_dockerfile(insert_after(text, last, f"RUN {command} --no-build-isolation {requirement}"))
