"""Rules about EFA: the network that a node has, and the libraries without which NCCL falls back to TCP. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from windlass.image.conflict import Conflict, at, conflict
from windlass.image.node import Node
from windlass.image.patch import lines_of, replace_lines
from windlass.image.recipe import Recipe
from windlass.image.table import facts

INSTALLER = re.compile(r"aws-efa-installer-(latest|\d+\.\d+(?:\.\d+)?)\.tar\.gz")


def efa(recipe: Recipe, node: Node) -> Iterator[Conflict]:
    """The EFA installer: there, by version, and new enough for torch's NCCL."""
    known = facts()["efa"]
    for instruction, text in recipe.runs:
        found = INSTALLER.search(text)
        if not found:
            continue
        source = recipe.texts.get(recipe.texts.name)
        first, last = instruction.first, instruction.last
        changed = lines_of(source, first, last).replace(found[1], known["installer"])
        after = recipe.texts.with_dockerfile(replace_lines(source, first, last, changed))
        if found[1] == "latest":
            yield conflict(
                recipe,
                "efa-latest",
                "warning",
                "the latest EFA installer is another one next month, and its plugin may not suit torch's NCCL",
                place=at(recipe, first),
                after=after,
                does=f"take EFA installer {known['installer']}",
            )
        elif Version(found[1]) < Version(known["floor_for_nccl_2_19"]):
            yield conflict(
                recipe,
                "efa-too-old",
                "error",
                f"EFA installer {found[1]} with NCCL 2.19 or newer: unable to register memory; "
                f"{known['floor_for_nccl_2_19']} is the oldest that works",
                place=at(recipe, first),
                after=after,
                does=f"take EFA installer {known['installer']}",
            )
        elif Version(found[1]) < Version(known["plugin_since"]) and not any(
            "ofi-nccl" in text for _, text in recipe.runs
        ):
            yield conflict(
                recipe,
                "efa-without-plugin",
                "error",
                f"EFA installer {found[1]} brings no NCCL plugin ({known['plugin_since']} is the first that does), and "
                "nothing here installs it: NCCL falls back to TCP",
                place=at(recipe, first),
                after=after,
                does=f"take EFA installer {known['installer']}",
            )
        return
    base = recipe.base
    lacks = (
        base is not None and base.family in ("cuda", "torch", "python", "system") and "amazonaws.com" not in base.image
    )
    if node.efa and lacks and recipe.texts.dockerfile is not None and recipe.torch:
        yield Conflict(
            "no-efa",
            "warning",
            f"the nodes have EFA ({node.origin}) but nothing here installs its NCCL plugin: NCCL falls back to TCP "
            "without a word. `windlass image plan` without image.dockerfile shows the lines that install it",
            at(recipe, recipe.dockerfile.chain()[-1].start.first) if recipe.dockerfile.stages else None,
        )
