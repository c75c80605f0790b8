"""Notice that no step comes any more, name the rank that is behind, write down what every rank does, and leave.

Collectives have a timeout of their own, but it is long, and says neither who is missing nor where he is. The first rank
watches its own steps: they stand still when those of any rank do. What it finds is in history.jsonl ("hang") and in
logs/stacks-rank-*.txt; the attempt then ends as with a lost rank, and the launcher decides whether it starts again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from windlass.runfolder import RunFolder
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.distributed.peers import Standing, pending_collectives
from windlass.trainer.state import TrainState

log = logging.getLogger(__name__)

SHORTEST_S = 60.0  # a hiccup of a network or a file system is no hang
STEPS = 10  # times the usual one
FIRST_S = 1800.0  # for what has not been seen yet in this attempt: the first step compiles, a first save fills caches
POLL_S = 1.0
SILENT_S = 5.0  # a rank sends every second; one that has not for so long is stopped, or cut off
STACKS_S = 3.0  # for all ranks to write their stacks
STACKS_SIGNAL = signal.SIGUSR2


class Rhythm:
    """How long a run may take until its next step, learned from its own steps and pauses."""

    def __init__(self, *, settle_every: int, fixed_s: float | None = None) -> None:
        self.fixed_s = fixed_s
        self.steps_to_learn = settle_every + 1  # a GPU is waited for at log lines alone: one must have been seen
        self.steps: deque[float] = deque(maxlen=200)  # seconds
        self.longest_pause = 0.0
        self.num_steps = 0
        self.since: float | None = None  # when the step or pause under way began
        self.is_pause = False

    def begin_step(self, now: float) -> None:
        self._end(now)
        self.since, self.is_pause = now, False

    def begin_pause(self, now: float) -> None:
        self._end(now)
        self.since, self.is_pause = now, True

    def _end(self, now: float) -> None:
        if self.since is None:
            return
        seconds = now - self.since
        if self.is_pause:
            self.longest_pause = max(self.longest_pause, seconds)
            return
        self.num_steps += 1
        if self.num_steps > 1:  # the first one compiles
            self.steps.append(seconds)

    def forgive(self, now: float) -> None:
        """This process stood still itself: a suspended job, a paused machine."""
        self.since = None if self.since is None else now

    def limit_s(self) -> float:
        """After which the step or pause under way counts as hung."""
        if self.fixed_s is not None and self.num_steps and not self.is_pause:
            return self.fixed_s
        if self.is_pause:
            return max(FIRST_S, 3 * self.longest_pause)
        if self.num_steps <= self.steps_to_learn:
            return max(FIRST_S, 3 * max(self.steps, default=0.0))
        return max(SHORTEST_S, STEPS * statistics.median(self.steps), 2 * max(self.steps))

    def overdue_s(self, now: float) -> float | None:
        """How long nothing has come, once that is too long."""
        if self.since is None or now - self.since <= self.limit_s():
            return None
        return now - self.since


class HangWatch(Callback):
    def __init__(self, state: TrainState) -> None:
        fixed_s = state.run.parallel.hang_seconds
        self.state = state
        self.is_on = fixed_s != 0
        self.rhythm = Rhythm(settle_every=state.run.train.log_every, fixed_s=fixed_s)
        self.over = threading.Event()

    def on_start(self, state: TrainState) -> None:
        self.stacks = stacks_file(state.folder, state.ranks.rank).open("a")  # open: a signal handler writes to it
        faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)

        def write_stacks(neighbours: dict[int, int]) -> None:
            write_own_stacks(self.stacks)
            for rank, pid in neighbours.items():
                write_stacks_of(pid, stacks_file(state.folder, rank))

        state.peers.on_stacks = write_stacks
        if self.is_on and state.ranks.is_first:
            threading.Thread(target=self._watch, name="hang", daemon=True).start()

    def before_step(self, state: TrainState) -> None:
        self.rhythm.begin_step(time.monotonic())

    def after_step(self, state: TrainState) -> None:
        if state.pausing:
            self.rhythm.begin_pause(time.monotonic())

    def on_end(self, state: TrainState) -> None:
        self.over.set()  # the last save, uploads and the export take as long as they take

    def on_close(self, state: TrainState) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        state.peers.on_stacks = lambda _: None
        self.stacks.close()
        path = stacks_file(state.folder, state.ranks.rank)
        with contextlib.suppress(OSError):  # the folder may be gone
            if not path.stat().st_size:
                path.unlink()

    def _watch(self) -> None:
        last_turn = time.monotonic()
        while not self.over.wait(POLL_S):
            now = time.monotonic()
            if now - last_turn > 10 * POLL_S:
                self.rhythm.forgive(now)
            last_turn = now
            overdue = self.rhythm.overdue_s(now)
            if overdue is not None:
                self._report(overdue, self.rhythm.limit_s())
                return

    def _report(self, seconds: float, limit_s: float) -> None:
        state, peers = self.state, self.state.peers
        standings = peers.standings()
        silent = [standing for standing in standings if standing.silent_s > SILENT_S]
        rank, why = behind(standings)
        host = next(standing.host for standing in standings if standing.rank == (rank or 0))
        waiting = pending_collectives()
        if waiting and rank not in (None, state.ranks.rank):
            why += f"; the others wait in {waiting[0]}"
        log.error("no step for %.0f s (limit %.0f s): %s; stacks in %s", seconds, limit_s, why, state.folder.logs)
        with contextlib.suppress(OSError):  # a full disk must not keep the ranks
            state.folder.record(
                "hang",
                attempt=state.reporter.attempt,
                step=state.step + 1,
                seconds=round(seconds, 1),
                limit_s=round(limit_s, 1),
                rank=rank,
                host=host if rank is not None else None,
                why=why,
                stacks="logs/stacks-rank-*.txt",
            )
        peers.ask_for_stacks(silent)
        time.sleep(STACKS_S)
        named = state.ranks.rank if rank is None else rank
        peers.lose(named, host, f"hangs: no step for {seconds:.0f} s; {why}")


def behind(standings: Sequence[Standing]) -> tuple[int | None, str]:
    """The rank that the others wait for, and how one knows; None where none is behind."""
    silent = max(standings, key=lambda standing: standing.silent_s)
    if silent.silent_s > SILENT_S:
        return silent.rank, f"rank {silent.rank} on {silent.host} has sent nothing for {silent.silent_s:.0f} s"
    if len(standings) == 1:
        return standings[0].rank, f"it is at {_place(standings[0])}"
    last, next_to_last = sorted(standings, key=_progress)[:2]
    if _progress(last) == _progress(next_to_last):
        return None, f"no rank is behind: all are at {_place(last)}"
    return last.rank, f"rank {last.rank} on {last.host} is at {_place(last)}, the others at {_place(next_to_last)}"


def _progress(standing: Standing) -> tuple[int, int]:
    collectives = standing.state.get("collectives") or {}
    return int(standing.state.get("step") or 0), sum(map(int, collectives.values()))


def _place(standing: Standing) -> str:
    step, collectives = _progress(standing)
    return f"{standing.state.get('point')} of step {step}, {collectives:,} collectives begun"


def stacks_file(folder: RunFolder, rank: int) -> Path:
    return folder.logs / f"stacks-rank-{rank:04d}.txt"


def write_own_stacks(file: TextIO) -> None:
    print(time.strftime("\n%Y-%m-%dT%H:%M:%S"), "stacks of process", os.getpid(), file=file, flush=True)
    faulthandler.dump_traceback(file=file, all_threads=True)


def write_stacks_of(pid: int, path: Path) -> None:
    """The stacks of a process of this node that does not answer: by py-spy, else by its own signal handler."""
    status = _status(pid)
    with contextlib.suppress(OSError), path.open("a") as file:
        print(time.strftime("\n%Y-%m-%dT%H:%M:%S"), f"process {pid} does not answer: {status}", file=file, flush=True)
        spy = shutil.which("py-spy")
        if spy:
            with contextlib.suppress(subprocess.SubprocessError):
                command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
                subprocess.run(command, stdout=file, stderr=file, timeout=10, check=True)
                return
        if not status.startswith(("T", "t", "gone")):  # a stopped one would run it when it goes on
            os.kill(pid, STACKS_SIGNAL)


def _status(pid: int) -> str:
    """What the kernel says of a process: `T (stopped)`, `D (disk sleep)`."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "gone"
    state = next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
    return f"{state}, in the kernel's {waits_in}" if waits_in not in ("", "0") else state
