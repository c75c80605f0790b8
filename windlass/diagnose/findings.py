"""What single facts say: every rule that fits somewhere, as findings with their evidence, weight and time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import Condition, Container, Event, Facts, Pod
from windlass.diagnose.rules import rules_for
from windlass.diagnose.rules.scheduling import explain_unschedulable
from windlass.diagnose.rules.shapes import ECHO, OWN, SOFT, Rule, Where
from windlass.diagnose.timeline import Failure, Line, LogView, Raised, clock_text

MOST_EVIDENCE_CHARACTERS = 600
MOST_SCANNED_LINES = 4000  # at the end of each log; a dying process says why at its end
NEAR_LINES = 80  # before a failure
STATE, EVENT, KILLED, TIME_LIMIT, CANCELLED = 40, 29, 38, 24, 14  # weights beside those of what logs say
TEARDOWN = re.compile(
    r"^(?:slurmstepd: error: \*\*\* |Sending process \d+ closing signal|.{0,80}(?:received|got|caught) (?:signal:? )?(?:15\b|SIGTERM)"
    r"|Received \S+ death signal|.{0,60}SIGTERM (?:received|caught)|.{0,40}received preemption|srun: (?:forcing|Job step aborted))",
    re.IGNORECASE,
)
# Handlers run while a failure unwinds: of what they raise on top of it, only this is worth the earlier error's place.
HANDLED_ROOTS = frozenset(("cuda_oom", "cuda_oom_fragmentation", "disk_full", "gpu_hardware", "host_oom", "file_system", "nan", "shm"))


@dataclass(frozen=True)
class Evidence:
    source: str
    line: str
    rank: int | None = None
    host: str | None = None
    time: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {"source": self.source, "rank": self.rank, "host": self.host, "time": self.time, "line": self.line}


@dataclass(frozen=True)
class Finding:
    """A class that a fact speaks for."""

    name: str
    confidence: float
    strength: int
    evidence: tuple[Evidence, ...]
    time: float | None = None
    rank: int | None = None
    rule: Rule | None = None
    where: str = ""

    @property
    def kind(self) -> str:
        return CLASSES[self.name].kind if self.name in CLASSES else "echo"


def _evidence(source: str, text: str, *, rank: int | None = None, host: str | None = None, time: float | None = None) -> Evidence:
    return Evidence(source, " ".join(text.split())[:MOST_EVIDENCE_CHARACTERS], rank, host or None, clock_text(time))


def _first(where: Where, head: str, body: str, frames: str = "") -> Rule | None:
    return next((rule for rule in rules_for(where) if rule.matches(head, body, frames)), None)


# What the logs say.


def said(facts: Facts, views: Sequence[LogView]) -> list[Finding]:
    """The failures that ranks and launchers report, echoes included; retried and survived ones left out."""
    found: list[Finding] = []
    for view in views:
        teardown = next((one.order for one in view.lines if one.order not in view.covered and TEARDOWN.match(one.text)), None)
        for finding, order in [*_exceptions(facts, view), *_fatal_lines(facts, view)]:
            if teardown is not None and order > teardown and finding.where != "report":
                finding = replace(finding, strength=min(finding.strength, ECHO + 3), confidence=finding.confidence * 0.7)
            found.append(finding)
        found += _reported(view)
    if all(one.strength <= ECHO for one in found):
        found += [finding for view in views for finding in _last_warnings(view)]
    return found


def _last_warnings(view: LogView) -> Iterator[Finding]:
    """What NCCL and torch warned of at the very end, where nothing else was said."""
    for line in view.lines[-40:]:
        if line.order in view.covered or view.survived(line.order) or line.level == "INFO" or not (line.level or line.source == "nccl"):
            continue
        rule = _first("near", "", line.text)
        if rule:
            evidence = _evidence(view.name, line.text, rank=line.rank, time=line.time)
            yield Finding(rule.name, rule.confidence - 0.2, 12, (evidence,), line.time, line.rank, rule, "log")


def _exceptions(facts: Facts, view: LogView) -> Iterator[tuple[Finding, int]]:
    for failure in view.failures:
        if view.survived(failure.end) or view.was_caught(failure.begin, failure.end):
            continue
        rule, raised = judge(failure)
        finding = _as_finding(facts, view, failure.line, rule, raised)
        if failure.in_thread:
            finding = replace(finding, strength=finding.strength - 4)
        yield _more_precise(finding, view, failure.begin), failure.end


CLIENT_ERRORS = re.compile(r"(?:\w+\.)*(?:ApiException|ApiError|ForbiddenException|UnauthorizedException|RefusedError|KubernetesException|SlurmError)")


def judge(failure: Failure) -> tuple[Rule, Raised]:
    """The rule for an exception: its own, or that of the error which it was raised from."""
    own = rule_of(failure.final)
    if len(failure.chain) == 1 or (own.name not in ("user_code", "user_data", "echo", "user_arguments") and own.confidence > 0.6):
        return own, failure.final
    direct = True
    for raised in reversed(failure.chain[:-1]):
        direct = direct and raised.link == "cause"
        rule = rule_of(raised)
        if rule.name not in ("user_code", "echo") and (direct or rule.name in HANDLED_ROOTS):
            return rule, raised
    return own, failure.final


def rule_of(raised: Raised) -> Rule:
    frames = "\n".join(f"{file} {code}" for file, code in raised.frames[-12:])
    if CLIENT_ERRORS.fullmatch(raised.type) and (refusal := _first("refusal", "", raised.message)):
        return refusal
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
        if rule is None or rule.name in seen or line.level == "WARNING" and rule.strength > SOFT:
            continue
        if view.survived(line.order) or view.was_caught(line.order, line.order):
            continue
        seen.add(rule.name)
        finding = _as_finding(facts, view, line, rule, None)
        yield _more_precise(finding, view, line.order), line.order


def _as_finding(facts: Facts, view: LogView, line: Line, rule: Rule, raised: Raised | None) -> Finding:
    text = str(raised) if raised else line.text
    evidence = [_evidence(view.name, text, rank=line.rank, host=facts.host_of(line.rank, view.name), time=line.time)]
    if raised and raised.frames:
        file, code = next((one for one in reversed(raised.frames) if "site-packages" not in one[0]), raised.frames[-1])
        evidence.append(_evidence(view.name, f"raised in {file}: {code}", rank=line.rank))
    return Finding(rule.name, rule.confidence, rule.strength, tuple(evidence), line.time, line.rank, rule, "log")


def _more_precise(finding: Finding, view: LogView, order: int) -> Finding:
    """With what stands shortly before a failure that says little itself."""
    rules = [rule for rule in rules_for("near") if finding.name in rule.of]
    if not rules:
        return finding
    before = [one for one in view.lines if order - NEAR_LINES <= one.order <= order + 12]
    for rule in rules:
        for line in reversed(before):
            if rule.matches("", line.text) and not view.survived(line.order):
                evidence = _evidence(view.name, line.text, rank=line.rank, time=line.time)
                is_echo = finding.strength <= ECHO
                strength = 23 if CLASSES[rule.name].kind == "infra" or is_echo else max(finding.strength, OWN - 1)
                return replace(finding, name=rule.name, confidence=rule.confidence, strength=strength, rule=rule, evidence=(evidence, *finding.evidence))
    return finding


SIGNALS = {-11: ("segfault", 0.75, 22), -6: ("segfault", 0.5, 9), -7: ("shm", 0.65, 22), -9: ("host_oom", 0.5, 10), -4: ("segfault", 0.5, 9)}


def _reported(view: LogView) -> Iterator[Finding]:
    """The first death in torchrun's summary, where a signal says something by itself."""
    for report in view.reports[:1]:
        killed = [one for one in view.reports if one.code in SIGNALS] if report.code not in SIGNALS and report.code != 1 else [report]
        for one in killed[:1]:
            if one.code in SIGNALS:
                name, confidence, strength = SIGNALS[one.code]
                text = f"torchrun: rank {one.rank} exit code {one.code} {one.words}"
                evidence = _evidence(view.name, text, rank=one.rank, host=one.host, time=one.time)
                yield Finding(name, confidence, strength, (evidence,), one.time, one.rank, where="report")


