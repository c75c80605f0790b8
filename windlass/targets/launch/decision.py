"""What follows when an attempt has ended: done, stopped, failed, or once more. Pure.

What the supervisor of a target saw becomes a verdict of `windlass.diagnose`, and its one function decides.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.common.files import whole, words
from windlass.errors import ExitCode
from windlass.targets.protocol import State

if TYPE_CHECKING:  # their rules take half a second to import, and most attempts end well
    from windlass.diagnose.decision import Decision
    from windlass.diagnose.verdict import Verdict

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RankDeath:
    """A rank that ended badly, as torchrun reports it."""

    rank: int
    code: int  # negative: a signal
    time: str
    pid: int | None = None
    oom: str | None = None  # why the kernel killed it for memory

    @property
    def signal(self) -> str | None:
        return _signal_name(-self.code) if self.code < 0 else None

    def __str__(self) -> str:
        return f"rank {self.rank} {how_it_died(self.signal, self.code, self.oom)}"


def death_record(death: RankDeath, errors: Iterable[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
    """A death for history.jsonl, with the error that the rank wrote down."""
    error = next((error.get("error") for error in errors if error.get("rank") == death.rank), None)
    return {"rank": death.rank, "signal": death.signal, "code": death.code, "first": first, "error": error}


def how_it_died(signal_name: str | None, code: int | None, oom: str | None) -> str:
    if oom:
        return f"was killed by the kernel's OOM killer: {oom}"
    return f"was killed by {signal_name}" if signal_name else f"exited with code {code}"


@dataclass(frozen=True)
class AttemptEnd:
    """Everything that is known when the ranks have ended."""

    launcher_code: int
    events: History = ()  # history.jsonl since this attempt was launched
    errors: Sequence[Mapping[str, Any]] = ()  # the ranks' error files of this attempt
    deaths: Sequence[RankDeath] = ()  # the first one first
    out_of_memory: str | None = None  # who was killed for memory, where no rank's death says so
    lost: str | None = None  # which node, and why nothing came from it any more
    leaving: str | None = None  # which nodes were told to leave
    full_disk: str | None = None  # whose disk: a rank that fails for it has no room to say so
    apart: str | None = None  # that the nodes did not meet, by what their launchers wrote
    stop_requested: bool = False  # by the run's owner: `windlass stop`
    terminated: bool = False  # by a signal: the machine is shut down, for example

    def has(self, event: str) -> bool:
        return any(record.get("event") == event for record in self.events)

    @property
    def saved_at(self) -> int | None:
        """The step at which the ranks saved and left."""
        steps = [whole(event.get("step")) for event in self.events if event.get("event") == "preempted"]
        return steps[-1] if steps else None

    @property
    def final_errors(self) -> list[Mapping[str, Any]]:
        """What ranks wrote of errors that would come again."""
        return [error for error in self.errors if not error.get("retry", False)]


def newest_checkpoint(events: Iterable[Mapping[str, Any]]) -> int:
    """The step of the newest checkpoint that was recorded; -1 where there is none."""
    steps = (whole(event.get("step")) for event in events if event.get("event") == "checkpoint")
    return max((step for step in steps if step is not None), default=-1)


@dataclass(frozen=True)
class Done:
    state: State
    code: int
    reason: str | None = None
    name: str | None = None  # the class of a failure


def record_end(record: Callable[..., object], attempt: int, done: Done, **facts: Any) -> None:
    """Write down the end of a run; `record` takes an event and its facts, as that of a run folder does."""
    if done.state == "failed":
        record("gave-up", attempt=attempt, **{"class": done.name}, why=done.reason)
    record("exit", state=done.state, code=int(done.code), reason=done.reason, **facts)


def next_attempt(history: History) -> int:
    """The number of the attempt that begins now; "restart" announces it."""
    return (
        max((int(record.get("attempt") or 0) for record in history if record.get("event") != "restart"), default=0) + 1
    )


def by_blame(death: RankDeath) -> tuple[bool, str]:
    """The order of deaths: a rank that was killed goes before those that lost it."""
    return (death.code >= 0 or death.code == -signal.SIGTERM, death.time)


def follow_up(end: AttemptEnd, history: History, max_restarts: int) -> Done | Decision:
    """The end of the run, or the decision to start its ranks once more. `history`: all of it, this attempt included."""
    if end.has("preempted") and not end.has("finished"):
        if end.stop_requested:
            return stopped_by_owner(end.saved_at)
        return Done("preempted", ExitCode.PREEMPTED, "told to stop; saved first")
    if end.launcher_code == 0:
        return Done("finished", ExitCode.OK)
    if end.stop_requested or end.terminated:
        return Done("stopped", ExitCode.INTERRUPTED, "stopped without a new checkpoint")
    return once_more(judge(end), history, max_restarts, code=_exit_code(end))


def once_more(verdict: Verdict, history: History, max_restarts: int, *, code: int = ExitCode.FAILED) -> Done | Decision:
    from windlass.diagnose.decision import Policy, decide

    decision = decide(verdict, history, Policy(restarts=max_restarts))
    if decision.action == "retry":
        return decision
    return Done("failed", code, decision.reason, decision.name)


def _exit_code(end: AttemptEnd) -> int:
    final = end.final_errors
    return (whole(final[0].get("exit_code")) if final else None) or int(ExitCode.FAILED)


def judge(end: AttemptEnd) -> Verdict:
    """Why an attempt ended, by those who saw it: a rank's own error goes before what others suffered."""
    from windlass.diagnose.decision import verdict_of
    from windlass.diagnose.findings import SIGNALS

    if final := end.final_errors:
        return verdict_of(_class_of(final[0]), str(final[0].get("error")))
    dead = next((death for death in end.deaths if death.oom), None)
    if dead or end.out_of_memory:
        return verdict_of("host_oom", str(dead or end.out_of_memory))
    if end.lost:
        return verdict_of("node_lost", end.lost)
    if end.leaving:
        return verdict_of("preempted", f"{end.leaving} told to leave before a checkpoint")
    hang = next((record for record in end.events if record.get("event") == "hang"), None)
    if hang is not None:  # the rank that was behind may have been killed since
        return verdict_of(
            "hang", f"no step for {hang.get('seconds')} s: {hang.get('why')}", host=words(hang.get("host"))
        )
    own = [error for error in end.errors if _class_of(error) != LOST_PEER]
    killed = next((death for death in end.deaths if death.code < 0), None)
    if own:
        return verdict_of(_class_of(own[0]), _error_text(own[0]), host=words(own[0].get("host")))
    if end.apart and not killed:
        return verdict_of("rendezvous", end.apart)
    by_themselves = [death for death in end.deaths if death.code != ExitCode.RETRY]
    first = min(by_themselves, key=lambda death: death.time, default=None)
    if end.full_disk and (first.code if first else end.launcher_code) > 0:  # others lost that rank, and were killed
        return verdict_of("disk_full", f"{end.full_disk}; {_ending(end)}")
    if killed or end.launcher_code < 0:
        number = -(killed.code if killed else end.launcher_code)
        name, confidence = SIGNALS.get(number, ("preempted", 0.4))  # who sends another signal is not known
        return verdict_of(name, str(killed or f"torchrun was killed by {_signal_name(number)}"), confidence=confidence)
    if end.errors:
        rank = end.deaths[0].rank if end.deaths else end.errors[0].get("rank")
        return verdict_of(LOST_PEER, _error_text(next((e for e in end.errors if e.get("rank") == rank), end.errors[0])))
    if any(death.code == ExitCode.RETRY for death in end.deaths):  # it could not write why
        return verdict_of(LOST_PEER, str(end.deaths[0]))
    return verdict_of("unknown", f"{_ending(end)}; `windlass logs` shows what it said last")


