"""The process that stays with a local run: starts torchrun, passes on a stop, restarts what a signal ended.

`python -m windlass.targets.local.supervisor FOLDER LOCK_FD READY_FD`, started by the client with the folder's lock
held. It says so in supervisor.json and in history.jsonl: launched, rank-died, restart, gave-up, stopped, exit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from windlass.errors import ExitCode
from windlass.runfolder import RunFolder, read_json_lines, write_atomically
from windlass.targets.local import processes
from windlass.targets.local.decision import AttemptEnd, Done, Restart, RestartBudget, decide, parse_deaths
from windlass.targets.local.render import ATTEMPT_VARIABLE, LocalRequest
from windlass.targets.local.tail import Tail

SUPERVISOR_FILE = "supervisor.json"
REQUEST_FILE = "request.json"
LAUNCHER_LOG = "launcher.log"
STOP_NOW = signal.SIGUSR1
POLL_SECONDS = 0.1
LEFTOVER_PATIENCE = 10.0  # seconds for processes of an earlier supervisor to leave by themselves
LARGEST_BACKOFF = 30.0
SURVIVOR_SECONDS = 5.0  # for the ranks that outlive a failed one to write down what they saw
OTHERS_ARE_TOLD = "closing signal SIGTERM"  # torchrun's words, and the next too
ASKED_TO_LEAVE = "death signal, shutting down workers"


class Supervisor:
    def __init__(self, folder: RunFolder, request: LocalRequest, *, backoff: float = 1.0) -> None:
        self.folder = folder
        self.request = request
        self.backoff = backoff
        self.launcher: subprocess.Popen[bytes] | None = None
        self.stop_at: float | None = None  # when a stop was asked for
        self.stop_now = False

    def run(self, ready: Callable[[], None]) -> int:
        """Supervise until the run has ended; the exit code of the run."""
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(STOP_NOW, self._on_stop_now)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        processes.adopt_orphans()
        self._say_who_i_am()
        ready()
        left = processes.end_leftovers(self.folder.path, patience=LEFTOVER_PATIENCE)
        if left:
            self.folder.record("leftovers-killed", pids=left)
        done = self._attempts()
        if done.state in ("stopped", "preempted"):
            self.folder.record("stopped", reason=done.reason)
        self.folder.record("exit", state=done.state, code=done.code, reason=done.reason)
        return done.code

    def _attempts(self) -> Done:
        budget = RestartBudget(self.request.max_restarts, newest_checkpoint=self._newest_checkpoint())
        attempt = self._last_attempt()
        while True:
            attempt += 1
            if self.stop_at is not None or self.stop_now:
                return Done("stopped", ExitCode.INTERRUPTED, "stopped before it was started")
            end = self._attempt(attempt)
            budget.note(end.newest_checkpoint)
            for index, death in enumerate(end.deaths):
                self.folder.record(
                    "rank-died",
                    attempt=attempt,
                    rank=death.rank,
                    signal=death.signal,
                    code=death.code,
                    first=index == 0,
                    error=next((one.get("error") for one in end.errors if one.get("rank") == death.rank), None),
                )
            match decide(end, budget):
                case Done() as done:
                    if done.state == "failed":
                        self.folder.record("gave-up", attempt=attempt, why=done.reason)
                    return done
                case Restart(why):
                    budget.used += 1
                    self.folder.record("restart", attempt=attempt + 1, why=why, left=budget.left)
                    self._wait(min(self.backoff * 2 ** (budget.used - 1), LARGEST_BACKOFF))

    def _attempt(self, attempt: int) -> AttemptEnd:
        """Start torchrun, wait for its end and gather what is known about it."""
        history_begins = _size(self.folder.history)
        log = self.folder.logs / LAUNCHER_LOG
        log_begins = _size(log)
        self.folder.record("launched", attempt=attempt, argv=list(self.request.argv))
        with log.open("ab") as output:
            self.launcher = subprocess.Popen(
                self.request.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.request.working_directory,
                env={**os.environ, **self.request.environment, ATTEMPT_VARIABLE: str(attempt)},
                preexec_fn=processes.die_with_parent,  # one thread here, so fork is safe
            )
        code = self._watch(self.launcher, Tail(log, offset=log_begins))
        self.launcher = None
        # torchrun ends its ranks; if it was itself killed, they are still there
        processes.end_leftovers(self.folder.path, patience=1.0 if code >= 0 else 0.0)
        return AttemptEnd(
            launcher_code=code,
            events=Tail(self.folder.history, offset=history_begins).records(),
            errors=self.folder.errors(attempt),
            deaths=parse_deaths("\n".join(Tail(log, offset=log_begins).lines(rest=True))),
            stop_requested=self.stop_at is not None or self.stop_now,
        )

    def _watch(self, launcher: subprocess.Popen[bytes], log: Tail) -> int:
        """Wait for torchrun; pass a stop on to its ranks, and end those that cannot end themselves."""
        told: set[int] = set()
        killing = False
        broken_at: float | None = None  # when torchrun saw a rank fail and told the others to leave
        asked_to_leave = False  # somebody sent torchrun a SIGTERM: then its ranks are saving
        while True:
            code = launcher.poll()
            if code is not None:
                return code
            now = time.monotonic()
            for line in log.lines():
                asked_to_leave = asked_to_leave or ASKED_TO_LEAVE in line
                if OTHERS_ARE_TOLD in line and broken_at is None and not asked_to_leave:
                    broken_at = now
            overdue = self.stop_at is not None and now > self.stop_at + self.request.grace_seconds
            if self.stop_now or overdue:
                if not killing:
                    killing = True
                    self.folder.record("killing", why="stopped at once" if self.stop_now else "grace period is over")
                self._kill_all(launcher)
            elif self.stop_at is not None and not told:
                told = self._tell(launcher)
            elif broken_at is not None and now > broken_at + SURVIVOR_SECONDS:
                # they wait for a peer that is gone; torchrun would give them half a minute
                for pid in processes.ranks_of(launcher.pid).values():
                    processes.send(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _tell(self, launcher: subprocess.Popen[bytes]) -> set[int]:
        """SIGTERM to the ranks, not to torchrun: torchrun would kill them 30 seconds later, in the middle of a save."""
        ranks = processes.ranks_of(launcher.pid)
        if not ranks:  # still starting: nothing to save
            launcher.terminate()
            return {launcher.pid}
        for pid in ranks.values():
            processes.send(pid, signal.SIGTERM)
        return set(ranks.values())

    def _kill_all(self, launcher: subprocess.Popen[bytes]) -> None:
        for pid in processes.ranks_of(launcher.pid).values():
            processes.send(pid, signal.SIGKILL)
        launcher.kill()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.stop_at is None and not self.stop_now:
            time.sleep(min(POLL_SECONDS, seconds))

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_at = self.stop_at or time.monotonic()

    def _on_stop_now(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_now = True

    def _say_who_i_am(self) -> None:
        me = {
            "pid": os.getpid(),
            "start_time": processes.start_time(os.getpid()),
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
        }
        write_atomically(self.folder.path / SUPERVISOR_FILE, json.dumps(me))

    def _last_attempt(self) -> int:
        return max((int(one.get("attempt") or 0) for one in read_json_lines(self.folder.history)), default=0)

    def _newest_checkpoint(self) -> int:
        events = read_json_lines(self.folder.history)
        return max((int(one["step"]) for one in events if one.get("event") == "checkpoint"), default=-1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> int:
    folder, lock, ready = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(lock, False)  # the lock is this process's alone: it must not outlive it in a rank
    os.set_inheritable(ready, False)
    request = LocalRequest.from_dict(json.loads((folder.path / REQUEST_FILE).read_text()))

    def say_ready() -> None:
        os.write(ready, b"ready\n")
        os.close(ready)

    return Supervisor(folder, request).run(say_ready)


if __name__ == "__main__":
    sys.exit(main())
