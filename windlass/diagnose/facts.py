"""The facts about a job, as a bundle holds them, read tolerantly: anything may be missing, cut off or of a wrong type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

MOST_LOG_CHARACTERS = 4_000_000  # of one log: its beginning and its end are read
MOST_OBJECTS = 20_000
MOST_TEXT = 20_000  # characters of one message


Objects = dict[str, Any] | list[dict[str, Any]]


class SlurmFacts(BaseModel):
    """What Slurm knows of the job."""

    sacct: Objects | str | None = Field(None, description="`sacct --json`, its rows as objects, or the text of `sacct --parsable2`.")
    scontrol: Objects | str | None = Field(None, description="`scontrol show job --json`, or the text of `scontrol show job`.")


class Bundle(BaseModel):
    """Everything that is known of a job. Every part may be left out; parts that are not named here are passed over."""

    target: str | None = Field(None, description="local, slurm or kubernetes.")
    job: Objects | None = Field(None, description="The job's object, as the API returns it.")
    pods: Objects | None = Field(None, description="Its pods: a list of objects as the API returns them, or a PodList.")
    events: Objects | None = Field(None, description="Events: a list, or an EventList.")
    nodes: Objects | None = Field(None, description="The nodes of its pods: a list, or a NodeList.")
    workload: Objects | None = Field(None, description="The object of a queue that stands for the job: Kueue's Workload.")
    slurm: SlurmFacts | None = None
    logs: dict[str, str | list[str]] | None = Field(None, description="By name: rank0, rank1, …, launcher, submit (what the submission answered), kernel (dmesg).")


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
    restarts: int = 0
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
    deleted: float | None = None  # when its deletion was asked for

    @property
    def started(self) -> bool:
        """Whether its main container has run."""
        return any(one.state != "waiting" for one in self.containers if not one.is_init) or self.phase == "Succeeded"

    @property
    def running(self) -> bool:
        main = [one for one in self.containers if one.is_main and not one.is_init and not one.is_last]
        return self.phase == "Running" and all(one.state == "running" for one in main)


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
    allocatable: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlurmRecord:
    """A job or a step of it, as accounting or the controller has it."""

    name: str  # 123, 123.batch, 123.0
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    comment: str = ""
    source: str = "sacct"
    time: str = ""  # when it ended, or was submitted

    def __str__(self) -> str:
        code = f" exit code {self.exit_code}" if self.exit_code else ""
        signal = f" signal {self.signal}" if self.signal else ""
        return f"{self.name} {self.state} {self.reason}{code}{signal} {self.comment}".strip()


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

    target: str = ""
    job_name: str = ""
    job_conditions: tuple[Condition, ...] = ()
    job_deleted: float | None = None
    workload_conditions: tuple[Condition, ...] = ()
    pods: tuple[Pod, ...] = ()
    events: tuple[Event, ...] = ()
    nodes: tuple[Node, ...] = ()
    slurm: tuple[SlurmRecord, ...] = ()
    logs: tuple[Log, ...] = ()

    @classmethod
    def read(cls, value: Any) -> Facts:
        """Facts of a bundle's JSON value, whatever it holds."""
        bundle = _mapping(value)
        jobs, workloads = _objects(bundle.get("job")), _objects(bundle.get("workload"))
        pods = tuple(pod for one in _objects(bundle.get("pods")) if (pod := _pod(one)))
        return cls(
            target=_text(bundle.get("target")),
            job_name=next((name for one in jobs if (name := _text(_at(one, "metadata", "name")))), ""),
            job_deleted=next((at for one in jobs if (at := moment(_at(one, "metadata", "deletionTimestamp")))), None),
            job_conditions=tuple(one for job in jobs for one in _job_conditions(job)),
            workload_conditions=tuple(one for item in workloads for one in _job_conditions(item)),
            pods=pods,
            events=_own(_events(bundle.get("events")), pods, jobs),
            nodes=tuple(_node(one) for one in _objects(bundle.get("nodes"))),
            slurm=_last_job(list(_slurm(bundle.get("slurm")))),
            logs=tuple(_logs(bundle.get("logs"))),
        )

    @property
    def is_empty(self) -> bool:
        parts = (self.job_conditions, self.workload_conditions, self.pods, self.events, self.nodes, self.slurm)
        return not any(parts) and not any(log.text.strip() for log in self.logs)

    def pods_of_nodes(self) -> set[str]:
        """The nodes that the job's pods are on; empty where that is not known."""
        return {pod.node for pod in self.pods if pod.node}

    def host_of(self, rank: int | None, log_name: str) -> str | None:
        """The node of a rank, where a pod says so by its name."""
        for pod in self.pods:
            ends_so = rank is not None and re.search(rf"(?:^|[-_.]){rank}(?:$|-[a-z0-9]{{5}}$)", pod.name)
            if pod.node and (pod.name == log_name or ends_so):
                return pod.node
        return None


