"""Rules about torch itself: its CUDA, the base image, Python, the driver, the GPU and the platform. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from windlass.image.conflict import Conflict, at, conflict
from windlass.image.edits import best_build, with_base, with_build
from windlass.image.node import Node
from windlass.image.patch import lines_of, remove_word, replace_lines
from windlass.image.recipe import Recipe, rewrite
from windlass.image.requirements import wheel_of
from windlass.image.rules.companions import COMPILED_AGAINST_TORCH
from windlass.image.table import facts, minimum_driver, releases, version_of


def torch_cuda(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """The index asked for CUDA that this torch is not built with."""
    wanted, known, cuda = recipe.torch_wanted, recipe.release, recipe.cuda
    if not wanted or not known or not cuda or cuda == "cpu" or recipe.build:
        return
    chosen = best_build(known.version, node) or known.pypi
    others = ", ".join(one.cuda for one in known.builds)
    yield conflict(
        recipe,
        "torch-cuda",
        "error",
        f"torch {known.version} has no build with CUDA {cuda}; it has {others}",
        place=wanted.place,
        after=with_build(recipe, chosen),
        does=f"take torch {known.version} built with CUDA {chosen.cuda}",
    )


def base_cuda(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """The toolkit of the base image and torch's CUDA differ in their major version."""
    base, cuda = recipe.base, recipe.cuda
    if not base or not base.cuda or not cuda or cuda == "cpu" or base.torch or not recipe.torch_wanted:
        return
    if base.cuda.split(".")[0] == cuda.split(".")[0]:
        return
    compiled = [one.name for one in recipe.wanted if one.name in COMPILED_AGAINST_TORCH]
    stage = recipe.dockerfile.chain()[0]
    tags = facts()["bases"]["cuda_devel"]
    after = None
    if cuda in tags and recipe.texts.dockerfile is not None:
        flavour = re.search(r"-(cudnn-)?(devel|runtime|base)-", base.tag or "")
        image = tags[cuda].replace("-devel-", flavour[0]) if flavour else tags[cuda]
        after = with_base(recipe, image)
    yield conflict(
        recipe,
        "base-cuda",
        "error" if base.has_nvcc and compiled else "warning",
        f"the base image has CUDA {base.cuda} but torch is built with CUDA {cuda}: "
        + (f"{compiled[0]} would be compiled against the wrong one" if compiled else "two CUDA runtimes in one image"),
        place=at(recipe, stage.start.first),
        after=after,
        does=f"build on CUDA {cuda}",
    )


