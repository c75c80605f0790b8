"""The facts about a job: the format of a bundle, and what is read from one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from windlass.common.files import parse_record
from windlass.diagnose import reading as read
from windlass.diagnose.reading import MOST_OBJECTS, clean, moment
from windlass.diagnose.slurm_records import SlurmRecord, last_job, slurm_records

MOST_LOG_CHARACTERS = 4_000_000  # of one log: its beginning and its end are read
Objects = dict[str, Any] | list[dict[str, Any]]


class SlurmFacts(BaseModel):
    """What Slurm knows of the job."""

    sacct: Objects | str | None = Field(
        None, description="`sacct --json`, its rows as objects, or the text of `sacct --parsable2`."
    )
    scontrol: Objects | str | None = Field(
        None, description="`scontrol show job --json`, or the text of `scontrol show job`."
    )


class Bundle(BaseModel):
    """Everything that is known of a job. Every part may be left out; parts that are not named here are passed over."""

    target: str | None = Field(None, description="local, slurm or kubernetes.")
    job: Objects | None = Field(None, description="The job's object, as the API returns it.")
    pods: Objects | None = Field(None, description="Its pods: a list of objects as the API returns them, or a PodList.")
    events: Objects | None = Field(None, description="Events: a list, or an EventList.")
    nodes: Objects | None = Field(None, description="The nodes of its pods: a list, or a NodeList.")
    workload: Objects | None = Field(
        None, description="The object of a queue that stands for the job: Kueue's Workload."
    )
    slurm: SlurmFacts | None = None
    logs: dict[str, str | list[str]] | None = Field(
        None, description="By name: rank0, rank1, …, launcher, submit (what the submission answered), kernel (dmesg)."
    )
    flight_recorders: dict[str, dict[str, Any]] | None = Field(
        None, description="By rank: rank0, rank1, …: what torch's flight recorder dumped, with its `entries`."
    )


def schema() -> dict[str, Any]:
    """The JSON schema of a bundle."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Bundle.model_json_schema()}


@dataclass(frozen=True)
class Container:
    """A container of a pod in one of its states: the present one, or the one before (`is_last`)."""

    pod: str
    name: str
    state: str  # waiting, running or terminated
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    is_init: bool = False
    is_last: bool = False
    is_main: bool = True  # not a sidecar
    time: float | None = None  # when it ended

    def __str__(self) -> str:
        code = f" exit code {self.exit_code}" if self.exit_code is not None else ""
        before = "before this one " if self.is_last else ""
        return f"container {self.name} {before}{self.state} {self.reason}{code} {self.message}".strip()


