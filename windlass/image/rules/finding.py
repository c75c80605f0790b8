"""One thing that is wrong with an image: what, on which line, how sure, and the changes that may heal it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from windlass.image.facts.node import Node
from windlass.image.read.dockerfile import Dockerfile, Stage, parse_dockerfile
from windlass.image.read.requirements import Place
from windlass.image.read.texts import Texts
from windlass.image.state.model import Trace, Where
from windlass.image.state.resolver import Index

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Repair:
    """A change that may remove a finding. It is proposed only where it does, and moves nothing else."""

    sentence: str
    edit: Callable[[Texts], Texts | None]
    moves: frozenset[str] = frozenset()  # packages whose version it is meant to change


@dataclass(frozen=True)
class Finding:
    """`error`: the build, the import or the run will fail. `warning`: a remark, which changes nothing."""

    id: str
    severity: Severity
    sentence: str
    where: Where | None = None
    evidence: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = field(default=(), repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """The same trouble in another version of the files."""
        return self.id, self.sentence.split(":")[0].split(" ")[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity,
            "sentence": self.sentence,
            "place": str(self.where.place) if self.where else None,
            "cause": str(self.where.cause) if self.where else None,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True)
class Case:
    """What rules look at."""

    trace: Trace
    node: Node
    texts: Texts
    index: Index

    def line(self, where: Where) -> str:
        """The line that a finding is about."""
        try:
            return self.texts.get(where.cause.file).splitlines()[where.cause.line - 1].strip()
        except (KeyError, IndexError):
            return ""

    @cached_property
    def dockerfile(self) -> Dockerfile:
        return parse_dockerfile(self.texts.dockerfile or "")

    def stages(self) -> tuple[Stage, ...]:
        """The stages that the final image goes back to."""
        return self.dockerfile.chain(str(self.trace.final_stage))

    def where_of(self, line: int) -> Where:
        place = Place(self.texts.name, line)
        one = next(
            (
                instruction
                for instruction in self.dockerfile.instructions
                if instruction.first <= line <= instruction.last
            ),
            None,
        )
        return Where(place, place, one.first if one else line, one.last if one else line)

    def base_where(self, stage: Stage | None = None) -> Where:
        """The FROM of the image that a stage goes back to."""
        return self.where_of((stage or self.stages()[0]).start.first)

    def error(self, id: str, sentence: str, where: Where, *repairs: Repair) -> Finding:
        return Finding(id, "error", sentence, where, (self.line(where),), repairs)

    def remark(self, id: str, sentence: str, where: Where) -> Finding:
        return Finding(id, "warning", sentence, where, (self.line(where),))


Rule = Callable[[Case], Iterator[Finding]]
