"""Findings: a class that a fact speaks for, with its evidence and weight; and those that the logs of ranks give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import Facts
from windlass.diagnose.rules import rules_for
from windlass.diagnose.rules.shapes import Rule, Where
from windlass.diagnose.timeline import CAUGHT, Failure, Line, LogView, Raised, clock_text

MOST_EVIDENCE_CHARACTERS = 600
MOST_SCANNED_LINES = 4000  # at the end of each log; a dying process says why at its end
NEAR_LINES = 80  # before a failure


class Weight(IntEnum):
    """How much a finding says about the root: of two, the heavier one explains the other."""

    HINT = 1  # an exit code alone, the last warning of a log
    ECHO = 2  # the end of another rank, as this one saw it
    ASKED = 3  # somebody asked for the end: scancel, a deletion, Ctrl-C
    ABSENT = 4  # a rank did not come: watchdogs, rendezvous
    TRANSPORT = 5  # a connection, a name or a port failed
    ENDED = 6  # a limit, a preemption or a crash that only a launcher reports
    REPORTED = 7  # an event, a refusal or a reason to wait
    OWN = 8  # a process failed by itself and says how
    NODE = 9  # the node or its kernel reported a fault
    RECORDED = 10  # the platform keeps it as the state of the container, pod or job


# In a log the class says how much: who lost a connection may only have lost a rank that failed by itself.
IN_LOGS = {
    "echo": Weight.ECHO,
    "cancelled": Weight.ASKED,
    **dict.fromkeys(("collective_timeout", "rendezvous", "hang"), Weight.ABSENT),
    **dict.fromkeys(("nccl_network", "nccl_efa", "dns", "port_in_use"), Weight.TRANSPORT),
    **dict.fromkeys(("time_limit", "preempted", "node_lost", "segfault"), Weight.ENDED),
}
# What a signal says by itself: class and confidence. SIGKILL and SIGABRT have too many senders to weigh much.
SIGNALS = {9: ("host_oom", 0.4), 6: ("segfault", 0.5), 11: ("segfault", 0.7), 7: ("shm", 0.6), 4: ("segfault", 0.5)}
TEARDOWN = re.compile(
    r"slurmstepd: error: \*\*\* |Sending process \d+ closing signal|Received \S+ death signal"
    r"|.{0,80}(?:received|got|caught) (?:signal:? )?(?:15\b|SIGTERM)|.{0,60}SIGTERM (?:received|caught)"
    r"|.{0,40}received preemption|srun: (?:forcing|Job step aborted)",
    re.IGNORECASE,
)
CLIENT_ERRORS = re.compile(
    r"(?:\w+\.)*(?:ApiException|ApiError|ForbiddenException|UnauthorizedException|RefusedError|KubernetesException"
    r"|SlurmError)"
)
GUESSES = "There are some potential root causes"  # Ray lists what may end a worker: none of it is evidence
VAGUE = frozenset(("user_code", "user_data", "user_arguments", "echo"))
# Types that Python and programs raise about themselves, never a transport, a device or a disk.
PLAIN = re.compile(
    r"(?:Value|Key|Type|Assertion|Attribute|Index|Name|ZeroDivision|Lookup|NotImplemented|UnboundLocal|Recursion"
    r"|ModuleNotFound|Syntax)Error|StopIteration"
)
USERS_KINDS, PLAIN_KINDS = ("user", "training"), ("user", "training", "image")
# Of a service, a transport or a disk: where no rule knows the message, whose fault it is remains open.
FOREIGN_TYPE = re.compile(
    r"^(?:OS|IO|Environment)Error$|Unavailable|Timeout|Connection|Network|Socket|Capacity|Remote|Server|Service|Quota"
    r"|Rpc|Http"
)

CODE_WORDS = re.compile(
    r"tensor|shape|size|dim|type|expected|got |must|argument|index|module|param|input|output|grad|backward|forward|loss"
    r"|layer|model|attribute|value|batch|mask|attention|None\b|not (?:found|defined|supported|implemented)|invalid",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Evidence:
    source: str
    line: str
    rank: int | None = None
    host: str | None = None
    when: float | None = None

    @property
    def time(self) -> str | None:
        return clock_text(self.when)

    def as_dict(self) -> dict[str, object]:
        return {"source": self.source, "rank": self.rank, "host": self.host, "time": self.time, "line": self.line}


@dataclass(frozen=True)
class Finding:
    """A class that a fact speaks for. `grounds` says in words why it counts."""

    name: str
    confidence: float
    weight: Weight
    evidence: tuple[Evidence, ...]
    grounds: str

    @property
    def time(self) -> float | None:
        return self.evidence[0].when if self.evidence else None

    @property
    def rank(self) -> int | None:
        return self.evidence[0].rank if self.evidence else None

    @property
    def kind(self) -> str:
        return CLASSES[self.name].kind if self.name in CLASSES else "echo"


def evidence_of(
    source: str, text: str, when: float | None = None, *, rank: int | None = None, host: str | None = None
) -> Evidence:
    return Evidence(source, " ".join(text.split())[:MOST_EVIDENCE_CHARACTERS], rank, host or None, when)


def first_rule(where: Where, head: str, body: str) -> Rule | None:
    return next((rule for rule in rules_for(where) if rule.matches(head, body)), None)


def log_findings(facts: Facts, views: Sequence[LogView]) -> list[Finding]:
    """The failures that ranks and launchers report, echoes included; retried and survived ones left out."""
    findings: list[Finding] = []
    for view in views:
        outside = [line for line in view.lines if line.order not in view.covered]
        teardown = next((line.order for line in outside if TEARDOWN.match(line.text)), None)
        for finding, order in [*_exceptions(facts, view), *_fatal_lines(facts, view)]:
            if teardown is not None and order > teardown:  # said while everything was being stopped
                finding = replace(
                    finding, weight=min(finding.weight, Weight.ASKED), confidence=finding.confidence * 0.7
                )
            findings.append(finding)
        findings += _reported(view)
    return [_by_typed_command(finding, views) for finding in findings]


def _exceptions(facts: Facts, view: LogView) -> Iterator[tuple[Finding, int]]:
    for failure in view.failures:
        if view.survived(failure.end, failure.line.rank) or view.was_caught(failure.begin, failure.end):
            continue
        rule, raised = judge(failure)
        if rule.name == "gpu_runtime" and facts.asks_for_gpus is False:
            rule = replace(rule, name="gpu_count")
        finding = _in_log(facts, view, failure.line, rule, raised)
        if failure.in_thread:
            finding = replace(finding, weight=min(finding.weight, Weight.ENDED))
        yield _more_precise(finding, view, failure.begin), failure.end


def judge(failure: Failure) -> tuple[Rule, Raised]:
    """The rule for an exception: its own, or that of the error which it was raised from."""
    own = rule_of(failure.final)
    is_vague = own.name in VAGUE or own.confidence <= 0.6
    is_direct = True
    for raised in reversed(failure.chain[:-1] if is_vague else ()):
        is_direct = is_direct and raised.link == "cause"
        rule = rule_of(raised)
        if rule.name not in VAGUE and (is_direct or (rule.confidence >= 0.7 and rule.name != "user_import")):
            return rule, raised
    return own, failure.final


def rule_of(raised: Raised) -> Rule:
    """The first rule that fits an exception; what the user's own code raises is never the platform's."""
    if CLIENT_ERRORS.fullmatch(raised.type) and (refusal := first_rule("refusal", "", raised.message)):
        return refusal
    frames = "\n".join(f"{file} {code}" for file, code in raised.frames[-12:])
    message = raised.message.partition(GUESSES)[0]
    kinds: tuple[str, ...] | None = USERS_KINDS if raised.is_users_own else None
    if kinds is None and PLAIN.fullmatch(raised.name) and raised.ends_in_users_code:
        kinds = PLAIN_KINDS
    for rule in rules_for("raised"):
        if kinds is not None and (rule.name == "echo" or CLASSES[rule.name].kind not in kinds):
            continue
        if rule.matches(raised.type, message, frames):
            return rule
    if kinds is None and (FOREIGN_TYPE.search(raised.name) or _is_foreign(raised)):
        return Rule("unknown", "raised", None, None, 0.3)
    return Rule("user_code", "raised", None, None, 0.6)


def _is_foreign(raised: Raised) -> bool:
    """Whether a library's error of a general type says nothing about what the program gave it."""
    return (
        bool(raised.frames) and raised.name in ("RuntimeError", "Exception") and not CODE_WORDS.search(raised.message)
    )


