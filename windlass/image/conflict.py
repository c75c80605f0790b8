"""One conflict in a recipe: what is wrong, where, how sure, and the change that removes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.image.node import Node
from windlass.image.patch import Fix, Texts, fix_from
from windlass.image.recipe import Recipe
from windlass.image.requirements import Place

Severity = Literal["error", "warning"]
Rule = Callable[["Recipe", "Node"], Iterator["Conflict"]]


@dataclass(frozen=True)
class Conflict:
    """`error`: the build, the import or the run will fail. `warning`: it works, and will hurt."""

    id: str
    severity: Severity
    sentence: str
    place: Place | None = None
    evidence: tuple[str, ...] = ()
    fix: Fix | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity,
            "sentence": self.sentence,
            "place": str(self.place) if self.place else None,
            "evidence": list(self.evidence),
            "fix": self.fix.sentence if self.fix else None,
        }


def conflict(
    recipe: Recipe,
    id: str,
    severity: Severity,
    sentence: str,
    *,
    place: Place | None = None,
    evidence: tuple[str, ...] = (),
    after: Texts | None = None,
    does: str = "",
) -> Conflict:
    """A conflict at a place, with the texts that would be right."""
    shown = evidence or ((recipe.lines(place),) if place else ())
    fix = fix_from(recipe.texts, after, id, does, shown) if after is not None else None
    return Conflict(id, severity, sentence, place, shown, fix)


def at(recipe: Recipe, line: int) -> Place:
    """A line of the Dockerfile."""
    return Place(recipe.texts.name, line)
