"""Resolve a Dockerfile and judge it; propose the patch that heals what can be healed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windlass.image.facts.node import Node
from windlass.image.read.texts import Texts
from windlass.image.rules import RULES, Case, Finding
from windlass.image.state.model import Trace
from windlass.image.state.resolver import Index
from windlass.image.state.walk import walk


@dataclass(frozen=True)
class Verdict:
    """What was found, what was assumed, and what could not be checked."""

    findings: tuple[Finding, ...]
    assumed: tuple[str, ...]
    unknown: tuple[str, ...]
    trace: Trace

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.severity == "error")


def judge(
    texts: Texts, node: Node, index: Index, *, arguments: Mapping[str, str] | None = None, target: str | None = None
) -> Verdict:
    trace = walk(texts, node, index, arguments=arguments, target=target)
    if not trace.states:
        return Verdict((), (), tuple(trace.unknown), trace)
    case = Case(trace, node, texts, index)
    found = {(one.id, str(one.where), one.sentence): one for rule in RULES for one in rule(case)}
    ordered = sorted(found.values(), key=lambda one: one.severity)
    return Verdict(tuple(ordered), tuple(dict.fromkeys(trace.assumed)), tuple(dict.fromkeys(trace.unknown)), trace)