def _fatal_lines(facts: Facts, view: LogView) -> Iterator[tuple[Finding, int]]:
    seen: set[str] = set()
    for line in view.lines[-MOST_SCANNED_LINES:]:
        if line.order in view.covered or (line.level in ("INFO", "DEBUG") and line.source == "text"):
            continue
        # a launcher quotes the whole command before it says how it ended
        rule = first_rule("line", "", line.text if len(line.text) <= 1000 else line.text[:700] + line.text[-300:])
        if rule is None or rule.name in seen:
            continue
        if line.level == "WARNING" and IN_LOGS.get(rule.name, Weight.OWN) > Weight.TRANSPORT:
            continue
        if view.survived(line.order, line.rank) or view.was_caught(line.order, line.order):
            continue
        seen.add(rule.name)
        yield _more_precise(_in_log(facts, view, line, rule, None), view, line.order), line.order


def _in_log(facts: Facts, view: LogView, line: Line, rule: Rule, raised: Raised | None) -> Finding:
    host = facts.host_of(line.rank, view.name)
    evidence = [evidence_of(view.name, str(raised) if raised else line.text, line.time, rank=line.rank, host=host)]
    if raised and raised.frames:
        file, code = raised.users_frame
        evidence.append(evidence_of(view.name, f"raised in {file}: {code}", line.time, rank=line.rank))
    weight = IN_LOGS.get(rule.name, Weight.OWN)
    if raised is None and rule.confidence < 0.6:  # a line that may mean something else
        weight = min(weight, Weight.ASKED)
    grounds = "it is the earliest failure in the logs that no other failure explains"
    return Finding(rule.name, rule.confidence, weight, tuple(evidence), grounds)


