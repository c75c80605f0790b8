"""What follows when an attempt has ended: done, stopped, failed, or once more. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.common.files import whole
from windlass.errors import ExitCode
from windlass.targets.protocol import State


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
    """Everything that is known when torchrun has ended."""

    launcher_code: int
    events: Sequence[Mapping[str, Any]] = ()  # history.jsonl since this attempt was launched
    errors: Sequence[Mapping[str, Any]] = ()  # the ranks' error files of this attempt
    deaths: Sequence[RankDeath] = ()  # the first one first
    launcher_oom: str | None = None  # why the kernel killed torchrun itself for memory
    stop_requested: bool = False  # by the run's owner: `windlass stop`
    terminated: bool = False  # by a signal: the machine is shut down, for example

    def has(self, event: str) -> bool:
        return any(record.get("event") == event for record in self.events)

    @property
    def newest_checkpoint(self) -> int:
        return newest_checkpoint(self.events)

    @property
    def saved_at(self) -> int | None:
        """The step at which the ranks saved and left."""
        steps = [whole(one.get("step")) for one in self.events if one.get("event") == "preempted"]
        return steps[-1] if steps else None


def newest_checkpoint(events: Iterable[Mapping[str, Any]]) -> int:
    """The step of the newest checkpoint that was recorded; -1 where there is none."""
    steps = (whole(one.get("step")) for one in events if one.get("event") == "checkpoint")
    return max((step for step in steps if step is not None), default=-1)


@dataclass(frozen=True)
class Done:
    state: State
    code: int
    reason: str | None = None


@dataclass(frozen=True)
class Restart:
    why: str


@dataclass
class RestartBudget:
    """Restarts since the last progress: a checkpoint newer than at the last restart fills the budget up again."""

    allowed: int
    used: int = 0
    newest_checkpoint: int = -1

    def note(self, checkpoint: int) -> None:
        if checkpoint > self.newest_checkpoint:
            self.newest_checkpoint = checkpoint
            self.used = 0

    @property
    def left(self) -> int:
        return self.allowed - self.used


def budget_of(history: Sequence[Mapping[str, Any]], allowed: int) -> RestartBudget:
    """Starts since the last progress, the newest not counted. Leaving with a checkpoint is progress too."""
    budget = RestartBudget(allowed)
    starts, job = 0, None
    for record in history:
        match record.get("event"):
            case "checkpoint" if int(record["step"]) > budget.newest_checkpoint:
                budget.newest_checkpoint = int(record["step"])
                starts = min(starts, 1)
            case "preempted":
                starts = min(starts, 1)
            case "launched":
                starts = starts + 1 if record.get("job") == job else 1  # another job: somebody wants it to go on
                job = record.get("job")
    budget.used = max(0, starts - 1)
    return budget


def next_attempt(history: Sequence[Mapping[str, Any]]) -> int:
    """The number of the attempt that begins now; "restart" announces it."""
    return max((int(one.get("attempt") or 0) for one in history if one.get("event") != "restart"), default=0) + 1


def by_blame(death: RankDeath) -> tuple[bool, str]:
    """The order of deaths: a rank that was killed goes before those that lost it."""
    return (death.code >= 0 or death.code == -signal.SIGTERM, death.time)


def decide(end: AttemptEnd, budget: RestartBudget) -> Done | Restart:
    if end.has("preempted") and not end.has("finished"):
        if end.stop_requested:
            return stopped_by_owner(end.saved_at)
        return Done("preempted", ExitCode.PREEMPTED, "told to stop; saved first")
    if end.launcher_code == 0:
        return Done("finished", ExitCode.OK)
    if end.stop_requested or end.terminated:
        return Done("stopped", ExitCode.INTERRUPTED, "stopped without a new checkpoint")
    hopeless = [error for error in end.errors if not error.get("retry", False)]
    if hopeless:
        code = whole(hopeless[0].get("exit_code")) or int(ExitCode.FAILED)
        return Done("failed", code, str(hopeless[0].get("error")))
    why = why_it_ended(end)
    # a rank that leaves with 75 has lost a peer or its GPU, and may have been unable to write so
    killed = any(death.code < 0 or death.code == ExitCode.PREEMPTED for death in end.deaths) or end.launcher_code < 0
    if not end.errors and not killed:
        return Done("failed", ExitCode.FAILED, f"{why}; see logs/launcher.log")
    if budget.used and (end.launcher_oom or any(death.oom for death in end.deaths)):
        advice = "it needs more memory, or a smaller train.micro_batch or data.sequence_length"
        return Done("failed", ExitCode.FAILED, f"{why}, {_times(budget.used + 1)} without a new checkpoint; {advice}")
    if budget.left <= 0:
        again = f"given up after {budget.used} restart{'' if budget.used == 1 else 's'} without a new checkpoint"
        return Done("failed", ExitCode.FAILED, f"{why}; {again}")
    return Restart(why)


def _times(number: int) -> str:
    return "twice" if number == 2 else f"{number} times"


def stopped_by_owner(step: int | None) -> Done:
    """The ranks saved and left because of `windlass stop`."""
    where = f"saved at step {step} first" if step is not None else "saved first"
    return Done("stopped", ExitCode.PREEMPTED, f"stopped by `windlass stop`; {where}")


def why_it_ended(end: AttemptEnd) -> str:
    if end.deaths:
        first = end.deaths[0]
        error = next((one for one in end.errors if one.get("rank") == first.rank and first.code > 0), None)
        return _error_text(error) if error else str(first)
    if end.errors:
        return _error_text(end.errors[0])
    if end.launcher_code < 0:
        return f"torchrun {how_it_died(_signal_name(-end.launcher_code), None, end.launcher_oom)}"
    return f"torchrun exited with code {end.launcher_code}"


def _error_text(error: Mapping[str, Any]) -> str:
    host = f" on {error['host']}" if error.get("host") else ""
    return f"rank {error.get('rank')}{host}: {error.get('error')}"


def _signal_name(number: int) -> str:
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")  # real-time ones have none


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
        same_time = [one for one in others if one.code < 0 and one.code != -signal.SIGTERM and one.time == first.time]
        deaths.sort(key=lambda death: death not in same_time)
    return deaths


def _death(match: re.Match[str]) -> RankDeath:
    return RankDeath(rank=int(match["rank"]), code=int(match["code"]), time=match["time"], pid=int(match["pid"]))
