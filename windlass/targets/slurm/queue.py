"""What Slurm says about partitions and jobs, in the parseable form of sinfo, squeue, sacct and scontrol.

Over SSH the output of a command may be surrounded by what a login shell prints. So the fields of a line stand between
separators that nothing else prints, and a line that is not of the expected form is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.errors import UserError
from windlass.spec.slurm import SLURM_TIME
from windlass.targets.slurm.commands import Commands, SilentError
from windlass.targets.slurm.render import comment_of, time_seconds

SEPARATOR = "\x1f"  # in no name
NO_SUCH_JOB = "Invalid job id"
VAGUE = "PartitionConfig"  # one of Slurm's schedulers says no more than this, where the other names the limit
ASK_TIMEOUT_SECONDS = 20.0  # somebody watches the run meanwhile
JOB_NUMBER = re.compile(r"[0-9]{1,12}(_[0-9]{1,9})?")


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
    by_name: dict[str, Partition] = {}
    for marked, name, up, nodes, cpus, gres in _rows(text, 6):
        num_nodes, num_cpus = _number(nodes), _number(cpus)
        if not name or num_nodes is None or num_cpus is None:
            continue
        before = by_name.get(name)
        by_name[name] = Partition(
            name=name,
            is_default=marked.endswith("*"),
            is_up=up == "up",
            nodes=num_nodes + (before.nodes if before else 0),
            cpus_per_node=min(num_cpus, before.cpus_per_node) if before else num_cpus,
            gpus_per_node=max(parse_gpus(gres), before.gpus_per_node if before else 0),
        )
    return by_name


def _rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """The fields of the lines that have so many."""
    rows = (line.split(SEPARATOR) for line in text.splitlines())
    return (row for row in rows if len(row) == num_fields)


def parse_gpus(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nic:2` has 8; where a count is left out, as in `gpu:h100`, it is 1."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    counts = (re.fullmatch(r"gpu(:[^:,]+?)*?(:([0-9]{1,6}))?", part) for part in bare.split(","))
    return sum(int(count[3] or 1) for count in counts if count)


def _number(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]{1,9})\+?", text.strip())  # "64+": nodes of several sizes
    return int(match[1]) if match else None


def parse_sbatch(text: str) -> str | None:
    """The job's number among what `sbatch --parsable` printed, `12` or `12;cluster`; None where that is not clear."""
    lines = [line.strip() for line in text.splitlines()]
    numbers = {match[1] for line in lines if (match := re.fullmatch(r"([0-9]{1,12})(;\S*)?", line))}
    return numbers.pop() if len(numbers) == 1 else None


def job(commands: Commands, number: str) -> QueuedJob | None:
    """The job in the queue, or among those that ended a while ago; None: Slurm does not know it any more."""
    options = ("--noheader", "--array", "--states=all", "--jobs", number)
    answer = commands.call("squeue", *options, "--format", _QUEUE_FORMAT, timeout=ASK_TIMEOUT_SECONDS)
    if answer.code == 0:
        queued = parse_queue(answer.out).get(number)
        if queued is not None:
            return _with_limit(commands, number, _with_exit_code(commands, number, queued))
    elif NO_SUCH_JOB not in answer.err:
        raise SilentError("squeue failed", evidence=answer.complaint)
    return _from_accounting(commands, number)


_QUEUE_FORMAT = SEPARATOR.join(("", "%i", "%T", "%r"))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    rows = _rows(text, 4)
    return {number: QueuedJob(state, reason) for _, number, state, reason in rows if JOB_NUMBER.fullmatch(number)}


def find_submission(commands: Commands, submission: str, index: int | None) -> str | None:
    """The number of the job that a submission became, `12_3` say for an element of an array; None: there is none."""
    text = SEPARATOR.join(("", "%i", "%k"))
    options = ("--noheader", "--array", "--states=all", "--me")
    answer = commands.call("squeue", *options, "--format", text, timeout=ASK_TIMEOUT_SECONDS)
    if answer.code != 0:
        raise SilentError("squeue failed", evidence=answer.complaint)
    numbers = parse_comments(answer.out, submission)
    return next((number for number in numbers if index is None or number.endswith(f"_{index}")), None)


def parse_comments(text: str, submission: str) -> list[str]:
    """The jobs whose comment names a submission."""
    mine = (number for _, number, comment in _rows(text, 3) if comment_of(submission) in comment)
    return [number for number in mine if JOB_NUMBER.fullmatch(number)]


def _with_exit_code(commands: Commands, number: str, queued: QueuedJob) -> QueuedJob:
    if queued.state != "FAILED":
        return queued
    answer = commands.call("scontrol", "show", "job", "--oneliner", number)
    return QueuedJob(queued.state, queued.reason, parse_exit_code(answer.out))


