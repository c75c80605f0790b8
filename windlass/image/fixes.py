"""From the log of a failed build to the next thing to try: one different, explained change after another. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from windlass.image.logs import BuildLog, Failure, lines_that_matter, why_failed
from windlass.image.patch import Fix, Texts
from windlass.image.recipe import Recipe
from windlass.image.remedies import REMEDIES, Case

__all__ = ["Failure", "Fix", "lines_that_matter", "proposals", "propose", "why_failed"]


def propose(dockerfile: str, files: Mapping[str, str], log: str, tried: Collection[str]) -> Fix | None:
    """The best change that has not been tried; None where nothing is left that the log gives a reason for."""
    return next((one for one in proposals(dockerfile, files, log) if one.id not in tried), None)


def proposals(dockerfile: str, files: Mapping[str, str], log: str) -> Iterator[Fix]:
    """Every change that the log gives a reason for, the most specific first; the same change only once."""
    case = Case(Recipe(Texts(dockerfile, dict(files))), BuildLog(log))
    ids: set[str] = set()
    results: list[tuple[str, Mapping[str, str]]] = []
    for remedy in REMEDIES:
        for one in remedy(case):
            result = (one.dockerfile, dict(one.files))
            if one.id not in ids and result not in results:
                ids.add(one.id)
                results.append(result)
                yield one
