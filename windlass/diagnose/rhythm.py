"""What only the rhythm of a run tells: no step for long, one rank slower than the rest, a slow network, a lost loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from statistics import median

from windlass.diagnose.facts import Facts
from windlass.diagnose.findings import Finding, Weight, evidence_of
from windlass.diagnose.reading import moment
from windlass.diagnose.timeline import Line, LogView, clock_text

HANG_SECONDS = 900.0  # without a step, at least
HANG_STEPS = 10.0  # times the usual time between two steps
SLOWER = 1.5  # times the others
FEWEST_TIMES = 3  # of a rank, to compare it
# `compute_time=4.0 s`, `fwd_bwd=5.10s`, `step time: 812 ms`; what waits for others says nothing about a rank.
DURATION = re.compile(
    r"(?P<name>[a-z][a-z_ -]{1,30}?)[ =:\"']{1,4}(?P<number>\d[\d.]{0,11}) ?(?P<unit>ms|s|sec|seconds)?\b",
    re.IGNORECASE,
)
TIMED = re.compile(
    r"time|took|duration|compute|forward|backward|fwd|bwd|step|iter|data|load|optim|elapsed", re.IGNORECASE
)
WAITS = re.compile(
    r"all.?reduce|gather|comm|nccl|sync|wait|barrier|total|collective|remaining|eta|epoch", re.IGNORECASE
)
STRAGGLER = re.compile(r"straggl\w+|slow(?:est)? rank|rank \d+ is (?:[\d.]+ ?x|much) slower", re.IGNORECASE)
NO_STRAGGLER = re.compile(r"no straggl|enabled|disabled|init", re.IGNORECASE)
STALL = re.compile(
    r"no (?:progress|step|new step|heartbeat|iteration)\S* (?:\w+ )?(?:for|in|since) |hang detected"
    r"|(?:appears|seems) (?:to be )?(?:hung|stuck)|stalled for|has not made progress|is (?:hung|stuck)\b",
    re.IGNORECASE,
)
SOCKETS = re.compile(r"Using network Socket|NET/Socket ?: Using|via NET/Socket", re.IGNORECASE)
EXPECTED_FAST = re.compile(
    r"NET/OFI|FI_PROVIDER ?[=:] ?efa|\bEFA\b|NET/IB ?: No device found|libnccl-net\.so|aws-ofi|NCCL_IB_HCA"
    r"|No eligible providers",
    re.IGNORECASE,
)
LOSS = re.compile(r"loss[\"']?\s*[=:]?\s*-?(?P<value>nan|inf|[\d.]+)", re.IGNORECASE)


def rhythm(facts: Facts, views: Sequence[LogView], *, is_over: bool) -> Finding | None:
    """A finding for a job in which nothing failed outright."""
    return (
        _lost_loss(views)
        or _slow_network(facts, views)
        or _straggler(views)
        or (None if is_over else _hang(facts, views))
    )


def _by_lines(name: str, confidence: float, grounds: str, view: LogView, lines: Sequence[Line]) -> Finding:
    evidence = tuple(evidence_of(view.name, line.text, line.time, rank=line.rank) for line in lines)
    return Finding(name, confidence, Weight.ENDED, evidence, grounds)


def _lost_loss(views: Sequence[LogView]) -> Finding | None:
    for view in views:
        losses = [(line, match["value"].lower()) for line in view.lines if (match := LOSS.search(line.text))][-3:]
        if len(losses) == 3 and all(value in ("nan", "inf") for _, value in losses):
            return _by_lines("nan", 0.85, "the last steps have no finite loss", view, [line for line, _ in losses])
    return None


def _slow_network(facts: Facts, views: Sequence[LogView]) -> Finding | None:
    asks = any("efa" in key or "rdma" in key or "hca" in key for pod in facts.pods for key in pod.requests)
    for view in views:
        socket = next((line for line in view.lines if SOCKETS.search(line.text)), None)
        reason = next((line for line in view.lines if EXPECTED_FAST.search(line.text)), None)
        if socket is not None and (asks or reason is not None):
            lines = [line for line in (reason, socket) if line is not None]
            return _by_lines("nccl_slow_fallback", 0.8, "NCCL names the network that it uses", view, lines)
    return None


def _straggler(views: Sequence[LogView]) -> Finding | None:
    for view in views:
        for line in view.lines[-500:]:
            is_told = STRAGGLER.search(line.text) and re.search(r"detect|is |are |: ", line.text)
            if is_told and not NO_STRAGGLER.search(line.text):
                return _by_lines("straggler", 0.75, "the run's own report says so", view, [line])
    by_name: dict[str, dict[int, float]] = {}
    for view in views:
        for name, times in _durations(view).items() if view.rank is not None else ():
            by_name.setdefault(name, {})[view.rank or 0] = median(times[-20:])
    for name, times_of in by_name.items():
        slowest = max(times_of, key=lambda rank: times_of[rank])
        others = [seconds for rank, seconds in times_of.items() if rank != slowest]
        if others and 0 < median(others) * SLOWER <= times_of[slowest]:
            text = f"{name} of rank {slowest}: {times_of[slowest]:.3g}, of the others {median(others):.3g}"
            evidence = evidence_of(f"rank{slowest}", text, rank=slowest)
            grounds = "its steps take longer than those of the other ranks"
            return Finding("straggler", 0.7, Weight.ENDED, (evidence,), grounds)
    return None


def _durations(view: LogView) -> dict[str, list[float]]:
    """The times of its parts of a step that a rank logged, by name."""
    durations: dict[str, list[float]] = {}
    for line in view.lines[-200:]:
        if not re.search(r"step|iter|rank", line.text, re.IGNORECASE):
            continue
        for match in DURATION.finditer(line.text[:600]):
            name = match["name"].strip().lower()
            if TIMED.search(name) and not WAITS.search(name) and (match["unit"] or "time" in name):
                try:
                    durations.setdefault(name, []).append(float(match["number"]))
                except ValueError:
                    continue
    return {name: times for name, times in durations.items() if len(times) >= FEWEST_TIMES}


def _hang(facts: Facts, views: Sequence[LogView]) -> Finding | None:
    for view in views:
        for line in view.lines[-200:]:
            if STALL.search(line.text) and not view.survived(line.order, line.rank):
                return _by_lines("hang", 0.75, "the run's own watch says so", view, [line])
    steps = sorted(line.time for view in views for line, _ in view.progress if line.time is not None)
    if not steps:  # a rank that began and never came to a step
        steps = sorted(line.time for view in views if view.rank is not None for line in view.lines[-1:] if line.time)
    known = [line.time for view in views for line in view.lines]
    known += [event.time for event in facts.events]
    known += [condition.time for node in facts.nodes for condition in node.conditions]
    known += [
        _date(line.text) for view in views if view.is_submission or view.rank is None for line in view.lines[-200:]
    ]
    newest = max((time for time in known if time is not None), default=None)
    if not steps or newest is None:
        return None
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps) if later > earlier]
    silence = newest - steps[-1]
    if silence < max(HANG_SECONDS, median(gaps) * HANG_STEPS if gaps else HANG_SECONDS * 2):
        return None
    text = f"the last step was at {clock_text(steps[-1])}, {silence / 60:.0f} min before the newest fact"
    grounds = "no step for much longer than steps usually take"
    return Finding("hang", 0.7, Weight.ENDED, (evidence_of("logs", text, steps[-1]),), grounds)


DATE = re.compile(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d:\d\d:\d\d) (?:[AP]M )?(?:UTC|GMT)? ?(\d{4})\b")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _date(text: str) -> float | None:
    """The time that `date` or nvidia-smi printed."""
    match = DATE.search(text)
    if match is None or match[1] not in MONTHS:
        return None
    return moment(f"{match[4]}-{MONTHS.index(match[1]) + 1:02d}-{int(match[2]):02d}T{match[3]}Z")
