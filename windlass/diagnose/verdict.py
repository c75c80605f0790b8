"""The verdict: of all findings the one that is the root, how sure that is, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.diagnose.classes import CLASSES, Kind, Retry
from windlass.diagnose.collectives import by_collectives, read_recorders
from windlass.diagnose.facts import Facts
from windlass.diagnose.findings import VAGUE, Evidence, Finding, Weight, last_errors, log_findings
from windlass.diagnose.recorded import platform_findings
from windlass.diagnose.rhythm import rhythm
from windlass.diagnose.timeline import LogView, parse_log, year_of

MOST_CANDIDATES = 4
MOST_EVIDENCE = 6
SAME_MOMENT_SECONDS = 2.0
LONG_BEFORE_SECONDS = 30.0
# Errors on a device, which a fault of the hardware explains better than the program does.
ON_DEVICE = frozenset(("illegal_memory_access", "segfault", "gpu_runtime", "gpu_count", "unknown"))
DEVICE_ERROR = re.compile(r"CUDA (?:error|driver)|CUDA_ERROR|CU(?:BLAS|DNN)_STATUS|NCCL|NVML|Cuda failure|cudaError")
# What takes a container away: the rank that failed before it was not ended by it.
TAKEN_AWAY = frozenset(["node_lost", "preempted", "evicted_memory", "evicted_disk", "host_oom"])
OPPOSITES = frozenset(("user", "infra"))


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
            "evidence": [evidence.as_dict() for evidence in self.evidence],
            "retry": self.retry,
            "fix": self.fix,
            "candidates": [{"class": name, "confidence": round(confidence, 2)} for name, confidence in self.candidates],
        }


def diagnose(facts: Facts) -> Verdict:
    """The root cause: the earliest failure over all ranks that is not an echo, joined with what the platform knows."""
    year = year_of(facts.logs)
    views = [parse_log(log, year) for log in facts.logs if not log.is_kernel]
    present = [view for view in views if not view.is_previous]
    by_ranks = log_findings(facts, present)
    if not by_ranks and not any(view.progress for view in present):
        by_ranks = log_findings(facts, [view for view in views if view.is_previous])
    by_ranks += by_collectives(present, read_recorders(facts.recorders))
    by_platform = platform_findings(facts)
    errors = list(last_errors(present))
    outcome = _outcome(facts, present, failed=bool(by_ranks or errors))
    if outcome not in ("running", "succeeded") and all(finding.weight <= Weight.ECHO for finding in by_ranks):
        by_ranks += errors
    everything = [*by_ranks, *by_platform]
    strongest = max(by_platform, key=lambda finding: (finding.weight, finding.confidence), default=None)
    root = _root(_first(by_ranks, present), strongest)
    slow = rhythm(facts, present, is_over=outcome == "failed")
    if outcome == "succeeded" and not (root and _contradicts_success(root, by_ranks)):
        return _answer(_plain("succeeded", "its ranks, its pods, its job or its accounting say so", facts, present), [])
    if slow is not None and (root is None or root.weight <= Weight.ASKED):
        return _answer(slow, everything)
    if outcome == "running" and (root is None or root.weight <= Weight.ECHO or root.confidence < 0.5):
        return _answer(_plain("running", "nothing failed, and its pods or steps are under way", facts, present), [])
    if root is None or root.weight <= Weight.ECHO or root.name == "unknown" or _is_undecided(root, everything):
        return _unknown(facts, present, everything)
    return _answer(root, everything)


FAILED_STATES = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
ENDED_WELL = re.compile(
    r"(?:training|run|job).{0,20}(?:finished|complete|done|succeeded)|windlass: finished"
    r"|exit(?:ed)? (?:with )?(?:code )?0\b",
    re.IGNORECASE,
)


def _outcome(facts: Facts, views: Sequence[LogView], *, failed: bool) -> str:
    """succeeded, running, failed or unknown: by the platform, or by the logs where there is nothing else."""
    job = {condition.type.lower(): condition.status for condition in facts.job_conditions}
    if facts.job_failed:
        return "failed"
    if any(job.get(name) == "True" for name in ("complete", "succeeded", "completed", "successcriteriamet")):
        return "succeeded"
    states = [record.state for record in facts.slurm if "." not in record.name]
    states = states or [record.state for record in facts.slurm]
    if states:
        if any(state.startswith(FAILED_STATES) for state in states):
            return "failed"
        if all(state.startswith("COMPLETED") for state in states):
            return "succeeded"
        return "running" if any(state.startswith("RUNNING") for state in states) else "unknown"
    if facts.pods:
        return _outcome_of_pods(facts)
    last = "\n".join(line.text for view in views for line in view.lines[-5:])
    if not failed and ENDED_WELL.search(last):
        return "succeeded"
    return "running" if not failed and any(view.progress for view in views) else "unknown"


def _outcome_of_pods(facts: Facts) -> str:
    phases = {pod.phase for pod in facts.pods}
    now = [
        container for pod in facts.pods for container in pod.containers if container.is_main and not container.is_last
    ]
    if "Failed" in phases or any(
        "Back" in container.reason or (container.state == "terminated" and container.exit_code) for container in now
    ):
        return "failed"
    if phases == {"Succeeded"}:
        return "succeeded"
    if all(pod.running or pod.phase == "Succeeded" for pod in facts.pods):
        return "running"
    starting = any(container.reason in ("ContainerCreating", "PodInitializing") for container in now)
    return "running" if starting or all(pod.node for pod in facts.pods) else "unknown"


def _contradicts_success(root: Finding, by_ranks: Sequence[Finding]) -> bool:
    """A batch script that hides its program's exit code: the traceback is the last thing said."""
    return root in by_ranks and root.weight >= Weight.OWN and root.confidence >= 0.7 and root.kind != "lifecycle"