def parse_exit_code(line: str) -> int | None:
    match = re.search(r"(?<!\S)ExitCode=([0-9]{1,3}):", line)
    return int(match[1]) if match else None


def _with_limit(commands: Commands, number: str, queued: QueuedJob) -> QueuedJob:
    if queued.state != "PENDING" or queued.reason != VAGUE:
        return queued
    job_fields = fields_of(commands.call("scontrol", "show", "job", "--oneliner", number).out)
    partition_fields = fields_of(
        commands.call("scontrol", "show", "partition", "--oneliner", job_fields.get("Partition", "")).out
    )
    return QueuedJob(queued.state, limit_broken(job_fields, partition_fields) or queued.reason)


def limit_broken(job: Mapping[str, str], partition: Mapping[str, str]) -> str | None:
    """The limit of its partition that a job goes beyond, by Slurm's own name for it, with both numbers."""
    time_asked, time_given = _seconds(job.get("TimeLimit", "")), _seconds(partition.get("MaxTime", ""))
    if time_given is not None and time_asked is not None and time_asked > time_given:
        return f"PartitionTimeLimit, {job['TimeLimit']} asked, {partition['MaxTime']} at most"
    nodes = _number(job.get("NumNodes", "").split("-")[0])  # "3-3"
    limits = [_number(partition.get(key, "")) for key in ("MaxNodes", "TotalNodes")]
    most = [limit for limit in limits if limit is not None]
    if nodes is not None and most and nodes > min(most):
        return f"PartitionNodeLimit, {nodes} asked, {min(most)} at most"
    return None


def _seconds(text: str) -> int | None:
    return time_seconds(text) if SLURM_TIME.fullmatch(text) else None  # "Partition_Limit", "NONE"


def fields_of(line: str) -> dict[str, str]:
    return dict(re.findall(r"(?<!\S)([^\s=]+)=(\S*)", line))


def _from_accounting(commands: Commands, number: str) -> QueuedJob | None:
    """Clusters without accounting have no sacct, or one that says so: then nothing is known."""
    options = ("--noheader", "--parsable2", f"--delimiter={SEPARATOR}", "--allocations", "--jobs", number)
    try:
        answer = commands.call("sacct", *options, "--format=Cluster,JobID,State,ExitCode")
    except UserError:
        return None
    return parse_accounting(answer.out, number) if answer.code == 0 else None


def parse_accounting(text: str, number: str) -> QueuedJob | None:
    """The newest record of a job: one that was requeued may have several."""
    newest = None
    for _, job_id, state, exit_code in _rows(text, 4):
        if job_id == number and state.split():
            code = re.match(r"[0-9]{1,3}(?=:)", exit_code)
            newest = QueuedJob(state.split()[0], exit_code=int(code[0]) if code else None)  # "CANCELLED by 1000"
    return newest


FIELDS = (
    "JobID,JobName,State,ExitCode,DerivedExitCode,Reason,Submit,Start,End,Elapsed,Timelimit,NodeList,MaxRSS,ReqMem"
    ",Comment,SystemComment,ReqTRES"
)
MOST_BYTES = 400_000  # of an output file: its end


def collect(commands: Commands, number: str) -> dict[str, Any]:
    """What the controller and the accounting say; a cluster without accounting has no sacct."""
    records = {
        "scontrol": _answer(commands, "scontrol", "show", "job", number),
        "sacct": _answer(commands, "sacct", "--parsable2", "--duplicates", "--jobs", number, f"--format={FIELDS}"),
    }
    return {"slurm": {name: text for name, text in records.items() if text}}


def collect_named(commands: Commands, number: str) -> dict[str, Any]:
    """The same of a job that anybody submitted, with the files that its script wrote where they can be read."""
    facts = collect(commands, number)
    rows = facts["slurm"].get("sacct", "").splitlines()[1:]
    if not facts["slurm"].get("scontrol") and not rows:
        raise UserError(f"Slurm knows no job {number}", fix="sacct --user $USER lists yours")
    paths = re.findall(r"^ +Std(?:Out|Err)=(/\S+)", facts["slurm"].get("scontrol", ""), re.MULTILINE)
    logs = {
        path.rpartition("/")[2]: _answer(commands, "tail", "-c", str(MOST_BYTES), path) for path in dict.fromkeys(paths)
    }
    return {**facts, "target": "slurm", "logs": {name: text for name, text in logs.items() if text}}


def _answer(commands: Commands, *command: str) -> str:
    answer = commands.call(*command)
    return answer.out if answer.code == 0 and answer.out.strip() else ""
