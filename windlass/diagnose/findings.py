"""What single facts say: every rule that fits somewhere, as findings with their evidence, weight and time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import Condition, Event, Facts, Pod
from windlass.diagnose.rules import rules_for
from windlass.diagnose.rules.scheduling import explain_unschedulable
from windlass.diagnose.rules.shapes import ECHO, OWN, SOFT, WEAK, Rule, Where
from windlass.diagnose.timeline import Failure, Line, LogView, Raised, clock_text

MOST_EVIDENCE_CHARACTERS = 600
MOST_SCANNED_LINES = 4000  # at the end of each log; a dying process says why at its end
NEAR_LINES = 80  # before a failure
# Weights beside those of what logs say (OWN is 30): a state that the platform recorded, an event, a reason to wait …
STATE, KILLED, EVENT, REFUSED, WAITS, TIME_LIMIT, CANCELLED, HINT = 40, 38, 29, 27, 26, 24, 14, 1
TEARDOWN = re.compile(
    r"slurmstepd: error: \*\*\* |Sending process \d+ closing signal"
    r"|.{0,80}(?:received|got|caught) (?:signal:? )?(?:15\b|SIGTERM)|Received \S+ death signal"
    r"|.{0,60}SIGTERM (?:received|caught)|.{0,40}received preemption|srun: (?:forcing|Job step aborted)",
    re.IGNORECASE,
)
CLIENT_ERRORS = re.compile(
    r"(?:\w+\.)*(?:ApiException|ApiError|ForbiddenException|UnauthorizedException|RefusedError|KubernetesException"
    r"|SlurmError)"
)
# Of an error that was being handled when another one was raised, these are worth the later one's place.
HANDLED_ROOTS = frozenset(
    ["cuda_oom", "cuda_oom_fragmentation", "disk_full", "gpu_hardware", "host_oom", "file_system", "nan", "shm"]
)  # fmt: skip
# What an exit says by itself: class, confidence, weight. SIGKILL has too many senders to name one.
SIGNALS = {
    9: ("host_oom", 0.4, HINT), 11: ("segfault", 0.7, 12), 6: ("segfault", 0.5, 9), 7: ("shm", 0.6, 12),
    4: ("segfault", 0.5, 9),
}  # fmt: skip
EXITS = {128 + number: told for number, told in SIGNALS.items()}
EXITS |= {126: ("container_start", 0.6, 9), 127: ("container_start", 0.6, 9)}


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
    """A class that a fact speaks for."""

    name: str
    confidence: float
    strength: int
    evidence: tuple[Evidence, ...]
    where: str
    rule: Rule | None = None

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


def _by(rule: Rule, strength: int, where: str, *evidence: Evidence) -> Finding:
    return Finding(rule.name, rule.confidence, strength, evidence, where, rule)


def _first(where: Where, head: str, body: str, frames: str = "") -> Rule | None:
    return next((rule for rule in rules_for(where) if rule.matches(head, body, frames)), None)


# What the logs say.


def said(facts: Facts, views: Sequence[LogView]) -> list[Finding]:
    """The failures that ranks and launchers report, echoes included; retried and survived ones left out."""
    found: list[Finding] = []
    for view in views:
        outside = [one for one in view.lines if one.order not in view.covered]
        teardown = next((one.order for one in outside if TEARDOWN.match(one.text)), None)
        for finding, order in [*_exceptions(facts, view), *_fatal_lines(facts, view)]:
            if teardown is not None and order > teardown:  # said while everything was being stopped
                weight = min(finding.strength, ECHO + 3)
                finding = replace(finding, strength=weight, confidence=finding.confidence * 0.7)
            found.append(finding)
        found += _reported(view)
    found += _different_collectives(views)
    if all(one.strength <= ECHO for one in found):
        found += [finding for view in views for finding in _last_warnings(view)]
    return found


def _exceptions(facts: Facts, view: LogView) -> Iterator[tuple[Finding, int]]:
    for failure in view.failures:
        if view.survived(failure.end) or view.was_caught(failure.begin, failure.end):
            continue
        rule, raised = judge(failure)
        asked = [pod.requests for pod in facts.pods if pod.requests]
        if rule.name == "gpu_runtime" and asked and not any("gpu" in key for one in asked for key in one):
            rule = replace(rule, name="gpu_count")  # no pod asked for one
        finding = _in_log(facts, view, failure.line, rule, raised)
        if failure.in_thread:
            finding = replace(finding, strength=finding.strength - 4)
        yield _more_precise(finding, view, failure.begin), failure.end


def judge(failure: Failure) -> tuple[Rule, Raised]:
    """The rule for an exception: its own, or that of the error which it was raised from."""
    own = rule_of(failure.final)
    is_vague = own.name in ("user_code", "user_data", "echo", "user_arguments") or own.confidence <= 0.6
    is_direct = True
    for raised in reversed(failure.chain[:-1] if is_vague else ()):
        is_direct = is_direct and raised.link == "cause"
        rule = rule_of(raised)
        if rule.name not in ("user_code", "echo") and (is_direct or rule.name in HANDLED_ROOTS):
            return rule, raised
    return own, failure.final


def rule_of(raised: Raised) -> Rule:
    if CLIENT_ERRORS.fullmatch(raised.type) and (refusal := _first("refusal", "", raised.message)):
        return refusal
    frames = "\n".join(f"{file} {code}" for file, code in raised.frames[-12:])
    for rule in rules_for("raised"):
        if rule.matches(raised.type, raised.message, frames):
            # a message that the user's own code composed may quote an infrastructure error without being one
            if raised.is_users_own and rule.name != "echo" and CLASSES[rule.name].kind not in ("user", "training"):
                continue
            return rule
    return Rule("user_code", "raised", None, None, 0.6)


def _fatal_lines(facts: Facts, view: LogView) -> Iterator[tuple[Finding, int]]:
    seen: set[str] = set()
    for line in view.lines[-MOST_SCANNED_LINES:]:
        if line.order in view.covered or (line.level in ("INFO", "DEBUG") and line.source == "text"):
            continue
        rule = _first("line", "", line.text[:1000])
        if rule is None or rule.name in seen or (line.level == "WARNING" and rule.strength > SOFT):
            continue
        if view.survived(line.order) or view.was_caught(line.order, line.order):
            continue
        seen.add(rule.name)
        yield _more_precise(_in_log(facts, view, line, rule, None), view, line.order), line.order


def _in_log(facts: Facts, view: LogView, line: Line, rule: Rule, raised: Raised | None) -> Finding:
    host = facts.host_of(line.rank, view.name)
    evidence = [evidence_of(view.name, str(raised) if raised else line.text, line.time, rank=line.rank, host=host)]
    if raised and raised.frames:
        own = [one for one in raised.frames if "-packages" not in one[0]] or raised.frames
        evidence.append(evidence_of(view.name, f"raised in {own[-1][0]}: {own[-1][1]}", line.time, rank=line.rank))
    return _by(rule, rule.strength, "log", *evidence)


def _more_precise(finding: Finding, view: LogView, order: int) -> Finding:
    """With what stands shortly before a failure that says little itself."""
    rules = [rule for rule in rules_for("near") if finding.name in rule.of]
    lines = [one for one in view.lines if order - NEAR_LINES <= one.order <= order + 12] if rules else []
    for rule in rules:
        for line in reversed(lines):
            if rule.matches("", line.text) and not view.survived(line.order):
                is_soft = CLASSES[rule.name].kind == "infra" or finding.strength <= ECHO
                strength = 23 if is_soft else max(finding.strength, OWN - 1)
                evidence = evidence_of(view.name, line.text, line.time, rank=line.rank)
                return _by(rule, strength, "log", evidence, *finding.evidence)
    return finding


def _reported(view: LogView) -> Iterator[Finding]:
    """The first death in torchrun's summary, where a signal says something by itself."""
    killed = [one for one in view.reports if -one.code in SIGNALS]
    for report in killed[:1] if view.reports and view.reports[0].code != 1 else ():
        name, confidence, strength = SIGNALS[-report.code]
        strength = 10 if strength == HINT else strength  # one rank of several: rarely somebody's kill
        text = f"torchrun: rank {report.rank} exit code {report.code} {report.words}"
        evidence = evidence_of(view.name, text, report.time, rank=report.rank, host=report.host)
        yield Finding(name, max(confidence, 0.5), strength, (evidence,), "report")