def base_torch(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """The base image brings torch, and pip would put another one beside it."""
    base, wanted = recipe.base, recipe.torch_wanted
    if not base or not wanted or wanted.requirement is None:
        return
    if base.family == "nvidia-torch" and wanted.pin:
        text = "NVIDIA's own build of torch"
    elif base.torch and not wanted.requirement.specifier.contains(base.torch):
        text = f"torch {base.torch}"
    else:
        return
    after = None
    if wanted.place.file in recipe.texts.files:
        whole = recipe.texts.files[wanted.place.file]
        after = recipe.texts.replaced(wanted.place.file, replace_lines(whole, wanted.place.line, wanted.place.line, ""))
    elif len(recipe.step_of(wanted).wanted) > 1:
        one = recipe.step_of(wanted).install.instruction
        after = recipe.texts.with_dockerfile(
            remove_word(recipe.texts.get(recipe.texts.name), one.first, one.last, wanted.text)
        )
    yield conflict(
        recipe,
        "base-torch",
        "error",
        f"the base image brings {text}, and {wanted.text} would replace it with another build",
        place=wanted.place,
        after=after,
        does="keep the base image's torch",
    )


def python_of_torch(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """No wheel of this torch for this Python."""
    known, python, wanted = recipe.release, recipe.python, recipe.torch_wanted
    if not known or not python or not wanted or python in known.python:
        return
    fitting = [one for one in known.python if Version(one) >= Version("3.11")] or list(known.python)
    after = None
    if recipe.base and recipe.base.family == "python" and recipe.texts.dockerfile is not None:
        nearest = min(fitting, key=lambda one: abs(Version(one).minor - Version(python).minor))
        after = with_base(recipe, recipe.base.image.replace(f":{python}", f":{nearest}"))
    yield conflict(
        recipe,
        "python-of-torch",
        "error",
        f"torch {known.version} has no wheel for Python {python}; it has wheels for {', '.join(known.python)}",
        place=wanted.place,
        after=after,
        does=f"build on Python {fitting[0]}" if after is None else "build on a Python that torch has wheels for",
    )


def driver_too_old(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """The node's driver does not run programs of this CUDA."""
    if not node.driver or not recipe.cuda or recipe.cuda == "cpu" or not recipe.torch:
        return
    needed = minimum_driver(recipe.cuda)
    if version_of(node.driver) >= Version(needed):
        return
    chosen = best_build(recipe.torch, node) or next(
        (
            build
            for one in releases()
            if (build := best_build(one.version, node)) and recipe.python in (None, *one.python)
        ),
        None,
    )
    wanted = recipe.torch_wanted
    yield conflict(
        recipe,
        "driver-too-old",
        "error",
        f"torch {recipe.torch} with CUDA {recipe.cuda} needs driver {needed} or newer; the nodes have {node.driver}",
        place=wanted.place if wanted else None,
        evidence=() if wanted else (f"driver {node.driver}",),
        after=with_build(recipe, chosen) if chosen and wanted else None,
        does=f"take torch {chosen.torch} built with CUDA {chosen.cuda}" if chosen else "",
    )


def gpu_too_new(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """torch's build has no code for the GPU."""
    build, capability = recipe.build, node.capability
    if not build or not capability or build.runs_on(capability, node.platform):
        return
    chosen = best_build(build.torch, node) or next(
        (found for one in releases() if (found := best_build(one.version, node))), None
    )
    yield conflict(
        recipe,
        "gpu-architecture",
        "error",
        f"torch {build.torch} with CUDA {build.cuda} has no code for {node.gpu} (compute capability {capability})",
        place=recipe.torch_wanted.place if recipe.torch_wanted else None,
        after=with_build(recipe, chosen) if chosen and recipe.torch_wanted else None,
        does=f"take torch {chosen.torch} built with CUDA {chosen.cuda}" if chosen else "",
    )


def unpinned_torch(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """torch without a version is another torch next month."""
    wanted = recipe.torch_wanted
    if not wanted or wanted.pin or wanted.url or not recipe.torch:
        return
    yield conflict(
        recipe,
        "unpinned-torch",
        "warning",
        f"{wanted.text!r} is whatever is newest on the day of the build, {recipe.torch} today",
        place=wanted.place,
        after=rewrite(recipe.texts, wanted, recipe, f"torch=={recipe.torch}"),
        does=f"pin torch {recipe.torch}",
    )


def wrong_platform(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """A stage or a wheel for another machine than the nodes."""
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}[node.platform]
    for stage in recipe.dockerfile.chain():
        if stage.platform and stage.platform.startswith("linux/") and stage.platform != node.platform:
            line = stage.start.first
            text = recipe.texts.get(recipe.texts.name)
            new = lines_of(text, line, line).replace(f"--platform={stage.platform}", f"--platform={node.platform}")
            yield conflict(
                recipe,
                "platform",
                "error",
                f"the image is made for {stage.platform} but the nodes are {node.platform}: exec format error",
                place=at(recipe, line),
                after=recipe.texts.with_dockerfile(replace_lines(text, line, line, new)),
                does=f"build for {node.platform}",
            )
    for wanted in recipe.wanted:
        wheel = wheel_of(wanted.url) if wanted.url else None
        machines = {tag.split("-")[-1] for tag in wheel[2]} if wheel else set()
        if machines and not any(one == "any" or one.endswith(machine) for one in machines):
            yield conflict(
                recipe,
                "wheel-platform",
                "error",
                f"this wheel is for {', '.join(sorted(machines))} but the nodes are {node.platform}",
                place=wanted.place,
            )
