"""What the batch script asks before and after each start of the ranks: `python -m windlass.targets.slurm.attempt`.

`begin FOLDER` writes down that ranks are being started, and prints the attempt's number and a free port; it refuses
when the folder belongs to another job, or when too many starts came to nothing. `end FOLDER` reads what the ranks left
and prints what follows: `exit CODE`, `restart` (in this stay on the nodes) or `requeue`. `refused FOLDER` writes down
that Slurm would not requeue the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.common.files import read_json_lines
from windlass.common.ports import free_port
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.launch.decision import (
    AttemptEnd,
    Done,
    History,
    by_blame,
    death_record,
    follow_up,
    next_attempt,
    once_more,
    parse_deaths,
    record_end,
)
from windlass.targets.launch.machine import full_disk
from windlass.targets.launch.progress import is_stop_requested
from windlass.targets.launch.tail import Tail
from windlass.targets.slurm.render import comment_of
from windlass.targets.slurm.state import SubmittedJob, lock

if TYPE_CHECKING:
    from windlass.diagnose.decision import Decision

Event = Mapping[str, Any]
LAUNCHER_LOGS = "launcher-*.log"
RECORD_SECONDS = 60.0  # for the client that called sbatch to write down the job's number
# What torchrun and srun say when nodes could not be reached or did not meet: worth another start.
NODE_TROUBLE = re.compile(
    r"Rendezvous(Timeout|Connection|Closed)Error|Unable to create step|Node failure|launch failed"
    r"|Communication connection failure|Zero Bytes were transmitted|task launch failed|Socket timed out"
)


@dataclass(frozen=True)
class JobFacts:
    """What Slurm thinks of the job when its ranks have ended."""

    state: str
    restarts: int
    asked_restarts: int = 0  # what it was when this stay began

    @classmethod
    def parse(cls, line: str, *, asked_restarts: int) -> JobFacts:
        fields = dict(re.findall(r"(?<!\S)(JobState|Restarts)=(\S+)", line))
        restarts = fields.get("Restarts", "")
        count = int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else asked_restarts
        return cls(fields.get("JobState", "UNKNOWN"), count, asked_restarts)

    @property
    def requeued(self) -> bool:
        """Slurm is sending it back to the queue by itself: a lost node, preemption, `scontrol requeue`."""
        return self.restarts > self.asked_restarts

    @property
    def cancelled(self) -> bool:
        return self.state in ("CANCELLED", "COMPLETING") and not self.requeued


@dataclass(frozen=True)
class Requeue:
    why: str
    name: str  # its class


def decide_with_slurm(
    end: AttemptEnd, history: History, job: JobFacts, *, max_restarts: int, limit_near: bool, may_requeue: bool
) -> Done | Decision | Requeue | None:
    """What follows the end of an attempt; None where Slurm has decided: it requeues the job. Pure."""
    from windlass.diagnose.decision import verdict_of

    if end.has("finished") and end.launcher_code == 0:
        return Done("finished", ExitCode.OK)
    if not end.final_errors:
        if job.requeued:
            return None
        if not end.stop_requested and (answer := _after_leave_signal(end, job, limit_near, may_requeue)):
            if isinstance(answer, Requeue) and not end.has("preempted"):  # without progress: not for ever
                again = once_more(verdict_of(answer.name, answer.why), history, max_restarts)
                return again if isinstance(again, Done) else answer
            return answer
    return follow_up(end, history, max_restarts)


def _after_leave_signal(end: AttemptEnd, job: JobFacts, limit_near: bool, may_requeue: bool) -> Done | Requeue | None:
    saved = end.has("preempted")
    if job.cancelled and not limit_near:
        if saved:
            return Done("stopped", ExitCode.PREEMPTED, f"cancelled in Slurm; saved at step {end.saved_at} first")
        return Done("stopped", ExitCode.INTERRUPTED, "cancelled in Slurm, without a new checkpoint")
    if not saved and not limit_near:
        return None
    why = "the time limit is near" if limit_near else "told to leave the nodes"
    if not may_requeue:
        return Done("preempted", ExitCode.PREEMPTED, f"{why}; {'saved first' if saved else 'not saved'}")
    return Requeue(why, "time_limit" if limit_near else "preempted")


def is_recorded(folder: RunFolder, *, job: str, facts: str, patience: float = RECORD_SECONDS) -> bool:
    """Whether a run folder belongs to this job; makes it so where it was submitted and its number is not known yet."""
    deadline = time.monotonic() + patience
    while True:
        recorded = SubmittedJob.of(folder)
        if recorded is None or recorded.number is not None:
            return recorded is not None and recorded.number == job
        carries_it = recorded.submission is not None and comment_of(recorded.submission) in facts
        # who submitted holds the lock until the number is written down; who else takes it may submit another job
        with contextlib.suppress(OSError), lock(folder, patience=0) as is_held:  # some file systems know no locks
            if is_held and SubmittedJob.of(folder) == recorded:
                if carries_it:
                    recorded.confirm(folder, job)
                return carries_it
        if time.monotonic() > deadline:  # who submitted hangs
            return carries_it
        time.sleep(0.2)


def begin(folder: RunFolder, *, job: str, port: int | None, facts: str = "") -> int:
    if not is_recorded(folder, job=job, facts=facts):
        recorded = SubmittedJob.of(folder)
        whose = f"it belongs to job {recorded.number or '(not confirmed)'}" if recorded else "no job is recorded there"
        print(
            f"windlass: {job} is not the job of this run: {folder.path}: {whose}; nothing is started", file=sys.stderr
        )
        with contextlib.suppress(OSError):  # the folder may be gone
            folder.record("job-left", job=job, why=f"{job} is not the job of this run: {whose}")
        return ExitCode.BAD_INPUT
    history = list(read_json_lines(folder.history))
    attempt = next_attempt(history)
    launched_before = any(record.get("event") == "launched" and record.get("job") == job for record in history)
    announced = any(record.get("event") == "restart" and record.get("attempt") == attempt for record in history)
    if launched_before and not announced:
        if decision := _requeued_by_slurm(folder, history):
            folder.record("restart", attempt=attempt, **decision.as_record())
        else:
            return ExitCode.FAILED
    logs = {path.name: path.stat().st_size for path in folder.logs.glob(LAUNCHER_LOGS)}
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    head = os.environ.get("SLURMD_NODENAME")
    folder.record("launched", attempt=attempt, job=job, nodes=nodes, head=head, logs=logs)
    print(attempt, port or free_port())
    return ExitCode.OK


def _requeued_by_slurm(folder: RunFolder, history: History) -> Decision | None:
    """The decision to start once more what Slurm has brought back; None where that came to nothing too often."""
    from windlass.diagnose.decision import verdict_of

    decided = once_more(
        verdict_of("node_lost", "Slurm requeued the job"), history, folder.load_run().target.max_restarts
    )
    if not isinstance(decided, Done):
        return decided
    record_end(folder.record, next_attempt(history) - 1, decided)
    print(f"windlass: {decided.reason}", file=sys.stderr)
    return None


def end(folder: RunFolder, *, attempt: int, code: int, limit_near: int, restarts: int, facts: str) -> int:
    history = list(read_json_lines(folder.history))
    begins = max(index for index, record in enumerate(history) if record.get("event") == "launched")
    launch, since = history[begins], history[begins:]
    if launch["attempt"] != attempt:  # this node was thought lost, and the run goes on elsewhere: not its end any more
        print(f"exit {int(ExitCode.PREEMPTED)}")
        return ExitCode.OK
    run = folder.load_run()
    words = {
        path: "\n".join(Tail(path, offset=int(launch["logs"].get(path.name, 0))).lines(rest=True))
        for path in folder.logs.glob(LAUNCHER_LOGS)
    }
    deaths = sorted((death for text in words.values() for death in parse_deaths(text)), key=by_blame)
    attempt_end = AttemptEnd(
        launcher_code=128 - code if code > 128 else code,
        events=since,
        errors=folder.errors(attempt),
        deaths=deaths,
        full_disk=full_disk(folder.path, [*words.values(), *(str(record.get("error")) for record in since)]),
        apart="the nodes did not meet" if any(NODE_TROUBLE.search(text) for text in words.values()) else None,
        stop_requested=is_stop_requested(since),
    )
    job = JobFacts.parse(facts, asked_restarts=restarts)
    verdict = decide_with_slurm(
        attempt_end,
        history,
        job,
        max_restarts=run.target.max_restarts,
        limit_near=bool(limit_near),
        may_requeue=run.target.slurm.requeue,
    )
    try:
        _write_down(folder, attempt, attempt_end, verdict)
    except OSError as error:  # the disk is full, say: Slurm at least shall know how it ended
        print(f"windlass: the end of attempt {attempt} could not be written down: {error}", file=sys.stderr)
    match verdict:
        case Done(_, exit_code, reason):
            print(f"windlass: {verdict.state}" + (f": {reason}" if reason else ""), file=sys.stderr)
            print(f"exit {int(exit_code)}")
        case Requeue(why):
            print(f"windlass: back to the queue: {why}", file=sys.stderr)
            print("requeue")
        case None:
            print(f"exit {int(ExitCode.PREEMPTED)}")
        case decision:
            print(f"windlass: restarting: {decision.reason}", file=sys.stderr)
            print("restart")
    return ExitCode.OK


REQUEUED_ALREADY = "Job is pending execution"  # a preemption: Slurm came before us


def _write_down(folder: RunFolder, attempt: int, ended: AttemptEnd, verdict: Done | Decision | Requeue | None) -> None:
    for index, death in enumerate(ended.deaths if not ended.has("preempted") else ()):
        folder.record("rank-died", attempt=attempt, **death_record(death, ended.errors, first=index == 0))
    match verdict:
        case Done():
            record_end(folder.record, attempt, verdict)
        case Requeue(why, name):
            folder.record("requeue", attempt=attempt, why=why)
            folder.record("restart", attempt=attempt + 1, **{"class": name}, why=why)
        case None:
            pass
        case decision:
            folder.record("restart", attempt=attempt + 1, **decision.as_record())


def refused(folder: RunFolder, *, why: str) -> int:
    if REQUEUED_ALREADY in why:
        return ExitCode.OK
    reason = f"saved, but Slurm did not requeue the job: {why}"
    folder.record("exit", state="preempted", code=int(ExitCode.PREEMPTED), reason=reason)
    print(f"windlass: {reason}", file=sys.stderr)
    return ExitCode.OK


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="windlass.targets.slurm.attempt", description=__doc__)
    commands = parser.add_subparsers(required=True)
    accepted: dict[Callable[..., int], dict[str, type]] = {
        begin: {"job": str, "facts": str, "port": int},
        end: {"attempt": int, "code": int, "limit-near": int, "restarts": int, "facts": str},
        refused: {"why": str},
    }
    for command, options in accepted.items():
        subparser = commands.add_parser(command.__name__)
        subparser.set_defaults(command=command)
        subparser.add_argument("folder", type=Path)
        for name, kind in options.items():
            subparser.add_argument(f"--{name}", type=kind, required=name != "port")
    given = vars(parser.parse_args(arguments))
    return int(given.pop("command")(RunFolder(given.pop("folder")), **given))


if __name__ == "__main__":
    sys.exit(int(main()))