COLLECTIVE = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")


def _different_collectives(views: Sequence[LogView]) -> Iterator[Finding]:
    """Ranks whose watchdogs name different operations under one number did not take the same path."""
    waits: dict[str, dict[str, Evidence]] = {}
    for view in views:
        for line in view.lines[-500:]:
            if match := COLLECTIVE.search(line.text):
                told = evidence_of(view.name, line.text, line.time, rank=line.rank)
                waits.setdefault(match[1], {}).setdefault(match[2], told)
                break
    for operations in waits.values():
        if len(operations) > 1:
            yield Finding("collective_mismatch", 0.75, WEAK + 1, tuple(operations.values()), "log")


def _last_warnings(view: LogView) -> Iterator[Finding]:
    """What NCCL and torch warned of at the very end, where nothing else was said."""
    for line in view.lines[-40:]:
        is_quiet = line.level in ("INFO", "") and (line.level or line.source != "nccl")
        if line.order in view.covered or is_quiet or view.survived(line.order):
            continue
        if rule := _first("near", "", line.text):
            found = _by(rule, 12, "log", evidence_of(view.name, line.text, line.time, rank=line.rank))
            yield replace(found, confidence=rule.confidence - 0.2)


# How the platform ended it.


def ended(facts: Facts) -> list[Finding]:
    """How pods were ended from outside: states first, events where there is no state."""
    found = [finding for pod in facts.pods for finding in _ended_by_state(pod)]
    weights = {"time_limit": TIME_LIMIT, "cancelled": CANCELLED}
    for condition in (*facts.job_conditions, *facts.workload_conditions):
        rule = _first("ended", condition.reason or condition.type, condition.message)
        if rule and condition.status != "False":
            strength = {**weights, "host_oom": STATE}.get(rule.name, EVENT)
            found.append(_by(rule, strength, "job", evidence_of("job", str(condition), condition.time)))
    asked = facts.job_deleted or next((pod.deleted for pod in facts.pods if pod.deleted), None)
    if asked is not None:
        text = f"the deletion of {'the job' if facts.job_deleted else 'its pods'} was asked for"
        sure = 0.8 if facts.job_deleted else 0.55
        found.append(Finding("cancelled", sure, CANCELLED - 1, (evidence_of("job", text, asked),), "job"))
    over = {pod.name for pod in facts.pods if pod.running or pod.phase == "Succeeded"}
    for event in facts.events:
        rule = _first("ended", event.reason, event.message) if event.kind != "Node" and event.name not in over else None
        if rule:
            strength = weights.get(rule.name, EVENT)
            found.append(_by(rule, strength, "event", evidence_of("event", str(event), event.time)))
    return found


