"""The verdict: of all findings the one that is the root, how sure that is, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.diagnose import findings as look
from windlass.diagnose.classes import CLASSES, Kind, Retry
from windlass.diagnose.facts import Facts
from windlass.diagnose.findings import Evidence, Finding
from windlass.diagnose.rhythm import rhythm
from windlass.diagnose.rules.shapes import ECHO, OWN, SOFT
from windlass.diagnose.timeline import LogView, parse_log, year_of

MOST_CANDIDATES = 4
MOST_EVIDENCE = 6
SAME_MOMENT_SECONDS = 2.0
# What a rank reports when another one is not there: the reason for its absence comes first.
ABSENCE = frozenset(("rendezvous", "dns", "nccl_network", "collective_timeout", "echo", "nccl_efa"))
# Errors on a device, which a fault of the hardware explains better than the program does.
ON_DEVICE = frozenset(
    ("illegal_memory_access", "device_assert", "segfault", "gpu_runtime", "gpu_count", "user_code", "library_clash")
)


@dataclass(frozen=True)
class Verdict:
    """The answer. `confidence` is between 0 and 1; below 0.5 the class is a guess and is called one."""

    name: str
    confidence: float
    cause: str
    fix: str
    evidence: tuple[Evidence, ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    why: str = ""

    @property
    def kind(self) -> Kind:
        return CLASSES[self.name].kind

    @property
    def retry(self) -> Retry:
        return CLASSES[self.name].retry

    def as_dict(self) -> dict[str, Any]:
        return {
            "class": self.name,
            "kind": self.kind,
            "confidence": round(self.confidence, 2),
            "cause": self.cause,
            "why": self.why,
            "evidence": [one.as_dict() for one in self.evidence],
            "retry": self.retry,
            "fix": self.fix,
            "candidates": [{"class": name, "confidence": round(confidence, 2)} for name, confidence in self.candidates],
        }


@dataclass
class Case:
    """Everything that was found about one job."""

    facts: Facts
    views: list[LogView]
    said: list[Finding] = field(default_factory=list)
    others: list[Finding] = field(default_factory=list)

    @property
    def num_progress(self) -> int:
        return sum(len(view.progress) for view in self.views)


def diagnose(facts: Facts) -> Verdict:
    """The root cause: the earliest failure over all ranks that is not an echo, joined with what the platform knows."""
    year = year_of(facts.logs)
    views = [parse_log(log, year) for log in facts.logs if not log.is_kernel]
    present = [view for view in views if not view.is_previous]
    case = Case(facts, present, said=look.said(facts, present))
    if not case.said and not any(view.progress for view in present):
        case.said = look.said(facts, [view for view in views if view.is_previous])
    case.others = [
        *look.ended(facts),
        *look.nodes(facts),
        *look.slurm(facts),
        *look.waiting(facts),
        *look.refused(facts),
    ]
    outcome = _outcome(case)
    root = _root(case)
    if outcome == "succeeded" and (root is None or not _contradicts_success(root)):
        return _answer(case, _plain("succeeded", 0.9, "its pods, its job or its accounting say so", case), [])
    candidates = sorted((*case.said, *case.others), key=lambda one: -one.strength)
    if root is not None and root.strength > ECHO + 3 and not (outcome == "running" and root.strength <= 10):
        return _answer(case, root, candidates)
    slow = rhythm(facts, present, is_over=outcome == "failed")
    if slow is not None:
        return _answer(case, slow, candidates)
    if root is not None and outcome != "running" and root.strength > 2:
        return _answer(case, root, candidates)
    if outcome == "running":
        return _answer(case, _plain("running", 0.8, "nothing failed, and its pods or steps are under way", case), [])
    return _unknown(case, candidates)


def _outcome(case: Case) -> str:
    """succeeded, running, failed or unknown: by the platform, or by the logs where there is nothing else."""
    facts = case.facts
    job = {one.type: one.status for one in facts.job_conditions}
    if job.get("Failed") == "True" or job.get("failed") == "True":
        return "failed"
    if any(job.get(name) == "True" for name in ("Complete", "Succeeded", "Completed", "SuccessCriteriaMet")):
        return "succeeded"
    states = [one.state for one in facts.slurm if "." not in one.name] or [one.state for one in facts.slurm]
    phases = [pod.phase for pod in facts.pods]
    if states:
        if any(
            re.match(
                r"FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF|PREEMPTED|BOOT_FAIL"
                r"|DEADLINE",
                one,
            )
            for one in states
        ):
            return "failed"
        return (
            "succeeded"
            if all(one.startswith("COMPLETED") for one in states)
            else "running"
            if any(one.startswith("RUNNING") for one in states)
            else "unknown"
        )
    if phases:
        if "Failed" in phases:
            return "failed"
        if all(phase == "Succeeded" for phase in phases):
            return "succeeded"
        now = [one for pod in facts.pods for one in pod.containers if one.is_main and not one.is_last]
        broken = [one for one in now if "Back" in one.reason or (one.state == "terminated" and one.exit_code)]
        if broken:
            return "failed"
        if all(pod.running or pod.phase == "Succeeded" for pod in facts.pods):
            return "running"
        starting = [one for one in now if one.reason in ("ContainerCreating", "PodInitializing")]
        return "running" if starting or all(pod.node for pod in facts.pods) else "unknown"
    text = "\n".join(one.text for view in case.views for one in view.lines[-5:])
    if not case.said and re.search(
        r"(?:training|run|job).{0,20}(?:finished|complete|done|succeeded)"
        r"|windlass: finished|exit(?:ed)? (?:with )?(?:code )?0\b",
        text,
        re.IGNORECASE,
    ):
        return "succeeded"
    return "running" if case.num_progress and not case.said else "unknown"


def _contradicts_success(root: Finding) -> bool:
    """A batch script that hides its program's exit code: the traceback is the last thing said."""
    return root.where == "log" and root.strength >= OWN and root.confidence >= 0.7 and root.kind != "lifecycle"


