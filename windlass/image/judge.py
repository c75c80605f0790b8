"""Resolve a Dockerfile and judge it; propose a patch only where it heals: each repair is judged before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from windlass.image.facts.node import Node
from windlass.image.read.texts import Texts
from windlass.image.rules import RULES, Case, Finding, Repair
from windlass.image.state.model import Package, Trace
from windlass.image.state.resolver import Index
from windlass.image.state.walk import walk

MOST_REPAIRS = 8  # more than any file needed; each costs a resolution


@dataclass(frozen=True)
class Verdict:
    """What was found, what was assumed, and what could not be checked."""

    findings: tuple[Finding, ...]
    assumed: tuple[str, ...]
    unknown: tuple[str, ...]
    trace: Trace

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


def judge(
    texts: Texts, node: Node, index: Index, *, arguments: Mapping[str, str] | None = None, target: str | None = None
) -> Verdict:
    trace = walk(texts, node, index, arguments=arguments, target=target)
    if not trace.states:
        return Verdict((), (), tuple(trace.unknown), trace)
    verdict = _judged(Case(trace, node, texts, index))
    if not trace.guarded:
        return verdict
    # What a condition or || decides may have been done or not: only what is wrong either way is said.
    without = walk(texts, node, index, arguments=arguments, target=target, guarded=False)
    keys = {_identity(finding) for finding in _judged(Case(without, node, texts, index)).findings}
    return replace(verdict, findings=tuple(one for one in verdict.findings if _identity(one) in keys))


def _judged(case: Case) -> Verdict:
    found = {(finding.id, str(finding.where), finding.sentence): finding for rule in RULES for finding in rule(case)}
    ordered, trace = sorted(found.values(), key=lambda finding: finding.severity), case.trace
    return Verdict(tuple(ordered), tuple(dict.fromkeys(trace.assumed)), tuple(dict.fromkeys(trace.unknown)), trace)


def _identity(finding: Finding) -> tuple[str, str, str]:
    """The same finding where other packages may be beside it."""
    return *finding.key, str(finding.where)


@dataclass(frozen=True)
class Healed:
    """The files before and after, what each change does, and the verdict on both."""

    texts: Texts
    patched: Texts
    before: Verdict
    after: Verdict
    fixed: tuple[Finding, ...]
    changes: tuple[str, ...]

    @property
    def diff(self) -> str:
        return self.patched.diff(self.texts)


def heal(
    texts: Texts,
    node: Node,
    index: Index,
    *,
    arguments: Mapping[str, str] | None = None,
    target: str | None = None,
    repair: bool = True,
) -> Healed:
    def verdict_on(changed: Texts) -> Verdict:
        return judge(changed, node, index, arguments=arguments, target=target)

    before = current = verdict_on(texts)
    patched = texts
    fixed: list[Finding] = []
    changes: list[str] = []
    withheld: set[tuple[str, str]] = set()
    while repair and len(changes) < MOST_REPAIRS:
        finding = next((error for error in current.errors if error.repairs and error.key not in withheld), None)
        if finding is None:
            break
        for change in finding.repairs:
            made = change.edit(patched)
            if made is None or not made.diff(patched):
                continue
            verdict = verdict_on(made)
            if _heals(finding, change, current, verdict):
                patched, current = made, verdict
                fixed.append(finding)
                changes.append(change.sentence)
                break
        else:
            withheld.add(finding.key)
    if current.errors:  # a patch that leaves an error is no cure: the findings stand without one
        return Healed(texts, texts, before, before, (), ())
    return Healed(texts, patched, before, current, tuple(fixed), tuple(changes))


def _heals(finding: Finding, repair: Repair, before: Verdict, after: Verdict) -> bool:
    """The finding is gone, no error and nothing unknown is new, and no version that the user wrote has moved."""
    keys = {error.key for error in before.errors}
    if any(error.key == finding.key or error.key not in keys for error in after.errors):
        return False
    if len(after.errors) >= len(before.errors) or len(after.unknown) > len(before.unknown):
        return False
    return not _moved(before, after) - repair.moves


def _moved(before: Verdict, after: Verdict) -> set[str]:
    """Packages that the user pinned and that have another version now."""
    old, new = before.trace.final.environments, after.trace.final.environments
    return {
        name
        for prefix, environment in old.items()
        for name, package in environment.packages.items()
        if package.pinned and prefix in new and package.version
        and (other := new[prefix].packages.get(name)) and not _same(package, other)
    }  # fmt: skip


def _same(before: Package, after: Package) -> bool:
    """A pin of a step that could not be resolved says nothing of the build: 2.6.0 may have become 2.6.0+cu124."""
    unresolved = before.wheel == ""
    return after.version == before.version or (unresolved and after.public == before.version)