def _more_precise(finding: Finding, view: LogView, order: int) -> Finding:
    """With what stands shortly before a failure that says little itself."""
    rules = [rule for rule in rules_for("near") if finding.name in rule.of]
    lines = [line for line in view.lines if order - NEAR_LINES <= line.order <= order + 12] if rules else []
    for rule in rules:
        for line in reversed(lines):
            if rule.matches("", line.text) and not view.survived(line.order, line.rank):
                weight = max(finding.weight, IN_LOGS.get(rule.name, Weight.ENDED))
                evidence = evidence_of(view.name, line.text, line.time, rank=line.rank)
                return Finding(
                    rule.name, rule.confidence, weight, (evidence, *finding.evidence), "it stands before the failure"
                )
    return finding


def _by_typed_command(finding: Finding, views: Sequence[LogView]) -> Finding:
    """With what the user looked up by hand: `df -i` beside a full disk."""
    typed = next((view for view in views if view.is_submission and view.lines), None)
    return _more_precise(finding, typed, typed.lines[-1].order) if typed else finding


def _reported(view: LogView) -> Iterator[Finding]:
    """The first death in torchrun's summary, where a signal says something by itself."""
    root = view.reports[0] if view.reports else None
    if root is not None and -root.code in SIGNALS:
        name, confidence = SIGNALS[-root.code]
        text = f"torchrun: rank {root.rank} exit code {root.code} {root.words}"
        evidence = evidence_of(view.name, text, root.time, rank=root.rank, host=root.host)
        yield Finding(
            name, max(confidence, 0.5), Weight.ASKED, (evidence,), "torchrun names this rank as the first that failed"
        )


def last_errors(views: Sequence[LogView]) -> Iterator[Finding]:
    """What was logged as an error or warning at the very end, for a job that failed and did not say why."""
    for view, line in [(log, line) for log in views if not log.is_submission for line in log.lines[-40:]]:
        is_quiet = line.level in ("INFO", "DEBUG") or (not line.level and not ERROR_WORD.search(line.text[:200]))
        if is_quiet or line.order in view.covered or TEARDOWN.match(line.text) or CAUGHT.search(line.text):
            continue
        if view.survived(line.order, line.rank) or view.was_caught(line.order, line.order):
            continue
        rule = first_rule("near", "", line.text) or _worded(line.text)
        if rule is not None:
            evidence = evidence_of(view.name, line.text, line.time, rank=line.rank)
            yield Finding(
                rule.name, rule.confidence - 0.25, Weight.ABSENT, (evidence,), "it is the last error in the logs"
            )


ERROR_WORD = re.compile(r"\b(?:error|fail\w*|fatal|unable|cannot|could not|denied|exceeded|refused)\b", re.IGNORECASE)


def _worded(text: str) -> Rule | None:
    """The rule of an exception or event whose words stand in a line; the user's classes need a traceback."""
    for rule in (*rules_for("raised"), *rules_for("pull"), *rules_for("start")):
        if rule.body is None or rule.frames is not None or rule.name in ("echo", "unknown"):
            continue
        if CLASSES[rule.name].kind not in ("user", "training") and replace(rule, head=None).matches("", text):
            return rule
    return None