def _ended_by_state(pod: Pod) -> Iterator[Finding]:
    source = f"pod {pod.name}"
    for condition in pod.conditions:
        rule = _first("ended", condition.reason, condition.message)
        if condition.type == "DisruptionTarget" and condition.status == "True" and rule:
            yield _by(rule, KILLED, "state", evidence_of(source, str(condition), condition.time, host=pod.node))
    if pod.reason and (rule := _first("ended", pod.reason, pod.message)):
        strength = TIME_LIMIT if rule.name == "time_limit" else KILLED + 1
        yield _by(rule, strength, "state", evidence_of(source, f"{pod.reason} {pod.message}", host=pod.node))
    now_ended = {one.name for one in pod.containers if one.state == "terminated" and not one.is_last}
    for container in pod.containers:
        is_old = container.is_last and (container.name in now_ended or pod.phase == "Succeeded")
        if container.state != "terminated" or is_old:
            continue
        strength = 8 if container.is_last and pod.running else STATE if container.is_main else 10
        evidence = evidence_of(source, str(container), container.time, host=pod.node)
        if rule := _first("ended", container.reason, container.message):
            yield _by(rule, strength, "state", evidence)
        elif container.exit_code in EXITS and container.is_main:
            name, confidence, weight = EXITS[container.exit_code]
            yield Finding(name, confidence, min(weight, strength), (evidence,), "exit")


def nodes(facts: Facts) -> list[Finding]:
    """What the nodes of the job and their kernels report."""
    own = facts.pods_of_nodes()
    told: list[Evidence] = []
    for node in facts.nodes:
        if own and node.name not in own:
            continue
        texts = [
            (f"{one.type} {one}", one.time)
            for one in node.conditions
            if one.status and (one.status != "True") == (one.type == "Ready")
        ]
        texts += [(f"taint {taint}", None) for taint in node.taints if own]
        told += [evidence_of(f"node {node.name}", text, time, host=node.name) for text, time in texts]
    for event in facts.events:
        if event.kind == "Node":
            text = f"{event.reason} {event.message}"
            told.append(evidence_of(f"node {event.name}", text, event.time, host=event.name))
    for log in facts.logs:
        if log.is_kernel:
            told += [evidence_of(log.name, line) for line in log.text.splitlines()[-2000:]]
    weights = {"gpu_hardware": 35, "host_oom": 33, "node_lost": 36, "preempted": 36}
    pairs = ((_first("node", "", one.line), one) for one in told)
    return [_by(rule, weights.get(rule.name, 21), "node", one) for rule, one in pairs if rule]


