"""The process that stays with a local run: starts torchrun, passes on a stop, restarts what a signal ended.

`python -m windlass.targets.local.supervisor FOLDER LOCK_FD READY_FD`, started by the client with the folder's lock
held. It says so in supervisor.json and in history.jsonl: launched, rank-died, restart, gave-up, stopped, exit. A stop
comes as a signal, or as stop.json in the folder: before it has begun to listen, and from machines that share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from windlass.common.files import append_json_line, parse_record, read_json_lines, write_atomically
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.launch import processes
from windlass.targets.launch.decision import (
    AttemptEnd,
    Done,
    RankDeath,
    death_record,
    follow_up,
    how_it_died,
    newest_checkpoint,
    parse_deaths,
)
from windlass.targets.launch.machine import full_disk
from windlass.targets.launch.oom import OomWatch
from windlass.targets.launch.progress import newest_attempt
from windlass.targets.launch.supervision import BEAT_SECONDS, SUPERVISOR_FILE, supervisor_of, supervisor_record
from windlass.targets.launch.tail import Tail
from windlass.targets.launch.torchrun import ATTEMPT_VARIABLE, SURVIVOR_SECONDS, TorchrunLog
from windlass.targets.local.render import LocalRequest
from windlass.targets.local.state import end_of_former

REQUEST_FILE = "request.json"
STOP_FILE = "stop.json"
LAUNCHER_LOG = "launcher.log"
RESERVE_FILE, RESERVE_BYTES = ".reserve", 2**14  # room on the disk for the last records of a run
STOP_NOW = signal.SIGUSR1
POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5  # between two looks at the folder: for a stop request, and whether it is still there
GONE_SECONDS = 30.0  # after which a folder that is out of reach is taken for gone
WRITE_SECONDS = 10.0  # for a full disk to have room for the last records


class Supervisor:
    def __init__(self, folder: RunFolder, request: LocalRequest, lock: int) -> None:
        self.folder = folder
        self.request = request
        self.lock = lock  # an open file of the folder
        self.reserve = folder.path / RESERVE_FILE
        # as SupervisorProcess.job; each start by somebody has budgets of its own
        self.job = f"{os.getpid()}-{processes.start_time(os.getpid())}"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.stop_at: float | None = None  # when a stop was asked for
        self.stop_now = False
        self.stop_requested = False  # by `windlass stop`, not by a signal from somewhere
        self.folder_gone = False
        self._missing_since: float | None = None
        self._looked_at = self._beat_at = float("-inf")
        self._unwritten: list[dict[str, Any]] = []

    def run(self, ready: Callable[[], None]) -> int:
        """Supervise until the run has ended; the exit code of the run."""
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(STOP_NOW, self._on_stop_now)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        processes.adopt_orphans()
        former = supervisor_of(self.folder)
        write_atomically(self.folder.path / SUPERVISOR_FILE, json.dumps(supervisor_record(self.folder.path)))
        self._keep_room()
        ready()
        # ranks of an earlier supervisor that was killed: they save and leave
        left = processes.end_leftovers(self.folder.path, patience=self.request.grace_seconds, save_first=True)
        if left:
            self._record("leftovers-killed", pids=left)
        if end := end_of_former(self.folder, former):
            self._append(end)
        done = self._attempts()
        if done.state in ("stopped", "preempted"):
            self._record("stopped", reason=done.reason)
        self._record("exit", state=done.state, code=done.code, reason=done.reason)
        self._write_rest()
        return done.code

    def _attempts(self) -> Done:
        attempt = newest_attempt(read_json_lines(self.folder.history))
        while True:
            attempt += 1
            self._look()
            if self.folder_gone:
                return Done("failed", ExitCode.FAILED, "its run folder was deleted")
            if self.stop_at is not None or self.stop_now:
                return Done("stopped", ExitCode.INTERRUPTED, "stopped before it was started")
            end = self._attempt(attempt)
            if self.folder_gone:
                return Done("failed", ExitCode.FAILED, "its run folder was deleted")
            for index, death in enumerate(end.deaths):
                facts = death_record(death, end.errors, first=index == 0)
                self._record("rank-died", attempt=attempt, **facts, oom=death.oom)
            history = [*read_json_lines(self.folder.history), *self._unwritten]
            decided = follow_up(end, history, self.request.max_restarts)
            if isinstance(decided, Done):
                if decided.state == "failed":
                    self._record("gave-up", attempt=attempt, **{"class": decided.name}, why=decided.reason)
                return decided
            saved = newest_checkpoint(history)
            checkpoint = saved if saved >= 0 else None
            self._record("restart", attempt=attempt + 1, **decided.as_record(), checkpoint=checkpoint)
            self._wait(decided.backoff_seconds)

    def _attempt(self, attempt: int) -> AttemptEnd:
        """Start torchrun, wait for its end and gather what is known about it."""
        history_begins = _size(self.folder.history)
        log = self.folder.logs / LAUNCHER_LOG
        log_begins = _size(log)
        self._record("launched", attempt=attempt, job=self.job, argv=list(self.request.argv))
        memory = OomWatch()
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
        launcher = self.launcher.pid
        code = self._watch(self.launcher, TorchrunLog(log, offset=log_begins))
        self.launcher = None
        # torchrun ends its ranks; if it was itself killed, they are still there
        processes.end_leftovers(self.folder.path, patience=1.0 if code >= 0 else 0.0)
        self._look()
        deaths = parse_deaths("\n".join(Tail(log, offset=log_begins).lines(rest=True)))
        return AttemptEnd(
            launcher_code=code,
            events=Tail(self.folder.history, offset=history_begins).records(),
            errors=self.folder.errors(attempt),
            deaths=_with_oom(deaths, memory),
            out_of_memory=self._launcher_oom(memory, launcher) if code == -signal.SIGKILL else None,
            full_disk=full_disk(self.folder.path),
            stop_requested=self.stop_requested,
            terminated=self.stop_at is not None or self.stop_now,
        )

    def _launcher_oom(self, memory: OomWatch, launcher: int) -> str | None:
        why = memory.why([launcher]) if not self.stop_now else None
        return f"torchrun {how_it_died(None, None, why)}" if why else None

    def _watch(self, launcher: subprocess.Popen[bytes], log: TorchrunLog) -> int:
        """Wait for torchrun; pass a stop on to its ranks, and end those that cannot end themselves."""
        is_passed_on = is_killing = False
        failed_at: float | None = None  # when torchrun saw a rank fail and told the others to leave
        while True:
            code = launcher.poll()
            if code is not None:
                return code
            now = time.monotonic()
            self._look()
            if log.shows_failure() and failed_at is None:
                failed_at = now
            overdue = self.stop_at is not None and now > self.stop_at + self.request.grace_seconds
            if self.stop_now or overdue or self.folder_gone:
                if not is_killing:
                    is_killing = True
                    self._record("killing", why="stopped at once" if self.stop_now else "grace period is over")
                processes.signal_ranks(launcher.pid, signal.SIGKILL)
                launcher.kill()
            elif self.stop_at is not None and not is_passed_on:
                is_passed_on = True
                # not to torchrun: it would kill the ranks 30 seconds later, in the middle of a save
                if not processes.signal_ranks(launcher.pid, signal.SIGTERM):
                    launcher.terminate()  # still starting: nothing to save
            elif failed_at is not None and now > failed_at + SURVIVOR_SECONDS:
                # they wait for a peer that is gone; torchrun would give them half a minute
                processes.signal_ranks(launcher.pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.stop_at is None and not self.stop_now and not self.folder_gone:
            self._look()
            time.sleep(min(POLL_SECONDS, seconds))

    def _look(self) -> None:
        """Now and then: is the folder still there, does it hold a stop request; and give a sign of life."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        if not self._folder_is_here(now):
            return
        if now >= self._beat_at + BEAT_SECONDS:
            self._beat_at = now
            with contextlib.suppress(OSError):
                os.utime(self.folder.path / SUPERVISOR_FILE)
            self._write_unwritten()
        if not self.stop_now:
            self._read_stop_request()

    def _folder_is_here(self, now: float) -> bool:
        """A deleted folder takes its lock along; one that is only out of reach, as a network's disk, may come back."""
        try:
            deleted = os.fstat(self.lock).st_nlink == 0
            here = not deleted and self.folder.run_file.exists()
        except OSError:  # a disk or a network that hangs says nothing about the folder
            return False
        if here:
            self._missing_since = None
            return True
        self._missing_since = self._missing_since or now
        if not self.folder_gone and (deleted or now > self._missing_since + GONE_SECONDS):
            self.folder_gone = True
            print(f"{self.folder.path} was deleted or moved: the ranks are ended", file=sys.stderr, flush=True)
        return False

    def _read_stop_request(self) -> None:
        try:
            request = parse_record((self.folder.path / STOP_FILE).read_bytes())
        except OSError:
            return
        save_first = request is not None and request.get("save_first") is not False
        if request is None or (self.stop_requested and save_first):
            return
        self.stop_requested = True
        self._record("stop-requested", save_first=save_first, by=request.get("by"))
        if save_first:
            self.stop_at = self.stop_at or time.monotonic()
        else:
            self.stop_now = True

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_at = self.stop_at or time.monotonic()
        self._looked_at = float("-inf")  # is it `windlass stop` that sent it?

    def _on_stop_now(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_now = True
        self._looked_at = float("-inf")

    def _record(self, event: str, **facts: Any) -> None:
        """Append to history.jsonl; on a full disk records wait: the ranks need a supervisor more than a record."""
        self._append({"time": round(time.time(), 3), "event": event, **facts})

    def _append(self, record: dict[str, Any]) -> None:
        self._unwritten.append(record)
        self._write_unwritten()

    def _write_unwritten(self) -> bool:
        try:
            while self._unwritten and not self.folder_gone:
                append_json_line(self.folder.history, self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"{self.folder.history} cannot be written: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _keep_room(self) -> None:
        try:
            self.reserve.write_bytes(os.urandom(RESERVE_BYTES))  # some file systems store zeros in no space
        except OSError:  # the room that is left is for the records of now
            with contextlib.suppress(OSError):
                self.reserve.unlink(missing_ok=True)

    def _write_rest(self) -> None:
        """The last records: into the room that was kept for them, where there is no other."""
        with contextlib.suppress(OSError):
            self.reserve.unlink(missing_ok=True)
        deadline = time.monotonic() + WRITE_SECONDS
        while not self._write_unwritten() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _with_oom(deaths: list[RankDeath], memory: OomWatch) -> list[RankDeath]:
    """The deaths, with those that the kernel's OOM killer caused marked and put first."""
    killed = [death for death in deaths if death.code == -signal.SIGKILL]
    why = memory.why([death.pid for death in killed if death.pid is not None]) if killed else None
    if why is None:
        return deaths
    marked = [replace(death, oom=why) if death is killed[0] else death for death in deaths]
    return sorted(marked, key=lambda death: death.oom is None)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> int:
    folder, lock, ready = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(lock, False)  # the lock is this process's alone: it must not outlive it in a rank
    os.set_inheritable(ready, False)
    request = LocalRequest.from_dict(json.loads((folder.path / REQUEST_FILE).read_text()))

    def report_ready() -> None:
        os.write(ready, b"ready\n")
        os.close(ready)

    return Supervisor(folder, request, lock).run(report_ready)


if __name__ == "__main__":
    sys.exit(main())
