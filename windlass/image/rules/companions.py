"""Rules about what stands beside torch: torchvision, torchaudio, NCCL, flash-attn, HyperPod's agent. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from windlass.image.conflict import Conflict, at, conflict
from windlass.image.edits import best_build, compiled_alone, with_base, with_build, without
from windlass.image.node import Node
from windlass.image.patch import remove_word, replace_lines, substitute_within
from windlass.image.recipe import Recipe, rewrite
from windlass.image.requirements import wheel_of
from windlass.image.table import (
    accepts,
    companion,
    companion_needs,
    facts,
    minor,
    package,
    releases,
    torch_for_companion,
)

COMPILED_AGAINST_TORCH = ("flash-attn", "apex", "transformer-engine", "causal-conv1d", "mamba-ssm", "grouped-gemm")


def companions(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """torchvision and torchaudio are made for one torch."""
    torch = recipe.torch
    for name in ("torchvision", "torchaudio"):
        wanted = recipe.asked(name)
        if not wanted or not wanted.pin or not torch:
            continue
        needs = companion_needs(name, wanted.pin)
        if needs is None or accepts(needs, torch):
            continue
        right = companion(name, torch)
        after, does = None, ""
        if right:
            local = re.search(r"\+\w+", wanted.pin)
            after = rewrite(recipe.texts, wanted, recipe, f"{name}=={right}{local[0] if local else ''}")
            does = f"take {name} {right}, which is made for torch {torch}"
        elif recipe.torch_wanted and recipe.torch_wanted.pin and (older := torch_for_companion(name, wanted.pin)):
            after = rewrite(recipe.texts, recipe.torch_wanted, recipe, f"torch=={older}")
            does = f"take torch {older}: there is no {name} for torch {torch}"
        yield conflict(
            recipe,
            f"{name}-of-torch",
            "error",
            f"{name} {wanted.pin} requires torch{needs}, but the image gets torch {torch}",
            place=wanted.place,
            after=after,
            does=does,
        )


def required_by_torch(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """Packages of which torch requires one version itself."""
    known, build = recipe.release, recipe.build
    required = {"triton": known.triton} if known and known.triton else {}
    if build and build.cudnn:
        required[f"nvidia-cudnn-cu{build.cuda_major}"] = f"=={build.cudnn}"
    for name, specifier in required.items():
        wanted = recipe.asked(name)
        if wanted and wanted.pin and not accepts(specifier, wanted.pin):
            yield conflict(
                recipe,
                f"{name}-of-torch",
                "error",
                f"torch {recipe.torch} requires {name}{specifier}, and {wanted.text} is asked for",
                place=wanted.place,
                after=without(recipe, wanted),
                does=f"leave {name} to torch",
            )


def two_nccl(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """One NCCL: the one that the torch wheel requires."""
    for wanted in recipe.wanted:
        found = re.fullmatch(r"nvidia-nccl-cu(\d+)", wanted.name)
        if not found or not recipe.torch or recipe.cuda in (None, "cpu"):
            continue
        build = recipe.build
        own = f"nvidia-nccl-cu{(recipe.cuda or '').split('.')[0]}"
        known = build.nccl if build else None
        if wanted.name == own and (not wanted.pin or wanted.pin == known):
            continue
        if wanted.name != own:
            reason = f"torch is built with CUDA {recipe.cuda} and brings {own}: two NCCL libraries in one process"
        else:
            reason = f"torch {recipe.torch} requires {f'{own} {known}' if known else f'one version of {own} itself'}"
        yield conflict(
            recipe,
            "two-nccl",
            "error" if wanted.name != own or known else "warning",
            f"{wanted.text} beside torch: {reason}",
            place=wanted.place,
            after=without(recipe, wanted),
            does=f"leave NCCL to torch and drop {wanted.name}",
        )
    for one in recipe.apt:
        packages = [name for name in one.packages if re.match(r"libnccl(2|-dev)\b", name)]
        if packages and recipe.torch and recipe.cuda != "cpu" and recipe.texts.dockerfile is not None:
            text = recipe.texts.dockerfile
            first, last = one.instruction.first, one.instruction.last
            for name in packages:
                shorter = remove_word(text, first, last, name)
                last -= text.count("\n") - shorter.count("\n")
                text = shorter
            only = set(packages) == set(one.packages)
            yield conflict(
                recipe,
                "two-nccl",
                "error",
                f"the system's {packages[0].split('=')[0]} beside the NCCL of the torch wheel: "
                "which one a process loads depends on LD_LIBRARY_PATH",
                place=at(recipe, one.instruction.first),
                after=None if only else recipe.texts.with_dockerfile(text),
                does="leave NCCL to torch",
            )


def flash_attn_wheel(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """A ready flash-attn wheel names the torch, CUDA, C++ ABI, Python and machine that it is made for."""
    for wanted in recipe.wanted:
        wheel = wheel_of(wanted.url) if wanted.url else None
        if not wheel or wanted.name != "flash-attn" or not recipe.torch:
            continue
        local = re.match(r"cu(\d+)torch(\d+\.\d+)cxx11abi(true|false)", wheel[1].local or "")
        problems = []
        if local:
            if local[2] != minor(recipe.torch):
                problems.append(f"torch {local[2]}, not {minor(recipe.torch)}")
            if recipe.cuda and local[1][:2] != recipe.cuda.split(".")[0]:
                problems.append(f"CUDA {local[1][:2]}, not {recipe.cuda}")
            abi = Version(recipe.torch) >= Version(facts()["flash_attention"]["cxx11abi_since"])
            if (local[3] == "true") != abi:
                problems.append(f"the {'new' if local[3] == 'true' else 'old'} C++ ABI, not torch's")
        pythons = {tag.split("-")[0] for tag in wheel[2]}
        own = f"cp{recipe.python.replace('.', '')}" if recipe.python else None
        if own and not any(one == own or one.startswith("py3") for one in pythons):
            problems.append(f"Python {', '.join(sorted(pythons))}, not {recipe.python}")
        if problems:
            plain = f"flash-attn=={wheel[1].public}"
            yield conflict(
                recipe,
                "flash-attn-abi",
                "error",
                f"this flash-attn wheel is made for {'; '.join(problems)}: importing it ends with an undefined symbol",
                place=wanted.place,
                after=compiled_alone(recipe, wanted, plain),
                does="compile flash-attn against the torch of the image",
            )


def compiled_packages(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """What compiles against torch needs torch before it, no build isolation, and nvcc."""
    for wanted in recipe.wanted:
        if wanted.name not in COMPILED_AGAINST_TORCH or (wanted.url and wanted.url.endswith(".whl")):
            continue
        step = recipe.step_of(wanted)
        if not step.install.has("--no-build-isolation") and recipe.texts.dockerfile is not None:
            yield conflict(
                recipe,
                "build-isolation",
                "error",
                f"{wanted.name} imports torch while it is built; pip builds it where there is no torch",
                place=wanted.place,
                after=compiled_alone(recipe, wanted, wanted.text),
                does=f"install {wanted.name} in a command of its own, after torch and with --no-build-isolation",
            )
        base = recipe.base
        if base and base.has_nvcc is False and "nvidia-cuda-toolkit" not in recipe.apt_packages:
            image = facts()["bases"]["cuda_devel"].get(recipe.cuda or "")
            if base.family == "torch":
                image = re.sub("-runtime$", "-devel", base.image)
            elif base.family != "cuda" and base.system != "ubuntu24.04":
                image = None
            yield conflict(
                recipe,
                "no-nvcc",
                "error",
                f"{wanted.name} is compiled with nvcc, which {base.image} does not have",
                place=at(recipe, recipe.dockerfile.chain()[0].start.first),
                after=with_base(recipe, image) if image else None,
                does=f"build on {image}",
            )


def agent(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """HyperPod's elastic agent requires an older torch, and pip would install that one over the image's."""
    wanted = recipe.asked("hyperpod-elastic-agent")
    if not wanted or not recipe.torch:
        return
    needs = package("hyperpod-elastic-agent")["requires"]["torch"]
    if not accepts(needs, recipe.torch):
        fitting = [
            build for one in releases() if accepts(needs, one.version) and (build := best_build(one.version, node))
        ]
        torch = recipe.torch_wanted
        yield conflict(
            recipe,
            "agent-torch",
            "error",
            f"hyperpod-elastic-agent requires torch{needs}: installing it replaces torch {recipe.torch}",
            place=wanted.place,
            after=with_build(recipe, fitting[0]) if fitting and torch else None,
            does=f"take torch {fitting[0].torch} built with CUDA {fitting[0].cuda}" if fitting else "",
        )
        return
    step = recipe.step_of(wanted)
    held = step.asks("torch") or any(one.constraint and one.name == "torch" for one in step.wanted)
    if not held and not step.install.has("--no-deps") and recipe.texts.dockerfile is not None:
        own = recipe.torch_wanted.text if recipe.torch_wanted and recipe.torch_wanted.pin else f"torch=={recipe.torch}"
        text = recipe.texts.get(wanted.place.file)
        if wanted.place.file == recipe.texts.name:
            changed = substitute_within(text, wanted.place.line, wanted.place.line, wanted.text, f"{wanted.text} {own}")
        else:
            changed = replace_lines(text, wanted.place.line, wanted.place.line, f"{wanted.text}\n{own}")
        yield conflict(
            recipe,
            "agent-reinstalls-torch",
            "warning",
            "hyperpod-elastic-agent is installed by a command that does not name torch: pip may replace it",
            place=wanted.place,
            after=recipe.texts.replaced(wanted.place.file, changed),
            does=f"name {own} in the same command",
        )