def slurm(facts: Facts) -> list[Finding]:
    weights = {"time_limit": TIME_LIMIT, "cancelled": CANCELLED, "queue_wait": WAITS, "host_oom": STATE}
    weights |= dict.fromkeys(("queue_never", "job_held", "api_credentials"), REFUSED)
    found: list[Finding] = []
    # the job itself before its steps: a step may be cancelled because the job ended
    for record in sorted(facts.slurm, key=lambda one: (not one.state.startswith("OUT_OF_ME"), "." in one.name)):
        evidence = evidence_of(record.source, str(record))
        rule = _first("slurm", record.state, f"{record.reason} {record.comment}")
        is_step = "." in record.name and not record.name.endswith(".batch")
        if rule and not (is_step and rule.name == "cancelled"):
            found.append(_by(rule, weights.get(rule.name, KILLED), "slurm", evidence))
        number = record.signal or (record.exit_code or 0) - 128
        if number in SIGNALS and not record.state.startswith("CANCELLED"):
            name, confidence, strength = SIGNALS[number]
            found.append(Finding(name, confidence, min(strength, 9), (evidence,), "exit"))
    return found


# Why it has not begun.

RESOLVED = {
    "FailedScheduling": ("Scheduled", "Started", "Pulled", "Created"),
    "Failed": ("Pulled", "Started"),
    "BackOff": ("Pulled", "Started"),
}
BEYOND_PODS = ("NodeClaim", "NodePool", "Machine", "PersistentVolumeClaim", "PodGroup")


def waiting(facts: Facts) -> list[Finding]:
    """Why pods have not started."""
    found: list[Finding] = []
    for pod in facts.pods:
        if not pod.started:
            found += _why_not_started(pod, [one for one in facts.events if one.name == pod.name], facts)
        for container in pod.containers:
            if container.reason in ("StartError", "ContainerCannotRun", "RunContainerError"):
                found += _by_words(f"pod {pod.name}", container.reason, container.message, container.time)
    if any(not pod.started for pod in facts.pods):
        for event in facts.events:
            if event.kind in BEYOND_PODS:
                found += _of_event(event, facts)
    if not facts.pods:
        for event in facts.events:
            later = [one for one in facts.events if one.order > event.order and one.name == event.name]
            if not any(one.reason in RESOLVED.get(event.reason, ("Started", "Running")) for one in later):
                found += _of_event(event, facts)
    return found


def _why_not_started(pod: Pod, events: Sequence[Event], facts: Facts) -> Iterator[Finding]:
    source = f"pod {pod.name}"
    normal = ("", "ContainerCreating", "PodInitializing")
    waits = [one for one in pod.containers if one.state == "waiting" and one.reason not in normal]
    pulls = [one for one in waits if re.search(r"Image|Pull", one.reason)]
    failed = [one for one in events if re.search(r"(?i)pull", one.message) and one.reason not in ("Pulling", "Pulled")]
    if pulls or (failed and not any(one.reason in ("Pulled", "Started") for one in events)):
        reason = pulls[0].reason if pulls else failed[-1].reason
        texts = [*(one.message for one in pulls), *(one.message for one in reversed(failed)), ""]
        for text in texts:
            if rule := _first("pull", reason, text):
                yield _by(rule, REFUSED, "start", evidence_of(source, f"{reason} {text}", host=pod.node))
                return
        yield Finding("image_missing", 0.4, 12, (evidence_of(source, f"{reason} {texts[0]}"),), "start")
    failed_init = [one for one in pod.containers if one.state == "terminated" and one.is_init and one.exit_code]
    for container in (*waits, *failed_init):
        yield from _by_words(source, container.reason, container.message, container.time)
    for event in reversed(events):
        yield from _of_event(event, facts)
    for condition in pod.conditions:
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
            reason = condition.reason if condition.reason == "SchedulingGated" else "FailedScheduling"
            yield from _of_event(Event(reason, condition.message, "Pod", pod.name), facts)
    if pod.gated:
        yield Finding("queue_wait", 0.7, WAITS - 1, (evidence_of(source, "scheduling gates are set"),), "start")
    elif pod.phase == "Failed" and (rule := _first("start", pod.reason, pod.message)):
        yield _by(rule, REFUSED, "start", evidence_of(source, f"{pod.reason} {pod.message}", host=pod.node))


