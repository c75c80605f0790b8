"""Remedies for packages that are built from source, and for compiled code that does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.utils import canonicalize_name

from windlass.image.edits import compiled_alone, with_base
from windlass.image.read.texts import Fix, insert_after
from windlass.image.recipe import rewrite
from windlass.image.remedies.case import Case
from windlass.image.rules.companions import COMPILED_AGAINST_TORCH
from windlass.image.facts.table import companion, facts

MODULES = {  # module → package, where they differ
    "Cython": "cython",
    "pybind11": "pybind11",
    "pkg_resources": "setuptools<81",
    "distutils": "setuptools",
    "skbuild": "scikit-build",
    "skbuild_core": "scikit-build-core",
    "yaml": "pyyaml",
}
BUILD_MODULES = (
    *MODULES,
    "setuptools",
    "wheel",
    "packaging",
    "psutil",
    "ninja",
    "numpy",
    "cmake",
    "einops",
    "hatchling",
)


def torch_at_build(case: Case) -> Iterator[Fix]:
    """A package that imports torch while pip builds it where there is none."""
    found = case.log.find(r"No module named 'torch'")
    if not found:
        return
    name = _being_built(case)
    wanted = case.recipe.asked(name) if name else None
    if wanted is None:
        wanted = next((one for one in case.recipe.wanted if one.name in COMPILED_AGAINST_TORCH), None)
    if wanted is None:
        return
    step = case.recipe.step_of(wanted)
    if not step.install.has("--no-build-isolation"):
        after = compiled_alone(case.recipe, wanted, wanted.text)
        if after is not None:
            yield from case.fix(
                f"no-build-isolation:{wanted.name}",
                f"{wanted.name} imports torch while it is built: install it after torch, without build isolation",
                after,
                found.line,
            )
    elif case.failed and not case.recipe.torch_wanted:
        text = case.before_failure("RUN pip install --no-cache-dir torch")
        yield from case.fix("torch-first", f"{wanted.name} needs torch before it", text, found.line)


def module_at_build(case: Case) -> Iterator[Fix]:
    """Without build isolation pip installs none of the modules that a build imports."""
    found = case.log.find(r"ModuleNotFoundError: No module named '([\w]+)")
    if not found or found.match[1] not in BUILD_MODULES or not case.failed:
        return
    package = MODULES.get(found.match[1], found.match[1])
    text = insert_after(case.dockerfile, case.failed.first - 1, f"RUN pip install --no-cache-dir '{package}'")
    yield from case.fix(
        f"build-needs:{package}", f"the build imports {found.match[1]}: install {package} before it", text, found.line
    )


def nvcc(case: Case) -> Iterator[Fix]:
    """CUDA's compiler is in the devel images alone."""
    found = case.log.find(r"CUDA_HOME environment variable is not set|nvcc was not found|nvcc: (?:command )?not found")
    base = case.recipe.base
    if not found or not base or base.has_nvcc:
        return
    image = None
    if base.family == "cuda" and base.tag:
        image = re.sub(r"-(?:cudnn\d*-)?(?:runtime|base)-", "-devel-", base.image)
    elif base.family == "torch" and base.image.endswith("-runtime"):
        image = base.image.removesuffix("-runtime") + "-devel"
    elif base.family == "system" and base.system == "ubuntu24.04":
        image = facts()["bases"]["cuda_devel"].get(case.recipe.cuda or "")
    if image:
        yield from case.fix(
            "devel-base", f"nvcc is missing: build on {image}", with_base(case.recipe, image), found.line
        )


def managed_python(case: Case) -> Iterator[Fix]:
    found = case.log.find(r"externally-managed-environment")
    start = case.recipe.dockerfile.last
    if found and start and "PIP_BREAK_SYSTEM_PACKAGES" not in case.dockerfile:
        text = insert_after(case.dockerfile, start.start.last, "ENV PIP_BREAK_SYSTEM_PACKAGES=1")
        yield from case.fix(
            "break-system-packages", "pip may install into the system's Python of an image", text, found.line
        )


def companion_abi(case: Case) -> Iterator[Fix]:
    """torchvision that was compiled for another torch."""
    found = case.log.find(
        r"operator torchvision::nms does not exist|torchvision.*undefined symbol|_C\.so: undefined symbol"
    )
    wanted, torch = case.recipe.asked("torchvision"), case.recipe.torch
    right = companion("torchvision", torch) if torch else None
    if found and wanted and right and wanted.pin != right:
        after = rewrite(case.texts, wanted, case.recipe, f"torchvision=={right}")
        yield from case.fix(
            f"pair:torchvision=={right}", f"torchvision {right} is made for torch {torch}", after, found.line
        )


def platform(case: Case) -> Iterator[Fix]:
    """A FROM that insists on another machine than the builder's."""
    found = case.log.find(r"[Ee]xec format error")
    if found and re.search(r"(?mi)^FROM\s+--platform=linux/\S+", case.dockerfile):
        text = re.sub(r"(?mi)^(FROM)\s+--platform=linux/\S+", r"\1", case.dockerfile)
        yield from case.fix("platform", "build for the platform that is asked for, not a fixed one", text, found.line)


def _being_built(case: Case) -> str | None:
    """The package whose build failed: from pip's folder names, else the last one that it collected."""
    folders = case.log.all(r"/pip-(?:install|req-build)-\w+/([\w.-]+?)_[0-9a-f]{32}/")
    if folders:
        return canonicalize_name(folders[-1].match[1])
    local = case.log.all(r"^\s*Processing (\S+)")
    if local:
        return canonicalize_name(local[-1].match[1].rstrip("/").rsplit("/", 1)[-1])
    for pattern in (r"Failed to build '?([\w.-]+?)[=']", r"^\s*Collecting ([\w.-]+)", r"╰─> ([\w.-]+)$"):
        found = case.log.all(pattern)
        if found:
            return canonicalize_name(found[-1].match[1])
    return None
