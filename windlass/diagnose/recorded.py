"""Findings from what the platform keeps: states, events, nodes, Slurm's records, answers to a submission."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from windlass.diagnose.facts import Condition, Event, Facts, Pod
from windlass.diagnose.findings import SIGNALS, Evidence, Finding, Weight, evidence_of, first_rule
from windlass.diagnose.rules.scheduling import explain_unschedulable
from windlass.diagnose.rules.shapes import Rule

BY_STATE = "the cluster recorded it as the state of the container or pod"
BY_EVENT = "an event of the cluster says so"
BY_JOB = "the job's own status says so"
BY_NODE = "the node or its kernel reported it"
BY_SLURM = "Slurm's record of the job says so"
BY_EXIT = "only an exit code speaks for it"
BY_START = "the pods have not started, and this is what keeps them"
BY_ANSWER = "the submission was answered so"
# These end a job that may have failed before: what a rank said explains it better.
MILD = {"time_limit": Weight.ENDED, "cancelled": Weight.ASKED}


def platform_findings(facts: Facts) -> list[Finding]:
    """All that the platform says about the job."""
    return [*_ended(facts), *_nodes(facts), *_slurm(facts), *_waiting(facts), *_refused(facts)]


def _by(rule: Rule, weight: Weight, grounds: str, evidence: Evidence) -> Finding:
    return Finding(rule.name, rule.confidence, MILD.get(rule.name, weight), (evidence,), grounds)


# How pods and jobs were ended.


def _ended(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        yield from _ended_by_state(pod, job_failed=facts.job_failed)
    for condition in (*facts.job_conditions, *facts.workload_conditions):
        rule = first_rule("ended", condition.reason or condition.type, condition.message)
        if rule and condition.status != "False":
            weight = Weight.RECORDED if rule.name == "host_oom" else Weight.REPORTED
            yield _by(rule, weight, BY_JOB, evidence_of("job", str(condition), condition.time))
    deleted_at = facts.job_deleted or next((pod.deleted for pod in facts.pods if pod.deleted), None)
    if deleted_at is not None:
        text = f"the deletion of {'the job' if facts.job_deleted else 'its pods'} was asked for"
        sure = 0.8 if facts.job_deleted else 0.55
        yield Finding("cancelled", sure, Weight.ASKED, (evidence_of("job", text, deleted_at),), BY_JOB)
    well = {pod.name for pod in facts.pods if pod.running or pod.phase == "Succeeded"}
    for event in facts.events:
        rule = (
            first_rule("ended", event.reason, event.message)
            if event.kind != "Node" and event.name not in well
            else None
        )
        if rule:
            yield _by(rule, Weight.REPORTED, BY_EVENT, evidence_of("event", str(event), event.time))


def _ended_by_state(pod: Pod, *, job_failed: bool) -> Iterator[Finding]:
    source = f"pod {pod.name}"
    for condition in pod.conditions:
        rule = first_rule("ended", condition.reason, condition.message)
        if condition.type == "DisruptionTarget" and condition.status == "True" and rule:
            yield _by(
                rule, Weight.RECORDED, BY_STATE, evidence_of(source, str(condition), condition.time, host=pod.node)
            )
    if pod.reason and (rule := first_rule("ended", pod.reason, pod.message)):
        yield _by(rule, Weight.RECORDED, BY_STATE, evidence_of(source, f"{pod.reason} {pod.message}", host=pod.node))
    now_ended = {
        container.name for container in pod.containers if container.state == "terminated" and not container.is_last
    }
    for container in pod.containers:
        is_old = container.is_last and (container.name in now_ended or pod.phase == "Succeeded")
        if container.state != "terminated" or is_old:
            continue
        survived = (container.is_last and pod.running) or not container.is_main
        evidence = evidence_of(source, str(container), container.time, host=pod.node)
        if rule := first_rule("ended", container.reason, container.message):
            # it runs again; but the work that was on it may have been what the job failed for
            weight = (
                Weight.RECORDED if not survived else Weight.ENDED if job_failed and container.is_main else Weight.ECHO
            )
            yield _by(rule, weight, BY_STATE, evidence)
        elif container.is_main and not survived:
            yield from _by_signal((container.exit_code or 0) - 128, container.exit_code, evidence)


def _by_signal(signal: int, exit_code: int | None, evidence: Evidence) -> Iterator[Finding]:
    if exit_code in (126, 127):
        yield Finding("container_start", 0.6, Weight.ASKED, (evidence,), BY_EXIT)
    elif signal in SIGNALS:
        name, confidence = SIGNALS[signal]
        yield Finding(name, confidence, Weight.HINT if signal == 9 else Weight.ASKED, (evidence,), BY_EXIT)


def _nodes(facts: Facts) -> Iterator[Finding]:
    """What the nodes of the job and their kernels report."""
    own = {pod.node for pod in facts.pods if pod.node}  # empty where that is not known
    if facts.pods and not own:  # nothing was scheduled: no node has ended it
        return
    proofs: list[Evidence] = []
    for node in facts.nodes:
        if own and node.name not in own:
            continue
        texts = [
            (f"{condition.type} {condition}", condition.time)
            for condition in node.conditions
            if condition.status and (condition.status != "True") == (condition.type == "Ready")
        ]
        texts += [(f"taint {taint}", None) for taint in node.taints if own]
        texts += [(f"label {label}", None) for label in node.labels if own]
        proofs += [evidence_of(f"node {node.name}", text, time, host=node.name) for text, time in texts]
    proofs += [
        evidence_of(f"node {event.name}", f"{event.reason} {event.message}", event.time, host=event.name)
        for event in facts.events
        if event.kind == "Node"
    ]
    for log in facts.logs:
        if log.is_kernel:
            proofs += [evidence_of(log.name, line) for line in log.text.splitlines()[-2000:]]
    for evidence in proofs:
        if rule := first_rule("node", "", evidence.line):
            weight = Weight.TRANSPORT if rule.name == "file_system" else Weight.NODE
            yield _by(rule, weight, BY_NODE, evidence)


def _slurm(facts: Facts) -> Iterator[Finding]:
    requested = max((record.requested for record in facts.slurm), default=0.0)
    for record in facts.slurm:
        if record.signal == 9 and record.used > requested > 0:
            text = f"{record} used {record.used:.0f} MiB of memory, {requested:.0f} MiB were asked for"
            yield Finding("host_oom", 0.85, Weight.RECORDED, (evidence_of(record.source, text),), BY_SLURM)
    # the job itself before its steps: a step may be cancelled because the job ended
    for record in sorted(facts.slurm, key=lambda record: "." in record.name):
        evidence = evidence_of(record.source, str(record))
        rule = first_rule("slurm", record.state, f"{record.reason} {record.comment}")
        is_step = "." in record.name and not record.name.endswith(".batch")
        if rule and not (is_step and rule.name == "cancelled"):
            waits = record.state.startswith(("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUE"))
            yield _by(rule, Weight.REPORTED if waits else Weight.RECORDED, BY_SLURM, evidence)
        elif not record.state.startswith("CANCELLED"):
            yield from _by_signal(record.signal or (record.exit_code or 0) - 128, None, evidence)


# Why it has not begun.

RESOLVED = {
    "FailedScheduling": ("Scheduled", "Started", "Pulled", "Created"),
    "Failed": ("Pulled", "Started"),
    "BackOff": ("Pulled", "Started"),
}
BEYOND_PODS = ("NodeClaim", "NodePool", "Machine", "PersistentVolumeClaim", "PodGroup")
NORMAL = ("", "ContainerCreating", "PodInitializing")


def _waiting(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        if not pod.started:
            yield from _why_not_started(pod, [event for event in facts.events if event.name == pod.name], facts)
        for container in pod.containers:
            if container.reason in ("StartError", "ContainerCannotRun", "RunContainerError"):
                yield from _by_words(f"pod {pod.name}", container.reason, container.message, container.time)
    for event in facts.events:
        if facts.pods and event.kind in BEYOND_PODS and not all(pod.started for pod in facts.pods):
            yield from _of_event(event, facts)
        elif not facts.pods:
            later = [other for other in facts.events if other.order > event.order and other.name == event.name]
            if not any(other.reason in RESOLVED.get(event.reason, ("Started", "Running")) for other in later):
                yield from _of_event(event, facts)


def _why_not_started(pod: Pod, events: Sequence[Event], facts: Facts) -> Iterator[Finding]:
    source = f"pod {pod.name}"
    waits = [
        container for container in pod.containers if container.state == "waiting" and container.reason not in NORMAL
    ]
    pulls = [container for container in waits if re.search(r"Image|Pull", container.reason)]
    failed = [
        event for event in events if re.search(r"(?i)pull", event.message) and event.reason not in ("Pulling", "Pulled")
    ]
    if pulls or (failed and not any(event.reason in ("Pulled", "Started") for event in events)):
        reason = pulls[0].reason if pulls else failed[-1].reason
        texts = [*(container.message for container in pulls), *(event.message for event in reversed(failed)), ""]
        rule, text = next(
            ((rule, text) for text in texts if (rule := first_rule("pull", reason, text))), (None, texts[0])
        )
        evidence = evidence_of(source, f"{reason} {text}", host=pod.node)
        if rule:
            yield _by(rule, Weight.REPORTED, BY_START, evidence)
            return
        yield Finding("image_missing", 0.4, Weight.ASKED, (evidence,), BY_START)
    failed_init = [part for part in pod.containers if part.state == "terminated" and part.is_init and part.exit_code]
    for container in (*waits, *failed_init):
        yield from _by_words(source, container.reason, container.message, container.time)
    for event in reversed(events):
        yield from _of_event(event, facts)
    for condition in pod.conditions:
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message:
            reason = condition.reason if condition.reason == "SchedulingGated" else "FailedScheduling"
            yield from _of_event(Event(reason, condition.message, "Pod", pod.name), facts)
    if pod.gated:
        evidence = evidence_of(source, "scheduling gates are set")
        yield Finding("queue_wait", 0.7, Weight.REPORTED, (evidence,), BY_START)
    elif pod.phase == "Failed":
        yield from _by_words(source, pod.reason, pod.message, None)


def _of_event(event: Event, facts: Facts) -> Iterator[Finding]:
    if event.type == "Normal" and event.reason not in ("Suspended", "NotTriggerScaleUp", "Pending", "Unschedulable"):
        return
    evidence = evidence_of("event", str(event), event.time)
    rule = first_rule("start", event.reason, event.message)
    if event.reason in ("FailedScheduling", "Unschedulable", "NotTriggerScaleUp") and not (
        rule and rule.name == "cloud_capacity"
    ):
        reason = explain_unschedulable(event.message, facts)
        if reason is not None:
            name, confidence = reason
            confidence -= 0.1 if event.reason == "NotTriggerScaleUp" else 0.0
            yield Finding(name, confidence, Weight.REPORTED, (evidence,), BY_START)
            return
    if re.search(r"pull(?:ing)? image|ErrImage|ImagePull", event.message):
        rule = first_rule("pull", event.reason, event.message) or rule
    if rule and event.kind in ("", "Pod", *BEYOND_PODS):
        yield _by(rule, Weight.REPORTED, BY_START, evidence)


def _by_words(source: str, reason: str, message: str, time: float | None) -> Iterator[Finding]:
    if rule := first_rule("start", reason, message):
        yield _by(rule, Weight.REPORTED, BY_START, evidence_of(source, f"{reason} {message}", time))


# Why it, or its pods, could not be made.

ACCEPTED = re.compile(r"^(?:Submitted batch job|submitted|.{0,200}\bcreated$)", re.MULTILINE)
ANSWER = re.compile(
    r"(?:Error from server|error: |Error: |ERROR: |sbatch: |salloc: |srun: error: Unable|Unable to connect|The \w+ \""
    r"|An error|Internal error|HTTP response body|(?:\w+\.)*ApiException|docker: |.{0,120}denied the request)"
)
OUTPUT = re.compile(r"Traceback \(most|torch|NCCL|\bloss\b|slurmstepd")
FAILED_CREATE = re.compile(
    r"Failed\w*Create(?!PodSandBox)\w*|.*ReconcileError|Failed\w*Reconcile\w*|InvalidSpec|ValidationFailed|CreateFailed"
)


def _refused(facts: Facts) -> Iterator[Finding]:
    for log in facts.logs:
        text = log.text if log.is_submission else ""
        # what came before the job was accepted was overcome
        text = text[max((match.end() for match in ACCEPTED.finditer(text)), default=0) :]
        holds_output = OUTPUT.search(text) is not None  # of the job itself: there only what clients print counts
        for line in text.splitlines()[-400:]:
            rule = first_rule("refusal", "", line[:4000]) if not holds_output or ANSWER.match(line) else None
            if rule and not re.search(r"\bretrying|will retry\b", line):
                yield _by(rule, Weight.REPORTED, BY_ANSWER, evidence_of(log.name, line))
    created: dict[str, float] = {}  # when a controller last made a pod: what was refused before that was overcome
    for event in facts.events if facts.pods else ():
        if event.reason.startswith("SuccessfulCreate"):
            created[event.name] = max(created.get(event.name, 0.0), event.time or math.inf)
    for event in facts.events:
        rule = first_rule("refusal", "", event.message) if FAILED_CREATE.fullmatch(event.reason) else None
        if rule and (event.time or 0.0) >= created.get(event.name, 0.0):
            yield _by(rule, Weight.REPORTED, BY_EVENT, evidence_of("event", str(event), event.time))
    yield from _by_conditions("job", facts.job_conditions)
    if not any(condition.type == "Admitted" and condition.status == "True" for condition in facts.workload_conditions):
        known = list(_by_conditions("workload", facts.workload_conditions))
        yield from known
        for condition in () if known else facts.workload_conditions:
            if condition.type in ("QuotaReserved", "Admitted") and condition.status == "False":
                evidence = evidence_of("workload", str(condition), condition.time)
                yield Finding("queue_wait", 0.6, Weight.REPORTED, (evidence,), BY_JOB)


def _by_conditions(source: str, conditions: Sequence[Condition]) -> Iterator[Finding]:
    for condition in conditions:
        is_good = condition.status == "True" and condition.type in ("QuotaReserved", "Admitted", "Ready")
        if is_good or condition.type in ("Complete", "Succeeded", "Running"):
            continue
        if rule := first_rule("refusal", "", f"{condition.reason} {condition.message}"):
            yield _by(rule, Weight.REPORTED, BY_JOB, evidence_of(source, str(condition), condition.time))