def _of_event(event: Event, facts: Facts) -> Iterator[Finding]:
    if event.type == "Normal" and event.reason not in ("Suspended", "NotTriggerScaleUp", "Pending"):
        return
    evidence = evidence_of("event", str(event), event.time)
    rule = _first("start", event.reason, event.message)
    if rule and rule.name == "cloud_capacity":
        yield _by(rule, WAITS + 2, "start", evidence)
        return
    if event.reason in ("FailedScheduling", "Unschedulable", "NotTriggerScaleUp"):
        told = explain_unschedulable(event.message, facts)
        if told is not None:
            strength = WAITS if event.reason != "NotTriggerScaleUp" else WAITS - 2
            yield Finding(told[0], told[1], strength, (evidence,), "start")
            return
    if event.kind in ("", "Pod", *BEYOND_PODS):
        if re.search(r"pull(?:ing)? image|ErrImage|ImagePull", event.message):
            rule = _first("pull", event.reason, event.message) or rule
        if rule:
            yield _by(rule, WAITS, "start", evidence)


def _by_words(source: str, reason: str, message: str, time: float | None) -> Iterator[Finding]:
    if rule := _first("start", reason, message):
        yield _by(rule, WAITS, "start", evidence_of(source, f"{reason} {message}", time))


ACCEPTED = re.compile(r"^(?:Submitted batch job|submitted|.{0,200}\bcreated$)", re.MULTILINE)
ANSWER = re.compile(
    r"(?:Error from server|error: |Error: |sbatch: |salloc: |srun: error: Unable|Unable to connect|The \w+ \"|An error"
    r"|Internal error|HTTP response body|(?:\w+\.)*ApiException|.{0,120}denied the request)"
)
OUTPUT = re.compile(r"Traceback \(most|torch|NCCL|\bloss\b|slurmstepd")
FAILED_CREATE = re.compile(
    r"Failed\w*Create(?!PodSandBox)\w*|.*ReconcileError|Failed\w*Reconcile\w*|InvalidSpec|ValidationFailed|CreateFailed"
)


def refused(facts: Facts) -> list[Finding]:
    """Why the job, or its pods, could not be made."""
    found: list[Finding] = []
    for log in facts.logs:
        text = log.text
        if log.is_submission:  # what came before the job was accepted was overcome
            text = text[max((match.end() for match in ACCEPTED.finditer(text)), default=0) :]
        holds_output = OUTPUT.search(text) is not None  # of the job itself: there only what clients print counts
        for line in text.splitlines()[-400:] if log.is_submission else ():
            is_answer = not holds_output or ANSWER.match(line)
            rule = _first("refusal", "", line[:4000]) if is_answer else None
            if rule and not re.search(r"\bretrying|will retry\b", line):
                found.append(_by(rule, REFUSED, "submit", evidence_of(log.name, line)))
    created: dict[str, float] = {}  # when a controller last made a pod: what was refused before that was overcome
    for event in facts.events if facts.pods else ():
        if event.reason.startswith("SuccessfulCreate"):
            created[event.name] = max(created.get(event.name, 0.0), event.time or float("inf"))
    for event in facts.events:
        rule = _first("refusal", "", event.message) if FAILED_CREATE.fullmatch(event.reason) else None
        if rule and (event.time or 0.0) >= created.get(event.name, 0.0):
            found.append(_by(rule, REFUSED, "submit", evidence_of("event", str(event), event.time)))
    found += _by_conditions("job", facts.job_conditions)
    if not any(one.type == "Admitted" and one.status == "True" for one in facts.workload_conditions):
        found += _by_conditions("workload", facts.workload_conditions)
    return found


def _by_conditions(source: str, conditions: Sequence[Condition]) -> Iterator[Finding]:
    for condition in conditions:
        is_good = condition.status == "True" and condition.type in ("QuotaReserved", "Admitted", "Ready")
        if is_good or condition.type in ("Complete", "Succeeded", "Running"):
            continue
        if rule := _first("refusal", "", f"{condition.reason} {condition.message}"):
            weight = WAITS if rule.name != "queue_wait" else 22
            yield _by(rule, weight, "submit", evidence_of(source, str(condition), condition.time))