def _first(findings: Sequence[Finding], views: Sequence[LogView]) -> Finding | None:
    """Of what ranks said: the heaviest, then the earliest, then the one of the rank that torchrun names."""
    own = [finding for finding in findings if finding.name != "echo"]
    if not own:
        return next((finding for finding in map(_lost_connection, findings) if finding), None)
    heaviest = max(finding.weight for finding in own)
    roots = {report.rank for view in views for report in view.reports if report.is_root}
    level = [finding for finding in own if finding.weight == heaviest]
    is_timed = all(finding.time is not None for finding in level)
    root = min(
        level,
        key=lambda finding: (
            round(finding.time or 0.0) if is_timed else 0,
            finding.rank not in roots,
            -finding.confidence,
        ),
    )
    if root.name in VAGUE and root.confidence < 0.8:
        before = [
            finding
            for finding in own
            if Weight.ABSENT <= finding.weight < Weight.OWN
            and finding.time
            and root.time
            and finding.time < root.time - LONG_BEFORE_SECONDS
        ]
        root = min(before, key=lambda finding: finding.time or 0.0, default=root)
    return root


def _lost_connection(echo: Finding) -> Finding | None:
    """An echo of nobody: the connection itself may be what failed."""
    is_lost = re.search(r"connection|socket|nccl|remote|peer", echo.evidence[0].line, re.IGNORECASE)
    is_raised = "Error" in echo.evidence[0].line and "process has died" not in echo.evidence[0].line
    return replace(echo, name="nccl_network", confidence=0.35, weight=Weight.ASKED) if is_lost and is_raised else None


def _root(rank: Finding | None, platform: Finding | None) -> Finding | None:
    """Of a rank's failure and the platform's record, the one that explains the other."""
    if rank is None or platform is None:
        return rank or platform
    if platform.name == rank.name:
        return rank if rank.weight >= Weight.OWN else platform
    if rank.weight < Weight.OWN:
        if platform.name == "time_limit":  # what was said long before the limit is what the time was lost to
            long_before = rank.time and platform.time and rank.time < platform.time - 60.0
            return rank if long_before and rank.weight >= Weight.ABSENT else platform
        return platform if platform.weight >= rank.weight else rank
    if platform.weight < Weight.OWN:
        return rank
    if platform.name == "gpu_hardware":
        fits = rank.name in ON_DEVICE or any(DEVICE_ERROR.search(proof.line) for proof in rank.evidence[:1])
        return replace(platform, evidence=(*platform.evidence, *rank.evidence)) if fits else rank
    if platform.weight == Weight.NODE and platform.name != "host_oom":
        return rank  # a node that is sick now need not have been when the rank failed
    if platform.name in TAKEN_AWAY:
        is_earlier = rank.time and platform.time and rank.time < platform.time - SAME_MOMENT_SECONDS
        return rank if is_earlier or (platform.name == "preempted" and rank.time is None) else platform
    return platform