# What the platform says.


def ended(facts: Facts) -> list[Finding]:
    """How pods were ended from outside: states first, events where there is no state."""
    found: list[Finding] = []
    for pod in facts.pods:
        found += _ended_by_state(pod)
    for condition in (*facts.job_conditions, *facts.workload_conditions):
        if condition.status != "False" and (rule := _first("ended", condition.reason or condition.type, condition.message)):
            strength = {"time_limit": TIME_LIMIT, "cancelled": CANCELLED, "host_oom": STATE}.get(rule.name, EVENT)
            found.append(Finding(rule.name, rule.confidence, strength, (_evidence("job", str(condition), time=condition.time),), condition.time, rule=rule, where="job"))
    asked = facts.job_deleted or next((pod.deleted for pod in facts.pods if pod.deleted), None)
    if asked is not None:
        text = "the job's deletion was asked for" if facts.job_deleted else "the deletion of its pods was asked for"
        found.append(Finding("cancelled", 0.8 if facts.job_deleted else 0.55, CANCELLED - 1, (_evidence("job", text, time=asked),), asked, where="job"))
    over = {pod.name for pod in facts.pods if pod.running or pod.phase == "Succeeded"}
    for event in facts.events:
        if event.kind == "Node" or event.name in over:
            continue
        rule = _first("ended", event.reason, event.message)
        if rule and rule.name == "cancelled":
            found.append(Finding(rule.name, rule.confidence, CANCELLED, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="event"))
        elif rule and rule.name != "time_limit":
            found.append(Finding(rule.name, rule.confidence - 0.05, EVENT, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="event"))
        elif rule:
            found.append(Finding(rule.name, rule.confidence, TIME_LIMIT, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="event"))
    return found


