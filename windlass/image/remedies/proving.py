"""Remedies for an image that was built and failed its proof: two NCCLs, compiled code that does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from windlass.image.edits import compiled_alone
from windlass.image.facts.node import Node
from windlass.image.read.texts import Fix
from windlass.image.recipe import Recipe
from windlass.image.remedies.case import Case
from windlass.image.rules import companions, torchbuild

NCCL = re.compile(r"nvidia-nccl-cu\d+")

# What a log must speak of before a conflict that reading finds counts as its cause.
READ = (
    (companions.two_nccl, r"(?i)nccl"),
    (companions.flash_attn_wheel, r"flash_attn|undefined symbol"),
    (companions.companions, r"torchvision|torchaudio"),
    (torchbuild.torch_cuda, r"No matching distribution found for torch|torch.*was not found|torch==\S+ is not"),
    (torchbuild.base_torch, r"torch \S+ is loaded|undefined symbol"),
)


def read_conflicts(case: Case) -> Iterator[Fix]:
    """A conflict that can be read from the files and that the log speaks of."""
    for rule, pattern in READ:
        found = case.log.find(pattern)
        if found is None:
            continue
        for one in rule(case.recipe, Node()):
            if one.fix:
                yield Fix(
                    one.id, f"{one.sentence}: {one.fix.sentence}", (found.line,), one.fix.dockerfile, one.fix.files
                )


def second_nccl(case: Case) -> Iterator[Fix]:
    """A second NCCL that another package brings: both write to one folder, so torch's own is put there again."""
    found = case.log.find(r"nvidia-nccl-cu\d+.*nvidia-nccl-cu\d+")
    if not found or not case.recipe.cuda or case.recipe.cuda == "cpu":
        return
    own = f"nvidia-nccl-cu{case.recipe.cuda.split('.')[0]}"
    others = sorted(set(NCCL.findall(found.line)) - {own})
    if not others or own not in found.line:
        return
    build = case.recipe.build
    exact = f"{own}=={build.nccl}" if build and build.nccl else own
    line = f"RUN pip uninstall -y {' '.join(others)} && pip install --no-cache-dir --force-reinstall --no-deps {exact}"
    text = case.dockerfile.rstrip("\n") + f"\n{line}\n"
    yield from case.fix(
        f"one-nccl:{own}", f"leave one NCCL, torch's own {own}, and take {' and '.join(others)} out", text, found.line
    )


def compiled_for_another_torch(case: Case) -> Iterator[Fix]:
    """A compiled package that does not import beside this torch: compile it here."""
    found = case.log.find(r"import (flash_attn|apex|transformer_engine|causal_conv1d|mamba_ssm)\b.*undefined symbol")
    if not found:
        return
    wanted = case.recipe.asked(found.match[1].replace("_", "-"))
    if wanted is None:
        return
    pin = f"=={wanted.pin.split('+')[0]}" if wanted.pin else ""
    after = compiled_alone(Recipe(case.texts), wanted, f"--no-binary {wanted.name} {wanted.name}{pin}")
    if after is not None:
        sentence = f"{wanted.name} was compiled for another torch: compile it against this one"
        yield from case.fix(f"compile:{wanted.name}", sentence, after, found.line)