def _is_undecided(root: Finding, everything: Sequence[Finding]) -> bool:
    """Whether a user's error and one of the infrastructure explain the facts alike, and nothing decides."""
    if root.confidence >= 0.5 or root.kind not in OPPOSITES:
        return False
    return any(
        other.kind in OPPOSITES and other.kind != root.kind and other.weight == root.weight for other in everything
    )


def _plain(name: str, grounds: str, facts: Facts, views: Sequence[LogView]) -> Finding:
    lines = [Evidence(view.name, view.lines[-1].text[:300], view.rank) for view in views if view.lines][:2]
    pods = [Evidence(f"pod {pod.name}", pod.phase, host=pod.node or None) for pod in facts.pods[:2]]
    slurm = [Evidence(record.source, str(record)) for record in facts.slurm[:1]]
    return Finding(name, 0.8, Weight.HINT, (*pods, *slurm, *lines), grounds)


def _answer(root: Finding, everything: Sequence[Finding]) -> Verdict:
    known = CLASSES[root.name]
    near = [
        finding
        for finding in everything
        if finding.name not in (root.name, "echo", "unknown") and finding.weight >= root.weight - 2
    ]
    rivals = [
        finding for finding in near if finding.weight >= min(root.weight, Weight.OWN) and finding.kind != root.kind
    ]
    confidence = max(0.3, root.confidence - 0.2) if rivals else root.confidence
    others = {
        finding.name: min(finding.confidence, confidence) * (0.6 if finding.weight < root.weight else 0.8)
        for finding in near
    }
    supporting = [finding.evidence[0] for finding in everything if finding.name == root.name and finding is not root]
    grounds = root.grounds
    if rivals:
        grounds += f"; but {rivals[0].name} would explain it too"
    if root.confidence < 0.5:
        grounds += "; the facts do not prove it"
    return Verdict(
        name=root.name,
        confidence=confidence,
        cause=known.cause,
        fix=known.fix,
        evidence=tuple(dict.fromkeys((*root.evidence, *supporting)))[:MOST_EVIDENCE],
        candidates=tuple(sorted(others.items(), key=lambda item: -item[1])[:MOST_CANDIDATES]),
        why=grounds,
    )


def _unknown(facts: Facts, views: Sequence[LogView], everything: Sequence[Finding]) -> Verdict:
    lines = [
        Evidence(view.name, line.text[:400], line.rank)
        for view in views
        for line in [line for line in view.lines if line.level in ("ERROR", "FATAL") or ERROR.match(line.text)][:2]
    ]
    lines += [finding.evidence[0] for finding in everything if finding.name != "echo"]
    ended = [(pod, state) for pod in facts.pods for state in pod.containers if state.state == "terminated"]
    lines += [
        Evidence(f"pod {pod.name}", str(state), host=pod.node or None, when=state.time)
        for pod, state in ended
        if state.exit_code
    ][:2]
    possible = {
        finding.name: finding.confidence * 0.5 for finding in everything if finding.name not in ("echo", "unknown")
    }
    known = CLASSES["unknown"]
    return Verdict(
        name="unknown",
        confidence=0.0,
        cause="There are no facts." if facts.is_empty else known.cause,
        fix=known.fix,
        evidence=tuple(dict.fromkeys(lines))[:MOST_EVIDENCE],
        candidates=tuple(list(possible.items())[:MOST_CANDIDATES]),
        why="nothing in the facts tells one class from another",
    )


ERROR = re.compile(r"(?:\w+: )?error\b", re.IGNORECASE)