EXITS = {137: ("host_oom", 0.4, 1), 139: ("segfault", 0.7, 12), 134: ("segfault", 0.5, 9), 135: ("shm", 0.6, 12), 126: ("container_start", 0.6, 9), 127: ("container_start", 0.6, 9), 132: ("segfault", 0.5, 9)}


def _ended_by_state(pod: Pod) -> Iterator[Finding]:
    for condition in pod.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            rule = _first("ended", condition.reason, condition.message)
            if rule:
                yield _of_pod(pod, rule, KILLED, str(condition), condition.time)
    if pod.reason and (rule := _first("ended", pod.reason, pod.message)):
        yield _of_pod(pod, rule, TIME_LIMIT if rule.name == "time_limit" else KILLED + 1, f"{pod.reason} {pod.message}", None)
    now_ended = {one.name for one in pod.containers if one.state == "terminated" and not one.is_last}
    for container in pod.containers:
        if container.state != "terminated" or (container.is_last and (container.name in now_ended or pod.phase == "Succeeded")):
            continue
        strength = STATE if container.is_main else 10
        if container.is_last and pod.running:
            strength = 8
        rule = _first("ended", container.reason, container.message)
        if rule:
            yield _of_pod(pod, rule, strength, str(container), container.time)
        elif container.exit_code in EXITS and container.is_main:
            name, confidence, weight = EXITS[container.exit_code]
            evidence = (_evidence("pod " + pod.name, str(container), host=pod.node, time=container.time),)
            yield Finding(name, confidence, min(weight, strength), evidence, container.time, where="exit")


def _of_pod(pod: Pod, rule: Rule, strength: int, text: str, time: float | None) -> Finding:
    return Finding(rule.name, rule.confidence, strength, (_evidence(f"pod {pod.name}", text, host=pod.node, time=time),), time, rule=rule, where="state")


def nodes(facts: Facts) -> list[Finding]:
    """What the nodes of the job and their kernels report."""
    found: list[Finding] = []
    own = facts.pods_of_nodes()
    texts: list[tuple[str, str, float | None]] = []
    for node in facts.nodes:
        if own and node.name not in own:
            continue
        is_bad = [one for one in node.conditions if (one.status != "True") == (one.type == "Ready") and one.status]
        texts += [(f"node {node.name}", f"{one.type} {one}", one.time) for one in is_bad]
        texts += [(f"node {node.name}", f"taint {taint}", None) for taint in node.taints if own]
    texts += [(f"node {one.name}", str(one).split(": ", 1)[-1], one.time) for one in facts.events if one.kind == "Node"]
    for log in facts.logs:
        if log.is_kernel:
            texts += [(log.name, line, None) for line in log.text.splitlines()[-2000:]]
    for source, text, time in texts:
        rule = _first("node", "", text)
        if rule:
            strength = {"gpu_hardware": 35, "host_oom": 33, "node_lost": 36, "preempted": 36}.get(rule.name, 21)
            host = source.removeprefix("node ") if source.startswith("node ") else None
            found.append(Finding(rule.name, rule.confidence, strength, (_evidence(source, text, host=host, time=time),), time, rule=rule, where="node"))
    return found