def clean(text: str) -> str:
    """Text without half surrogates and NULs, which can neither be printed nor encoded."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")


def moment(value: Any) -> float | None:
    """Seconds since 1970 of a time as the API, a log or a record writes it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 < value < 1e11 else None
    if not isinstance(value, str):
        return None
    match = re.match(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?", value)
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        when = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in (None, 'Z') else zone}")
    except ValueError:
        return None
    return when.astimezone(UTC).timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


# Reading what may be anything.


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value[:MOST_OBJECTS] if isinstance(value, list | tuple) else []


def _text(value: Any) -> str:
    if isinstance(value, str):
        return clean(value[:MOST_TEXT])
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else ""


def _number(value: Any) -> int | None:
    if isinstance(value, Mapping):  # Slurm: {"set": true, "infinite": false, "number": 1}
        return _number(value.get("number")) if value.get("set", True) else None
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value.strip()):
        return int(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else None


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = _mapping(value).get(key)
    return value


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """A list of objects, a List object of the API, or one object."""
    if isinstance(value, Mapping):
        items = value.get("items")
        value = items if isinstance(items, list) else [value] if value else []
    return [one for one in _list(value) if isinstance(one, Mapping)]


def _conditions(value: Any) -> tuple[Condition, ...]:
    found = []
    for one in _list(_at(value, "status", "conditions")):
        one = _mapping(one)
        when = one.get("lastTransitionTime") or one.get("lastUpdateTime")
        texts = [_text(one.get(key)) for key in ("type", "status", "reason", "message")]
        found.append(Condition(*texts, moment(when)))
    return tuple(found)


def _job_conditions(value: Any) -> tuple[Condition, ...]:
    """The conditions of a job; a status with a state, reason or message of its own counts as one."""
    status = _mapping(_at(value, "status"))
    phase = status.get("phase") or status.get("state")
    state = _text(_at(phase, "phase") or phase)
    found = _conditions(value)
    message = _text(status.get("message") or _at(phase, "message"))
    if state or status.get("reason") or message:
        found = (*found, Condition(state, "True", _text(status.get("reason") or _at(phase, "reason")), message))
    return found


SIDECARS = re.compile(r"istio|proxy|envoy|linkerd|vault|fluent|log|metric|exporter|tensorboard|sidecar|agent|datadog")


def _pod(value: Mapping[str, Any]) -> Pod | None:
    name = _text(_at(value, "metadata", "name")) or _text(value.get("name"))
    status = _mapping(value.get("status"))
    spec = _mapping(value.get("spec"))
    first = _text(_at((_list(spec.get("containers")) or [None])[0], "name"))
    containers: list[Container] = []
    for key in ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"):
        for one in _list(status.get(key)):
            containers += _container(name, _mapping(one), is_init=key.startswith("init"), first=first)
    mains = [one for one in containers if not one.is_init]
    if mains and not any(one.is_main for one in mains):  # a job that is itself called "agent", say
        containers = [Container(**{**vars(one), "is_main": True}) for one in containers]
    if not name and not status:
        return None
    requests: dict[str, str] = {}
    for one in _list(spec.get("containers")):
        for part in ("limits", "requests"):
            amounts = _mapping(_at(one, "resources", part))
            requests |= {_text(key): _text(amount) for key, amount in amounts.items() if isinstance(key, str)}
    return Pod(
        name=name,
        node=_text(spec.get("nodeName")),
        phase=_text(status.get("phase")),
        reason=_text(status.get("reason")),
        message=_text(status.get("message")),
        conditions=_conditions(value),
        containers=tuple(containers),
        requests=requests,
        gated=bool(_list(spec.get("schedulingGates"))),
        deleted=moment(_at(value, "metadata", "deletionTimestamp")),
    )


def _container(pod: str, value: Mapping[str, Any], *, is_init: bool, first: str) -> Iterator[Container]:
    name = _text(value.get("name"))
    is_main = name == first or not SIDECARS.search(name)
    for key in ("state", "lastState"):
        states = _mapping(value.get(key))
        for state in ("terminated", "waiting", "running"):
            if not isinstance(states.get(state), Mapping):
                continue
            detail = _mapping(states[state])
            code = _number(detail.get("exitCode"))
            signal = _number(detail.get("signal"))
            yield Container(
                pod=pod,
                name=name,
                state=state,
                reason=_text(detail.get("reason")),
                message=_text(detail.get("message")),
                exit_code=128 + signal if code in (None, 0) and signal else code,
                restarts=_number(value.get("restartCount")) or 0,
                is_init=is_init,
                is_last=key == "lastState",
                is_main=is_main,
                time=moment(detail.get("finishedAt")),
            )
            break


def _events(value: Any) -> tuple[Event, ...]:
    """Events of the API (both groups), or records of events.jsonl; in the order of time where all have one."""
    found = []
    for order, one in enumerate(_objects(value)):
        about = _mapping(one.get("involvedObject") or one.get("regarding"))
        kind, name = _text(about.get("kind")), _text(about.get("name"))
        if not about and isinstance(one.get("object"), str):
            kind, _, name = _text(one["object"]).partition("/")
        series = _mapping(one.get("series"))
        times = (one.get("lastTimestamp"), series.get("lastObservedTime"), one.get("eventTime"), one.get("time"))
        when = next((at for at in map(moment, (*times, one.get("firstTimestamp"))) if at is not None), None)
        message = _text(one.get("message")) or _text(one.get("note"))
        found.append(Event(_text(one.get("reason")), message, kind, name, _text(one.get("type")), when, order))
    if all(one.time is not None for one in found):
        found.sort(key=lambda one: one.time or 0.0)
    return tuple(found)


def _own(events: tuple[Event, ...], pods: Sequence[Pod], jobs: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events about this job's objects; those of other jobs in the namespace say nothing about it."""
    names = {pod.name for pod in pods if pod.name}
    stems = {name for one in jobs if (name := _text(_at(one, "metadata", "name")))}
    stems |= {re.sub(r"(-(worker|master|launcher|head|node))?(-\d+)*(-[a-z0-9]{5})?$", "", name) for name in names} - {""}
    nodes = {pod.node for pod in pods if pod.node}

    def is_own(event: Event) -> bool:
        if not event.name or not (names or stems):
            return True
        if event.kind == "Node":
            return event.name in nodes or not nodes
        if event.kind == "Pod" and names:
            return event.name in names or (event.name.startswith(tuple(f"{stem}-" for stem in stems)))
        return event.kind not in ("Pod", "Job") or event.name.startswith(tuple(stems))

    return tuple(one for one in events if is_own(one))


def _node(value: Mapping[str, Any]) -> Node:
    taints = [_mapping(one) for one in _list(_at(value, "spec", "taints"))]
    allocatable = _mapping(_at(value, "status", "allocatable"))
    labels = _mapping(_at(value, "metadata", "labels"))
    return Node(
        name=_text(_at(value, "metadata", "name")),
        conditions=_conditions(value),
        taints=tuple(f"{_text(one.get('key'))}={_text(one.get('value'))}:{_text(one.get('effect'))}" for one in taints),
        allocatable={_text(key): _text(amount) for key, amount in allocatable.items()},
        labels={_text(key): _text(label) for key, label in labels.items()},
    )


def _slurm(value: Any) -> Iterator[SlurmRecord]:
    facts = _mapping(value)
    for source in ("scontrol", "sacct"):
        part = facts.get(source)
        if isinstance(part, str):
            yield from _slurm_text(clean(part[:MOST_LOG_CHARACTERS]), source)
            continue
        jobs = _at(part, "jobs") if isinstance(_at(part, "jobs"), list) else part
        for job in _objects(jobs):
            yield from _slurm_record(job, source)
            for step in _objects(job.get("steps")):
                yield from _slurm_record(step, source)


def _slurm_record(value: Mapping[str, Any], source: str) -> Iterator[SlurmRecord]:
    fields = {str(key).lower().replace("_", ""): one for key, one in value.items()}
    state, reason = fields.get("jobstate", fields.get("state")), fields.get("statereason", fields.get("reason"))
    if isinstance(state, Mapping):  # sacct --json
        reason = reason or state.get("reason")
        state = state.get("current")
    words = " ".join(map(_text, state)) if isinstance(state, list) else _text(state)
    code, signal = _exit_code(fields.get("exitcode"))
    derived, _ = _exit_code(fields.get("derivedexitcode"))
    step = _mapping(fields.get("step"))
    name = _text(step.get("id") or fields.get("jobid") or fields.get("name"))
    comment = " ".join(_text(fields.get(key)) for key in ("comment", "admincomment", "systemcomment", "statedescription"))
    killer = _text(_at(fields.get("killrequestuser"), "name") or fields.get("killrequestuser"))
    if words:
        words += f" by {killer}" if killer and killer != "0" and "CANCEL" in words and " by " not in words else ""
        when = next((text for key in ("end", "endtime", "start", "submit") if (text := _text(fields.get(key))) and text[:1].isdigit()), "")
        code = code if code else derived or code
        yield SlurmRecord(name, words, _text(reason), code, signal, comment.strip(), source, when)


def _last_job(records: list[SlurmRecord]) -> tuple[SlurmRecord, ...]:
    """The records of one job: the controller's, or the one that ended last; an earlier one is another attempt."""

    def number(record: SlurmRecord) -> str:
        return record.name.split(".")[0]

    asked = [one for one in records if one.source == "scontrol" and one.name]
    jobs = asked or [one for one in records if "." not in one.name]
    if not jobs:
        return tuple(records)
    last = number(max(jobs, key=lambda one: one.time)) if all(one.time for one in jobs) else number(jobs[-1])
    own = [one for one in records if number(one) == last or not one.name]
    whole = [one for one in own if "." not in one.name and one.source == "sacct"]
    # a requeued job has a row for every stay on the nodes
    return tuple(one for one in own if one not in whole[:-1])


def _exit_code(value: Any) -> tuple[int | None, int | None]:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?\d{1,9})(?::(\d{1,4}))?\s*", value)
        return (int(match[1]), int(match[2] or 0) or None) if match else (None, None)
    if isinstance(value, Mapping):
        signal = _at(value, "signal", "id") or value.get("signal")
        return _number(value.get("return_code", value.get("number"))), _number(signal)
    return _number(value), None


def _slurm_text(text: str, source: str) -> Iterator[SlurmRecord]:
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and "|" in lines[0]:  # sacct --parsable2, with its header
        header = [name.strip() for name in lines[0].split("|")]
        for line in lines[1:]:
            yield from _slurm_record(dict(zip(header, line.split("|"), strict=False)), source)
        return
    blocks = re.split(r"(?=\bJobId=)", text)
    for block in blocks:
        fields = dict(re.findall(r"(?<!\S)([A-Za-z:_/]+)=(\S*)", block))
        if "JobState" in fields:
            yield from _slurm_record({**fields, "name": fields.get("JobId", "")}, source)
    if "JobState=" not in text and lines and "State" in lines[0]:  # sacct's table of fixed columns
        rule = next((line for line in lines if set(line.strip()) <= {"-", " "}), "")
        spans = [match.span() for match in re.finditer(r"-+", rule)]
        header = [lines[0][begin:end].strip() for begin, end in spans]
        for line in lines[1:]:
            if line is not rule:
                row = {name: line[begin:end].strip() for name, (begin, end) in zip(header, spans, strict=True)}
                yield from _slurm_record(row, source)


def _logs(value: Any) -> Iterator[Log]:
    if isinstance(value, str | list):
        value = {"log": value}
    for name, content in list(_mapping(value).items())[:MOST_OBJECTS]:
        if isinstance(content, list):
            content = "\n".join(_log_line(one) for one in content)
        if isinstance(content, Mapping):
            content = content.get("text", content.get("log", content.get("lines")))
            content = "\n".join(map(_log_line, content)) if isinstance(content, list) else content
        if isinstance(content, bytes):
            content = content.decode("utf-8", "replace")
        if isinstance(content, str):
            if len(content) > MOST_LOG_CHARACTERS:
                half = MOST_LOG_CHARACTERS // 2
                content = content[:half] + "\n" + content[-half:]
            yield Log(clean(str(name)), clean(content))


def _log_line(value: Any) -> str:
    if isinstance(value, Mapping):  # {"time": …, "line": …}
        when = value.get("time") or value.get("timestamp")
        words = value.get("line") or value.get("text") or value.get("message") or value.get("log")
        return f"{when + ' ' if isinstance(when, str) else ''}{_text(words)}"
    return _text(value)


def parse_json(text: str) -> Any:
    """A JSON value; None for text that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
