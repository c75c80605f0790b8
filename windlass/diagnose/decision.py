"""What follows a verdict: the one function that decides, on every target and at every level. Pure.

Budgets are counted in the history alone, so whoever decides may be killed and started again: a decision that is
recorded is neither taken twice nor lost. A checkpoint newer than any before fills them up again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from windlass.common.files import whole
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.findings import Evidence
from windlass.diagnose.verdict import Verdict

Action = Literal["finish", "retry", "retry_edited", "wait", "give_up"]
Record = Mapping[str, Any]

# Nobody's fault, and no sign of one: as often as it comes.
FREE = frozenset(("preempted",))
# Once, for twice the same is no accident. A lone illegal access may be a flipped bit that the driver maps out, or a
# race; a bug of a kernel comes again, and then it is called one. With an Xid beside it, it is gpu_hardware anyway.
ONCE = frozenset(("host_oom", "illegal_memory_access", "segfault", "gpu_runtime"))
# Another attempt helps only with another run: without a remedy there is none.
NEEDS_EDIT = frozenset(("cpu_memory_request", "efa_unavailable", "node_affinity", "schema_mismatch", "shm", "taint"))
# Faults of a machine: the next job goes elsewhere.
OF_A_NODE = frozenset(
    ("cuda_oom_other_process", "file_system", "gpu_hardware", "gpu_runtime", "hang", "node_lost", "straggler")
)
# Told by who is behind, not by what its node did: a deadlock of the program looks the same. A node is left once it was
# named twice, and no other was.
NEEDS_A_SECOND = frozenset(("hang",))
# Room that others may make, and holds that somebody else lifts: a job in a queue costs nothing.
MAY_PASS = frozenset(("cpu_memory_request", "job_held", "quota"))
SURE = 0.5  # below it a verdict is a guess


@dataclass(frozen=True)
class Policy:
    """How much may be tried without progress."""

    restarts: int = 3  # faults of the infrastructure: target.max_restarts
    edits: int = 2  # edits of the run for one class
    backoff_seconds: float = 1.0  # before the first of them, doubled each time
    largest_backoff: float = 30.0
    patience: float = 600.0  # seconds that a job may be kept from beginning by what only a person can mend
    after_limits: bool = True  # a time limit is the scheduler's, and the run goes on; False: the user's, and it ends
    record: Literal["restart", "retry"] = "restart"  # which records are decisions of this level: in place, or a new job


@dataclass(frozen=True)
class Remedy:
    """What the run is changed to, key by key, and the sentence that says why."""

    edit: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Decision:
    action: Action
    name: str  # the class that was judged
    reason: str
    edit: Mapping[str, Any] | None = None
    exclude_nodes: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()  # nodes that are named for the first time, and stay
    backoff_seconds: float = 0.0
    left: int | None = None  # further tries of this kind without progress; None: as many as it takes

    def as_record(self) -> dict[str, Any]:
        """For history.jsonl."""
        optional = {
            "backoff": self.backoff_seconds,
            "edit": dict(self.edit or {}),
            "exclude": list(self.exclude_nodes),
            "suspects": list(self.suspects),
        }
        known = {key: value for key, value in optional.items() if value}
        return {"class": self.name, "why": self.reason, "left": self.left, **known}


def verdict_of(
    name: str, line: str, *, rank: int | None = None, host: str | None = None, confidence: float = 1.0
) -> Verdict:
    """The verdict of somebody who saw it happen: a supervisor, or the rank itself."""
    known = CLASSES[name]
    return Verdict(name, confidence, known.cause, known.fix, (Evidence("supervisor", line, rank, host),))


def may_retry(name: str) -> bool:
    """Whether the same attempt once more may end better."""
    if name in ONCE or name == "time_limit":  # which goes on from the checkpoint
        return True
    return CLASSES[name].retry == "yes" and name not in NEEDS_EDIT


def decide(
    verdict: Verdict,
    history: Sequence[Record],
    policy: Policy,
    *,
    remedy: Remedy | None = None,
    waited: float | None = None,
) -> Decision:
    """What follows.

    `remedy`: the edit of the run that answers this verdict, where there is one. `waited`: for how many seconds a job
    that has not begun has been kept so; None of one that has ended.
    """
    name, why = verdict.name, verdict.evidence[0].line if verdict.evidence else verdict.cause
    if name == "succeeded":
        return Decision("finish", name, "it ended well")
    if remedy is not None:
        used = spent(history, policy, name, edits=True)
        if used >= policy.edits:
            return Decision("give_up", name, f"{why}; given up after {_count(used, 'edit')} of the run", left=0)
        return Decision("retry_edited", name, f"{why}; {remedy.why}", remedy.edit, left=policy.edits - used - 1)
    may_pass = verdict.retry == "wait" or name in MAY_PASS or verdict.confidence < SURE
    if waited is not None and (may_pass or waited < policy.patience):
        return Decision("wait", name, why)
    is_guess = verdict.confidence < SURE
    if is_guess:  # killed by nobody knows whom; but what may be the program's own fault is not tried again
        name, allowed = "unknown", policy.restarts if verdict.kind in ("infra", "resources", "lifecycle") else 0
    elif name in FREE:
        return Decision("retry", name, why)
    elif not may_retry(name) or (name == "time_limit" and not policy.after_limits):
        allowed = 0
    else:
        allowed = min(policy.restarts, 1) if name in ONCE else policy.restarts
    used = spent(history, policy, name)
    if used >= allowed:
        again = f"; given up after {_count(used, 'restart')} without a new checkpoint" if used or allowed else ""
        fix = f"; {verdict.fix}" if name in ONCE and used else ""
        return Decision("give_up", name, f"{why}{again}{fix}", left=0)
    wait = min(policy.backoff_seconds * 2**used, policy.largest_backoff)
    hosts = [proof.host for proof in verdict.evidence if proof.host and _is_about_its_rank(proof)]
    nodes = tuple(dict.fromkeys(hosts)) if name in OF_A_NODE else ()
    suspects: tuple[str, ...] = ()
    if name in NEEDS_A_SECOND and nodes and _named(history, name) != set(nodes):
        nodes, suspects = (), nodes
    return Decision("retry", name, why, None, nodes, suspects, wait, allowed - used - 1)


def spent(history: Iterable[Record], policy: Policy, name: str, *, edits: bool = False) -> int:
    """How much of the budget that `name` draws on is used up since the last progress.

    Faults of the infrastructure share one budget; what is answered by an edit, or tried once, has one for each class.
    """
    newest, job, count, retried = -1, None, 0, False
    for record in history:
        event = record.get("event")
        if event == "checkpoint":
            step = whole(record.get("step"))
            if step is not None and step > newest:
                newest, count = step, 0
        elif event == "preempted":  # it left with a checkpoint
            count = 0
        elif event == "launched" and policy.record == "restart":
            if record.get("job") != job and not (retried or record.get("retried")):  # a person wants it to go on
                count = 0
            job, retried = record.get("job"), False
        elif event == "retry" and policy.record == "restart":
            retried = not record.get("edit")  # another job, and the same budget: the two levels do not multiply
        elif event == policy.record and bool(record.get("edit")) == edits:
            earlier = str(record.get("class") or "unknown")
            has_its_own = edits or earlier in ONCE or name in ONCE
            count += earlier == name if has_its_own else earlier not in FREE
    return count


def last_mark(history: Iterable[Record], *, without_edits: bool = False) -> str | None:
    """The newest of what decides about jobs and begins them; a `retry` that is the last is yet to be carried out."""
    newest = None
    for record in history:
        event = record.get("event")
        if event in ("submitted", "launched") or (event == "retry" and not (without_edits and record.get("edit"))):
            newest = str(event)
    return newest


def excluded(history: Iterable[Record]) -> list[str]:
    """Nodes that decisions of this run keep away from, in the order in which they were found."""
    lists = [record.get("exclude") for record in history if record.get("event") == "retry"]
    return list(dict.fromkeys(str(node) for nodes in lists if isinstance(nodes, list) for node in nodes))


def _is_about_its_rank(evidence: Evidence) -> bool:
    """Whether a line is about the rank that said it: a rank that waits says who is behind, on another host."""
    named = re.search(r"rank (\d+) on \S+ hangs", evidence.line)
    return named is None or evidence.rank in (None, int(named[1]))


def _named(history: Iterable[Record], name: str) -> set[str]:
    """Nodes that earlier decisions of this class were about."""
    records = [record for record in history if record.get("class") == name]
    lists = [record.get(key) for record in records for key in ("suspects", "exclude")]
    return {str(node) for nodes in lists if isinstance(nodes, list) for node in nodes}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