def _ending(end: AttemptEnd) -> str:
    return str(end.deaths[0]) if end.deaths else f"torchrun exited with code {end.launcher_code}"


LOST_PEER = "nccl_network"  # what a rank writes when another one is gone


def _class_of(error: Mapping[str, Any]) -> str:
    """The class that a rank wrote down; of one that wrote none, by whether it would come again."""
    from windlass.diagnose.classes import CLASSES

    name = words(error.get("class"))
    return name if name in CLASSES else LOST_PEER if error.get("retry", False) else "user_code"


def stopped_by_owner(step: int | None) -> Done:
    """The ranks saved and left because of `windlass stop`."""
    where = f"saved at step {step} first" if step is not None else "saved first"
    return Done("stopped", ExitCode.PREEMPTED, f"stopped by `windlass stop`; {where}")


def _error_text(error: Mapping[str, Any]) -> str:
    host = f" on {error['host']}" if error.get("host") else ""
    return f"rank {error.get('rank')}{host}: {error.get('error')}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


_FAILURE = re.compile(
    r"^ +time +: (?P<time>\S+)\n +host +: .*\n +rank +: (?P<rank>\d+) \(local_rank: \d+\)\n"
    r" +exitcode +: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.MULTILINE,
)


def parse_deaths(launcher_log: str) -> list[RankDeath]:
    """The ranks in torchrun's failure summary, the one that began it first.

    torchrun looks at its ranks ten times a second and calls the lowest of those it finds dead the first; but a rank
    that lost its peer exits with a code, and the peer was killed: a signal in the same second goes before a code.
    """
    begin = launcher_log.rfind("Root Cause (first observed failure)")
    if begin < 0:
        return []
    root = _FAILURE.search(launcher_log, begin)
    if root is None:
        return []
    first = _death(root)
    others = [_death(match) for match in _FAILURE.finditer(launcher_log, 0, begin)]
    deaths = [first, *sorted(others, key=lambda death: death.time)]
    if first.code > 0:
        same_time = [
            other for other in others if other.code < 0 and other.code != -signal.SIGTERM and other.time == first.time
        ]
        deaths.sort(key=lambda death: death not in same_time)
    return deaths


def _death(match: re.Match[str]) -> RankDeath:
    return RankDeath(rank=int(match["rank"]), code=int(match["code"]), time=match["time"], pid=int(match["pid"]))