@dataclass(frozen=True)
class Pod:
    name: str
    node: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    containers: tuple[Container, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    gated: bool = False
    created: float | None = None
    deleted: float | None = None  # when its deletion was asked for

    @property
    def main(self) -> list[Container]:
        """Its main container, in all its states."""
        return [container for container in self.containers if container.is_main and not container.is_init]

    @property
    def started(self) -> bool:
        """Whether its main container has run."""
        return any(container.state != "waiting" for container in self.main) or self.phase == "Succeeded"

    @property
    def running(self) -> bool:
        now = [container.state for container in self.main if not container.is_last]
        return self.phase == "Running" and all(state == "running" for state in now)


@dataclass(frozen=True)
class Condition:
    type: str
    status: str
    reason: str = ""
    message: str = ""
    time: float | None = None

    def __str__(self) -> str:
        return f"{self.type}={self.status} {self.reason} {self.message}".strip()


@dataclass(frozen=True)
class Event:
    reason: str
    message: str
    kind: str = ""
    name: str = ""
    type: str = ""
    time: float | None = None
    order: int = 0

    def __str__(self) -> str:
        about = f"{self.kind}/{self.name}: " if self.name else ""
        return f"{about}{self.reason} {self.message}".strip()


@dataclass(frozen=True)
class Node:
    name: str
    conditions: tuple[Condition, ...] = ()
    taints: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # key=value
    allocatable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    name: str
    text: str

    @property
    def rank(self) -> int | None:
        match = re.search(r"rank[-_ ]?0*(\d{1,6})(?!\d)", self.name, re.IGNORECASE)
        return int(match[1]) if match else None

    @property
    def is_submission(self) -> bool:
        return bool(re.search(r"submi|sbatch|kubectl|apply|client", self.name, re.IGNORECASE))

    @property
    def is_kernel(self) -> bool:
        return bool(re.search(r"kernel|dmesg|syslog|journal|nvrm|node-?problem", self.name, re.IGNORECASE))


@dataclass(frozen=True)
class Facts:
    """A bundle, read."""

    job_name: str = ""
    job_conditions: tuple[Condition, ...] = ()
    job_deleted: float | None = None
    workload_conditions: tuple[Condition, ...] = ()
    pods: tuple[Pod, ...] = ()
    events: tuple[Event, ...] = ()
    nodes: tuple[Node, ...] = ()
    slurm: tuple[SlurmRecord, ...] = ()
    logs: tuple[Log, ...] = ()
    recorders: Mapping[str, Any] = field(default_factory=dict)  # flight recorders, by rank

    @classmethod
    def read(cls, value: Any) -> Facts:
        """Facts of a bundle's JSON value, whatever it holds."""
        bundle = read.mapping(value)
        jobs, workloads = read.objects(bundle.get("job")), read.objects(bundle.get("workload"))
        pods = tuple(pod for item in read.objects(bundle.get("pods")) if (pod := _pod(item)))
        conditions = tuple(condition for job in jobs for condition in _job_conditions(job))
        return cls(
            job_name=next((name for owner in jobs if (name := read.text(read.at(owner, "metadata", "name")))), ""),
            job_deleted=next(
                (at for owner in jobs if (at := moment(read.at(owner, "metadata", "deletionTimestamp")))), None
            ),
            job_conditions=conditions,
            workload_conditions=tuple(condition for workload in workloads for condition in _job_conditions(workload)),
            pods=pods,
            events=_own(_events(bundle.get("events")), pods, jobs),
            nodes=tuple(_node(node) for node in read.objects(bundle.get("nodes"))),
            slurm=last_job(slurm_records(bundle.get("slurm"))),
            logs=(*_logs(bundle.get("logs")), *_quoted_logs(pods, conditions)),
            recorders=read.mapping(bundle.get("flight_recorders")),
        )

    @property
    def is_empty(self) -> bool:
        parts = (self.job_conditions, self.workload_conditions, self.pods, self.events, self.nodes, self.slurm)
        return not any(parts) and not any(log.text.strip() for log in self.logs)

    @property
    def job_failed(self) -> bool:
        return any(
            condition.type.lower() == "failed" and condition.status == "True" for condition in self.job_conditions
        )

    @property
    def asks_for_gpus(self) -> bool | None:
        """Whether its pods or its Slurm job ask for GPUs; None where that is not known."""
        requests = [" ".join(pod.requests) for pod in self.pods if pod.requests]
        requests += [record.resources for record in self.slurm if record.resources]
        return any("gpu" in resources for resources in requests) if requests else None

    def host_of(self, rank: int | None, log_name: str) -> str | None:
        """The node of a rank, where a pod says so by its name."""
        for pod in self.pods:
            ends_so = rank is not None and re.search(rf"(?:^|[-_.]){rank}(?:$|-[a-z0-9]{{5}}$)", pod.name)
            if pod.node and (pod.name == log_name or ends_so):
                return pod.node
        return None


def _conditions(value: Any) -> tuple[Condition, ...]:
    conditions = []
    for item in read.items(read.at(value, "status", "conditions")):
        condition = read.mapping(item)
        texts = {key: read.text(condition.get(key)) for key in ("type", "status", "reason", "message")}
        when = condition.get("lastTransitionTime") or condition.get("lastUpdateTime")
        conditions.append(Condition(**texts, time=moment(when)))
    return tuple(conditions)


def _job_conditions(value: Any) -> tuple[Condition, ...]:
    """The conditions of a job; a status with a state, reason or message of its own counts as one."""
    status = read.mapping(read.at(value, "status"))
    of_ray = "Failed" if status.get("jobDeploymentStatus") == "Failed" else status.get("jobStatus")
    phase = status.get("phase") or status.get("state") or of_ray
    state = read.text(read.at(phase, "phase") or phase)
    conditions = _conditions(value)
    message = read.text(status.get("message") or read.at(phase, "message"))
    if state or status.get("reason") or message:
        conditions = (
            *conditions,
            Condition(state, "True", read.text(status.get("reason") or read.at(phase, "reason")), message),
        )
    return conditions


POD_SUFFIX = re.compile(r"(-(worker|master|launcher|head|node))?(-\d+)*(-[a-z0-9]{5})?$")
SIDECARS = re.compile(r"istio|proxy|envoy|linkerd|vault|fluent|log|metric|exporter|tensorboard|sidecar|agent|datadog")


def _pod(value: Mapping[str, Any]) -> Pod | None:
    name = read.text(read.at(value, "metadata", "name")) or read.text(value.get("name"))
    status = read.mapping(value.get("status"))
    spec = read.mapping(value.get("spec"))
    first = read.text(read.at((read.items(spec.get("containers")) or [None])[0], "name"))
    containers: list[Container] = []
    for key in ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"):
        for container in read.items(status.get(key)):
            containers += _container(name, read.mapping(container), is_init=key.startswith("init"), first=first)
    mains = [container for container in containers if not container.is_init]
    if mains and not any(main.is_main for main in mains):  # a job that is itself called "agent", say
        containers = [Container(**{**vars(container), "is_main": True}) for container in containers]
    if not name and not status:
        return None
    requests: dict[str, str] = {}
    for container in read.items(spec.get("containers")):
        for part in ("limits", "requests"):
            amounts = read.mapping(read.at(container, "resources", part))
            requests |= {read.text(key): read.text(amount) for key, amount in amounts.items() if isinstance(key, str)}
    return Pod(
        name=name,
        node=read.text(spec.get("nodeName")),
        phase=read.text(status.get("phase")),
        reason=read.text(status.get("reason")),
        message=read.text(status.get("message")),
        conditions=_conditions(value),
        containers=tuple(containers),
        requests=requests,
        gated=bool(read.items(spec.get("schedulingGates"))),
        created=moment(read.at(value, "metadata", "creationTimestamp")),
        deleted=moment(read.at(value, "metadata", "deletionTimestamp")),
    )


def _container(pod: str, value: Mapping[str, Any], *, is_init: bool, first: str) -> Iterator[Container]:
    name = read.text(value.get("name"))
    is_main = name == first or not SIDECARS.search(name)
    for key in ("state", "lastState"):
        states = read.mapping(value.get(key))
        for state in ("terminated", "waiting", "running"):
            if not isinstance(states.get(state), Mapping):
                continue
            detail = read.mapping(states[state])
            code = read.number(detail.get("exitCode"))
            signal = read.number(detail.get("signal"))
            yield Container(
                pod=pod,
                name=name,
                state=state,
                reason=read.text(detail.get("reason")),
                message=read.text(detail.get("message")),
                exit_code=128 + signal if code in (None, 0) and signal else code,
                is_init=is_init,
                is_last=key == "lastState",
                is_main=is_main,
                time=moment(detail.get("finishedAt")),
            )
            break


def _events(value: Any) -> tuple[Event, ...]:
    """Events of the API (both groups), or records of events.jsonl; in the order of time where all have one."""
    events = []
    for order, event in enumerate(read.objects(value)):
        about = read.mapping(event.get("involvedObject") or event.get("regarding"))
        kind, name = read.text(about.get("kind")), read.text(about.get("name"))
        if not about and isinstance(event.get("object"), str):
            kind, _, name = read.text(event["object"]).partition("/")
        series = read.mapping(event.get("series"))
        times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"), event.get("time"))
        when = next((at for at in map(moment, (*times, event.get("firstTimestamp"))) if at is not None), None)
        message = read.text(event.get("message")) or read.text(event.get("note"))
        events.append(
            Event(read.text(event.get("reason")), message, kind, name, read.text(event.get("type")), when, order)
        )
    if all(event.time is not None for event in events):
        events.sort(key=lambda event: event.time or 0.0)
    return tuple(events)


def _own(events: tuple[Event, ...], pods: Sequence[Pod], jobs: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events about this job's objects; those of other jobs in the namespace say nothing about it."""
    names = {pod.name for pod in pods if pod.name}
    stems = {name for job in jobs if (name := read.text(read.at(job, "metadata", "name")))}
    stems |= {POD_SUFFIX.sub("", name) for name in names} - {""}
    nodes: dict[str, float] = {}  # since when the job has a pod there
    for pod in pods:
        if pod.node:
            nodes[pod.node] = min(nodes.get(pod.node, math.inf), pod.created or 0.0)

    def is_own(event: Event) -> bool:
        if not event.name or not (names or stems):
            return True
        if event.kind == "Node":
            return not nodes or (event.name in nodes and (event.time is None or event.time >= nodes[event.name]))
        if event.kind == "Pod" and names:
            return event.name in names or (event.name.startswith(tuple(f"{stem}-" for stem in stems)))
        return event.kind not in ("Pod", "Job") or event.name.startswith(tuple(stems))

    return tuple(candidate for candidate in events if is_own(candidate))


def _node(value: Mapping[str, Any]) -> Node:
    taints = [read.mapping(taint) for taint in read.items(read.at(value, "spec", "taints"))]
    allocatable = read.mapping(read.at(value, "status", "allocatable"))
    labels = read.mapping(read.at(value, "metadata", "labels"))
    return Node(
        name=read.text(read.at(value, "metadata", "name")),
        conditions=_conditions(value),
        taints=tuple(
            f"{read.text(taint.get('key'))}={read.text(taint.get('value'))}:{read.text(taint.get('effect'))}"
            for taint in taints
        ),
        labels=tuple(f"{read.text(key)}={read.text(label)}" for key, label in labels.items()),
        allocatable={read.text(key): read.text(amount) for key, amount in allocatable.items()},
    )


def _logs(value: Any) -> Iterator[Log]:
    if isinstance(value, str | list):
        value = {"log": value}
    for name, content in list(read.mapping(value).items())[:MOST_OBJECTS]:
        if isinstance(content, Mapping):
            content = content.get("text", content.get("log", content.get("lines")))
        if isinstance(content, list):
            content = "\n".join(map(_log_line, content))
        if isinstance(content, bytes):
            content = content.decode("utf-8", "replace")
        if isinstance(content, str):
            if len(content) > MOST_LOG_CHARACTERS:
                half = MOST_LOG_CHARACTERS // 2
                content = content[:half] + "\n" + content[-half:]
            yield Log(clean(str(name)), clean(_decoded(content)))


def _quoted_logs(pods: Sequence[Pod], conditions: Sequence[Condition]) -> Iterator[Log]:
    """The end of a log where a state holds it: a container's termination message, the status of a RayJob."""
    for pod in pods:
        for container in pod.containers:
            if container.state == "terminated" and container.exit_code and container.is_main and container.message:
                name = f"termination message of {pod.name}"
                yield Log(f"{name} previous" if container.is_last else name, container.message)
    for condition in conditions:
        if "Traceback (most recent call last)" in condition.message:
            yield Log("status of the job", condition.message)


def _decoded(text: str) -> str:
    """The traceback of an error file that torchrun's workers write, instead of its JSON."""
    if '"py_callstack"' not in text:
        return text
    error = (parse_record(text) or {}).get("message")
    return read.text(read.at(error, "extraInfo", "py_callstack")) or read.text(read.at(error, "message")) or text


def _log_line(value: Any) -> str:
    if isinstance(value, Mapping):  # {"time": …, "line": …}
        when = value.get("time") or value.get("timestamp")
        words = value.get("line") or value.get("text") or value.get("message") or value.get("log")
        return f"{when + ' ' if isinstance(when, str) else ''}{read.text(words)}"
    return read.text(value)