def _root(case: Case) -> Finding | None:
    """The finding that explains the others."""
    said = _earliest(case)
    outside = _strongest(case.others, said)
    if said is None or outside is None:
        return said or outside
    if outside.name == "gpu_hardware" and outside.where == "node":
        fits = said.strength <= SOFT + 5 or (said.name in ON_DEVICE and _mentions_device(said))
        return replace(outside, evidence=(*outside.evidence, *said.evidence)) if fits else said
    if said.strength >= OWN and outside.strength > said.strength:
        is_earlier = (
            said.time is not None and outside.time is not None and said.time < outside.time - SAME_MOMENT_SECONDS
        )
        killed_later = is_earlier and outside.name in (
            "node_lost",
            "preempted",
            "evicted_memory",
            "evicted_disk",
            "host_oom",
            "cancelled",
        )
        is_certain = outside.where in ("state", "slurm") and not killed_later
        if outside.where == "node" and outside.name != "host_oom":
            is_certain = False  # a node that is sick now need not have been when the rank failed
        if outside.name == "preempted" and said.time is None:
            is_certain = False
        return outside if is_certain else said
    if said.name in ABSENCE and said.strength < OWN and outside.strength >= 20:
        return outside
    if outside.name == "time_limit" and said.strength < OWN:
        return outside if _is_at_the_end(said, outside) else said
    return outside if outside.strength > said.strength else said


def _mentions_device(finding: Finding) -> bool:
    return any(re.search(r"cuda|nccl|cublas|cudnn|device|gpu", one.line, re.IGNORECASE) for one in finding.evidence)


def _is_at_the_end(said: Finding, limit: Finding) -> bool:
    if said.time is None or limit.time is None:
        return said.strength <= 15
    return said.time > limit.time - 60.0


def _earliest(case: Case) -> Finding | None:
    """Of what was said: what fails by itself before what fails because of others, then the earlier."""
    found = [one for one in case.said if one.name != "echo"]
    if not found:
        echoes = [one for one in case.said if one.name == "echo" and one.rule and one.rule.where == "raised"]
        lost = [
            one
            for one in echoes
            if re.search(r"connection|socket|nccl|remote|peer", one.evidence[0].line, re.IGNORECASE)
        ]
        return replace(lost[0], name="nccl_network", confidence=0.35) if lost else None
    roots = {report.rank for view in case.views for report in view.reports if report.is_root}
    best = max(one.strength for one in found)
    own = (
        [one for one in found if one.strength >= min(best, OWN) - 1]
        if best >= OWN
        else [one for one in found if one.strength == best]
    )
    times = [one.time for one in own]
    if all(time is not None for time in times):
        own.sort(key=lambda one: (round(one.time or 0.0), one.rank not in roots))
    else:
        own.sort(key=lambda one: (one.rank not in roots, -one.confidence))
    root = own[0]
    earlier = [
        one
        for one in found
        if SOFT - 5 <= one.strength < OWN - 1 and one.time and root.time and one.time < root.time - 30.0
    ]
    if best >= OWN and earlier and root.name in ("user_code", "user_data", "segfault") and root.confidence < 0.8:
        root = min(earlier, key=lambda one: one.time or 0.0)
    return root