def slurm(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    weights = {"time_limit": TIME_LIMIT, "cancelled": CANCELLED, "queue_wait": 26, "queue_never": 27, "job_held": 27, "api_credentials": 27}
    # the controller's record of the whole job, then its accounting, then steps: a step may be cancelled because of the job's end
    records = sorted(facts.slurm, key=lambda one: "." in one.name)
    has_oom_step = next((one for one in records if one.state.startswith("OUT_OF_ME")), None)
    for record in ([has_oom_step] if has_oom_step else []) + list(records):
        rule = _first("slurm", record.state, f"{record.reason} {record.comment}")
        is_step = "." in record.name and not record.name.endswith(".batch")
        if rule is None or (is_step and rule.name == "cancelled"):
            continue
        strength = weights.get(rule.name, STATE if rule.name == "host_oom" else KILLED)
        found.append(Finding(rule.name, rule.confidence, strength, (_evidence(record.source, str(record)),), rule=rule, where="slurm"))
    by_signal = {9: "host_oom", 11: "segfault", 7: "shm", 6: "segfault"}
    for record in records:
        signal = record.signal or (record.exit_code - 128 if record.exit_code and 128 < record.exit_code < 160 else None)
        if signal in by_signal and not record.state.startswith("CANCELLED"):
            found.append(Finding(by_signal[signal], 0.45, 1 if signal == 9 else 9, (_evidence(record.source, str(record)),), where="exit"))
    return found


RESOLVED = {
    "FailedScheduling": ("Scheduled", "Started", "Pulled", "Created"),
    "Failed": ("Pulled", "Started"),
    "BackOff": ("Pulled", "Started"),
}


def waiting(facts: Facts) -> list[Finding]:
    """Why pods have not started."""
    found: list[Finding] = []
    for pod in facts.pods:
        if not pod.started:
            found += _why_not_started(pod, [one for one in facts.events if one.name == pod.name], facts)
        for container in pod.containers:
            if container.state == "terminated" and container.reason in ("StartError", "ContainerCannotRun") or container.reason in ("RunContainerError",):
                found += _by_words("start", pod.name, container.reason, container.message, container.time)
    is_pending = any(not pod.started for pod in facts.pods)
    names = {pod.name for pod in facts.pods}
    if is_pending:
        for event in facts.events:
            if event.name not in names and event.kind in ("NodeClaim", "NodePool", "Machine", "PersistentVolumeClaim", "PodGroup"):
                found += _of_event(event, facts, gpus_asked=False)
    if not facts.pods:
        for event in facts.events:
            later = [one for one in facts.events if one.order > event.order and one.name == event.name]
            ends = RESOLVED.get(event.reason, ("Started", "Running"))
            if not any(one.reason in ends for one in later):
                found += _of_event(event, facts, gpus_asked=False)
    return found


def _why_not_started(pod: Pod, events: Sequence[Event], facts: Facts) -> Iterator[Finding]:
    waits = [one for one in pod.containers if one.state == "waiting" and one.reason not in ("", "ContainerCreating", "PodInitializing")]
    pulls = [one for one in waits if re.search(r"Image|Pull", one.reason)]
    pull_events = [one for one in events if re.search(r"pull", one.message, re.IGNORECASE) and one.reason not in ("Pulling", "Pulled")]
    if pulls or (pull_events and not any(one.reason in ("Pulled", "Started") for one in events)):
        reason = pulls[0].reason if pulls else pull_events[-1].reason
        words = [one.message for one in pulls] + [one.message for one in reversed(pull_events)]
        for text in words:
            if (rule := _first("pull", reason, text)) is not None:
                yield Finding(rule.name, rule.confidence, 27, (_evidence(f"pod {pod.name}", f"{reason} {text}", host=pod.node),), rule=rule, where="start")
                return
        if (rule := _first("pull", reason, "")) is not None:
            yield Finding(rule.name, rule.confidence, 27, (_evidence(f"pod {pod.name}", reason, host=pod.node),), rule=rule, where="start")
            return
        yield Finding("image_missing", 0.4, 12, (_evidence(f"pod {pod.name}", f"{reason} {words[0] if words else ''}"),), where="start")
    for container in [*waits, *(one for one in pod.containers if one.state == "terminated" and one.is_init and one.exit_code)]:
        yield from _by_words("start", pod.name, container.reason, container.message, container.time)
    for event in reversed(events):
        yield from _of_event(event, facts, gpus_asked=any("gpu" in key for key in pod.requests))
    for condition in pod.conditions:
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
            yield from _of_event(Event("FailedScheduling" if condition.reason != "SchedulingGated" else condition.reason, condition.message, "Pod", pod.name), facts, gpus_asked=True)
    if pod.gated:
        yield Finding("queue_wait", 0.7, 25, (_evidence(f"pod {pod.name}", "scheduling gates are set"),), where="start")
    elif pod.phase == "Failed" and (rule := _first("start", pod.reason, pod.message)):
        yield _of_pod(pod, rule, 27, f"{pod.reason} {pod.message}", None)


def _of_event(event: Event, facts: Facts, *, gpus_asked: bool) -> Iterator[Finding]:
    if event.type == "Normal" and event.reason not in ("Suspended", "NotTriggerScaleUp", "Pending"):
        return
    if event.reason in ("FailedScheduling", "Unschedulable", "NotTriggerScaleUp"):
        told = explain_unschedulable(event.message, facts, gpus_asked)
        if told is not None and not re.search(r"sufficient capacity|stockout", event.message):
            weight = 26 if event.reason != "NotTriggerScaleUp" else 24
            yield Finding(told[0], told[1], weight, (_evidence("event", str(event), time=event.time),), event.time, where="start")
            return
    if (rule := _first("start", event.reason, event.message)) is not None and rule.name == "cloud_capacity":
        yield Finding(rule.name, rule.confidence, 28, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="start")
        return
    if event.kind in ("", "Pod", "PodGroup", "NodeClaim", "PersistentVolumeClaim"):
        text = event.message
        if re.search(r"pull(?:ing)? image|ErrImage|ImagePull", text) and (rule := _first("pull", event.reason, text)):
            yield Finding(rule.name, rule.confidence, 26, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="start")
            return
        yield from _by_words("start", event.name, event.reason, text, event.time)


def _by_words(where: Where, pod: str, reason: str, message: str, time: float | None) -> Iterator[Finding]:
    rule = _first(where, reason, message)
    if rule:
        yield Finding(rule.name, rule.confidence, 26, (_evidence(f"pod {pod}" if pod else "event", f"{reason} {message}", time=time),), time, rule=rule, where="start")


ACCEPTED = re.compile(r"^(?:\S+ created$|Submitted batch job|.{0,120}\bcreated$|submitted)", re.MULTILINE)


def refused(facts: Facts) -> list[Finding]:
    """Why the job, or its pods, could not be made."""
    found: list[Finding] = []
    for log in facts.logs:
        if not log.is_submission:
            continue
        accepted = [match.start() for match in ACCEPTED.finditer(log.text)]
        position = 0
        for text in log.text.splitlines()[-400:]:
            position = log.text.find(text, position)
            rule = _first("refusal", "", text[:4000])
            if rule and not any(at > position for at in accepted) and not re.search(r"\bretrying|will retry\b", text):
                found.append(Finding(rule.name, rule.confidence, 27, (_evidence(log.name, text),), rule=rule, where="submit"))
    created = {event.name for event in facts.events if event.reason in ("SuccessfulCreate", "SuccessfulCreatePod")}
    for event in facts.events:
        if re.fullmatch(r"Failed\w*Create\w*|FailedCreate\w*|.*ReconcileError|Failed\w*Reconcile\w*|InvalidSpec|ValidationFailed|CreateFailed", event.reason) and "Sandbox" not in event.reason and event.reason != "FailedCreatePodSandBox":
            rule = _first("refusal", "", event.message)
            if rule and (event.name not in created or not facts.pods):
                found.append(Finding(rule.name, rule.confidence, 27, (_evidence("event", str(event), time=event.time),), event.time, rule=rule, where="submit"))
    found += _conditions_refuse("job", facts.job_conditions)
    admitted = any(one.type == "Admitted" and one.status == "True" for one in facts.workload_conditions)
    if not admitted:
        found += _conditions_refuse("workload", facts.workload_conditions)
    return found


def _conditions_refuse(source: str, conditions: Sequence[Condition]) -> Iterator[Finding]:
    for condition in conditions:
        if condition.type in ("Complete", "Succeeded", "Running") or (condition.status == "True" and condition.type in ("QuotaReserved", "Admitted", "Ready")):
            continue
        rule = _first("refusal", "", f"{condition.reason} {condition.message}")
        if rule:
            weight = 26 if rule.name != "queue_wait" else 22
            yield Finding(rule.name, rule.confidence, weight, (_evidence(source, str(condition), time=condition.time),), condition.time, rule=rule, where="submit")


def main_containers(facts: Facts) -> list[Container]:
    return [one for pod in facts.pods for one in pod.containers if one.is_main and not one.is_init and not one.is_last]
