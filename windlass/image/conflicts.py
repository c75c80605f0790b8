"""Find every conflict in a recipe, and the one patch that removes those that can be removed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.image.conflict import Conflict
from windlass.image.node import Node
from windlass.image.patch import DOCKERFILE, Texts
from windlass.image.recipe import Recipe
from windlass.image.rules import RULES

MOST_CHANGES = 60  # more than any file needs; a rule that would undo another stops here


@dataclass(frozen=True)
class Patch:
    """The texts after every change that could be made, what was done, and what is left to the user."""

    before: Texts
    after: Texts
    fixed: tuple[Conflict, ...]
    left: tuple[Conflict, ...]

    @property
    def diff(self) -> str:
        return self.after.diff(self.before)


def find_conflicts(
    dockerfile: str | None,
    files: Mapping[str, str] | None = None,
    node: Node | None = None,
    *,
    name: str = DOCKERFILE,
) -> list[Conflict]:
    """The conflicts of a Dockerfile with the requirement files of its context, or of requirement files alone."""
    return _find(Texts(dockerfile, dict(files or {}), name), node or Node())


def _find(texts: Texts, node: Node) -> list[Conflict]:
    recipe = Recipe(texts)
    found = [one for rule in RULES for one in rule(recipe, node)]
    return sorted(found, key=lambda one: one.severity)  # errors first; the order of the rules within


def patch(texts: Texts, node: Node) -> Patch:
    """Make every change, one at a time, each on what the one before left."""
    current, fixed = texts, []
    seen = {_key(texts)}
    for _ in range(MOST_CHANGES):
        for one in _find(current, node):
            if one.fix is None:
                continue
            after = one.fix.apply(current)
            if _key(after) not in seen:
                seen.add(_key(after))
                current = after
                fixed.append(one)
                break
        else:
            break
    return Patch(texts, current, tuple(fixed), tuple(_find(current, node)))


def _key(texts: Texts) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    return texts.dockerfile, tuple(sorted(texts.files.items()))