def _strongest(found: Sequence[Finding], said: Finding | None) -> Finding | None:
    if not found:
        return None
    best = max(one.strength for one in found)
    top = [one for one in found if one.strength >= best - 1]
    top.sort(key=lambda one: (-one.strength, -one.confidence))
    if said is not None:
        same = [one for one in top if one.name == said.name]
        return same[0] if same else top[0]
    return top[0]


def _plain(name: str, confidence: float, why: str, case: Case) -> Finding:
    lines = [Evidence(view.name, view.lines[-1].text[:300], view.rank) for view in case.views if view.lines][:2]
    pods = [Evidence(f"pod {pod.name}", pod.phase, host=pod.node or None) for pod in case.facts.pods[:2]]
    slurm = [Evidence(one.source, str(one)) for one in case.facts.slurm[:1]]
    return Finding(name, confidence, 0, (*pods, *slurm, *lines), why)


def _answer(case: Case, root: Finding, candidates: Sequence[Finding]) -> Verdict:
    known = CLASSES[root.name]
    others: dict[str, float] = {}
    for one in candidates:
        if one.name not in (root.name, "echo") and one.strength >= root.strength - 12 and one.name not in others:
            others[one.name] = min(one.confidence, root.confidence) * (0.6 if one.strength < root.strength else 0.8)
    confidence = root.confidence
    rivals = [
        one
        for one in candidates
        if one.name in others and one.strength >= min(root.strength, OWN) and one.kind != root.kind
    ]
    if rivals:
        confidence = max(0.3, confidence - 0.2)
    supporting = [one.evidence[0] for one in (*case.others, *case.said) if one.name == root.name and one is not root]
    evidence = list(dict.fromkeys((*root.evidence, *supporting)))[:MOST_EVIDENCE]
    return Verdict(
        name=root.name,
        confidence=confidence,
        cause=known.cause,
        fix=known.fix,
        evidence=tuple(evidence),
        candidates=tuple(sorted(others.items(), key=lambda one: -one[1])[:MOST_CANDIDATES]),
        why=_why(root, rivals, len(case.said)),
    )


def _why(root: Finding, rivals: Sequence[Finding], num_said: int) -> str:
    grounds = {
        "log": "it is the earliest failure in the logs that no other failure explains",
        "report": "torchrun names this rank as the first that failed",
        "state": "the cluster recorded it as the state of the container or pod",
        "event": "an event of the cluster says so",
        "job": "the job's own status says so",
        "node": "the node or its kernel reported it",
        "slurm": "Slurm's record of the job says so",
        "start": "the pods have not started, and this is what keeps them",
        "submit": "the submission was answered so",
        "exit": "only an exit code speaks for it",
    }.get(root.where, root.where)
    if rivals:
        grounds += f"; but {rivals[0].name} would explain it too"
    if root.confidence < 0.5:
        grounds += "; the facts do not prove it"
    return grounds


def _unknown(case: Case, candidates: Sequence[Finding]) -> Verdict:
    lines: list[Evidence] = []
    for view in case.views:
        errors = [
            one
            for one in view.lines
            if one.level in ("ERROR", "FATAL") or re.match(r"(?:\w+: )?error\b", one.text, re.IGNORECASE)
        ]
        lines += [Evidence(view.name, one.text[:400], one.rank) for one in errors[:2]]
    ends = [
        (pod, one) for pod in case.facts.pods for one in pod.containers if one.state == "terminated" and one.exit_code
    ]
    lines += [Evidence(f"pod {pod.name}", str(one), host=pod.node or None, when=one.time) for pod, one in ends[:2]]
    possible = {one.name: one.confidence * 0.5 for one in candidates if one.name != "echo"}
    known = CLASSES["unknown"]
    empty = case.facts.is_empty
    return Verdict(
        "unknown", 0.0, "There are no facts." if empty else known.cause, known.fix, tuple(lines[:MOST_EVIDENCE]),
        tuple(list(possible.items())[:MOST_CANDIDATES]), "nothing in the facts tells one class from another",
    )  # fmt: skip
