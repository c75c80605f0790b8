"""What Slurm says about partitions and jobs, in the parseable form of sinfo, squeue, sacct and scontrol."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from windlass.errors import UserError
from windlass.spec.slurm import SLURM_TIME
from windlass.targets.slurm.commands import Commands
from windlass.targets.slurm.render import time_seconds

SEPARATOR = "\x1f"  # in no name
NO_SUCH_JOB = "Invalid job id"
VAGUE = "PartitionConfig"  # one of Slurm's schedulers says no more than this, where the other names the limit


@dataclass(frozen=True)
class Partition:
    name: str
    is_default: bool
    is_up: bool
    nodes: int
    cpus_per_node: int
    gpus_per_node: int


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue, or the accounting after it, has it."""

    state: str  # PENDING, RUNNING, COMPLETED, …
    reason: str = "None"
    exit_code: int | None = None


def partitions(commands: Commands) -> dict[str, Partition]:
    text = commands.must("sinfo", "--noheader", "--format", SEPARATOR.join(("%P", "%R", "%a", "%D", "%c", "%G")))
    return parse_partitions(text)


def parse_partitions(text: str) -> dict[str, Partition]:
    """sinfo has a line per partition and kind of node; a partition is what its lines come to."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        marked, name, up, nodes, cpus, gres = line.split(SEPARATOR)
        before = found.get(name)
        found[name] = Partition(
            name=name,
            is_default=marked.endswith("*"),
            is_up=up == "up",
            nodes=int(nodes) + (before.nodes if before else 0),
            cpus_per_node=min(_number(cpus), before.cpus_per_node) if before else _number(cpus),
            gpus_per_node=max(parse_gpus(gres), before.gpus_per_node if before else 0),
        )
    return found


def parse_gpus(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nic:2` has 8."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    return sum(int(one.rsplit(":", 1)[1]) for one in bare.split(",") if re.fullmatch(r"gpu(:[^:]+)?:\d+", one))


def _number(text: str) -> int:
    return int(text.rstrip("+"))  # "64+": nodes of several sizes


def job(commands: Commands, number: str) -> QueuedJob | None:
    """The job in the queue, or among those that ended a while ago; None: Slurm does not know it any more."""
    text = SEPARATOR.join(("%i", "%T", "%r"))
    answer = commands.call("squeue", "--noheader", "--array", "--states=all", "--jobs", number, "--format", text)
    if answer.code == 0:
        found = parse_queue(answer.out).get(number)
        if found is not None:
            return _with_limit(commands, number, _with_exit_code(commands, number, found))
    elif NO_SUCH_JOB not in answer.err:
        commands.must("squeue", "--noheader", "--jobs", number)  # says what is wrong
    return _from_accounting(commands, number)


def parse_queue(text: str) -> dict[str, QueuedJob]:
    rows = (line.split(SEPARATOR) for line in text.splitlines() if line.count(SEPARATOR) == 2)
    return {number: QueuedJob(state, reason) for number, state, reason in rows}


def _with_exit_code(commands: Commands, number: str, found: QueuedJob) -> QueuedJob:
    if found.state != "FAILED":
        return found
    answer = commands.call("scontrol", "show", "job", "--oneliner", number)
    match = re.search(r"\bExitCode=(\d+):", answer.out)
    return QueuedJob(found.state, found.reason, int(match[1]) if match else None)


def _with_limit(commands: Commands, number: str, found: QueuedJob) -> QueuedJob:
    if found.state != "PENDING" or found.reason != VAGUE:
        return found
    asked = _fields(commands.call("scontrol", "show", "job", "--oneliner", number).out)
    given = _fields(commands.call("scontrol", "show", "partition", "--oneliner", asked.get("Partition", "")).out)
    return QueuedJob(found.state, limit_broken(asked, given) or found.reason)


def limit_broken(asked: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    """The limit of its partition that a job goes beyond, by Slurm's own name for it, with both numbers."""
    time_asked, time_given = _seconds(asked.get("TimeLimit", "")), _seconds(given.get("MaxTime", ""))
    if time_given is not None and time_asked is not None and time_asked > time_given:
        return f"PartitionTimeLimit, {asked['TimeLimit']} asked, {given['MaxTime']} at most"
    nodes = asked.get("NumNodes", "").split("-")[0]  # "3-3"
    most = [int(given[key]) for key in ("MaxNodes", "TotalNodes") if given.get(key, "").isdecimal()]
    if nodes.isdecimal() and most and int(nodes) > min(most):
        return f"PartitionNodeLimit, {nodes} asked, {min(most)} at most"
    return None


def _seconds(text: str) -> int | None:
    return time_seconds(text) if SLURM_TIME.fullmatch(text) else None  # "Partition_Limit", "NONE"


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def _from_accounting(commands: Commands, number: str) -> QueuedJob | None:
    """Clusters without accounting have no sacct, or one that says so: then nothing is known."""
    fields = "--format=State,ExitCode"
    try:
        answer = commands.call("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, fields)
    except UserError:
        return None
    return parse_accounting(answer.out) if answer.code == 0 else None


def parse_accounting(text: str) -> QueuedJob | None:
    lines = text.strip().splitlines()
    if not lines:
        return None
    state, code = lines[-1].split("|")
    return QueuedJob(state.split()[0], exit_code=int(code.split(":")[0]))  # "CANCELLED by 1000"
