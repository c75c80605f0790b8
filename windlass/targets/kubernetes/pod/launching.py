"""torchrun in a pod: start it, have its ranks save, end it, and find out how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from windlass.targets.kubernetes.pod.log_forwarder import PodOutput, errors_of
from windlass.targets.kubernetes.pod.messages import Message
from windlass.targets.kubernetes.pod.place import NotArrivedError, Place, launcher_environment, unpack_code
from windlass.targets.kubernetes.pod.verdict import TROUBLE, NodeEnd
from windlass.targets.launch import processes
from windlass.targets.launch.decision import parse_deaths
from windlass.targets.launch.machine import group_limit
from windlass.targets.launch.oom import group_kills
from windlass.targets.launch.tail import Tail
from windlass.targets.launch.torchrun import (
    ATTEMPT_VARIABLE,
    FOLDER_VARIABLE,
    SURVIVOR_SECONDS,
    TorchrunLog,
    torchrun,
)

CGROUP = Path("/sys/fs/cgroup")
SAY_ALL_VARIABLE = "WINDLASS_SAY_ALL"  # ranks other than the first speak on their console too


@dataclass
class Launch:
    """One start of this pod's ranks."""

    attempt: int
    ranks: range
    process: subprocess.Popen[bytes]
    log: Path  # torchrun's own words
    logs: Path  # below it, the ranks'
    code: str | None = None  # digest of the code they run
    save_requested: bool = False
    ended: int | None = None
    oom_kills: int = 0  # of this pod's memory, before the ranks were started
    _end_at: float | None = None
    _torchrun_log: TorchrunLog = field(init=False)

    def __post_init__(self) -> None:
        self._torchrun_log = TorchrunLog(self.log)

    def tend(self, now: float) -> bool:
        """Whether the ranks have ended; those that cannot end themselves are ended."""
        if self._torchrun_log.shows_failure() and not self.save_requested:
            self.end_soon()
        if self._end_at is not None and now > self._end_at:
            self.kill()
        self.ended = self.process.poll()
        return self.ended is not None

    def request_save(self) -> None:
        """SIGTERM to the ranks, not to torchrun, which would kill them in the middle of a save."""
        if self.save_requested or self.process.poll() is not None:
            return
        self.save_requested = True
        if len(processes.ranks_of(self.process.pid)) < len(self.ranks):  # still starting: nothing to save
            self.kill()
        else:
            processes.signal_ranks(self.process.pid, signal.SIGTERM)

    def end_soon(self) -> None:
        """A rank here or elsewhere is gone: the others wait for it in vain, and have a moment to write down why."""
        if self._end_at is None:
            self._end_at = time.monotonic() + SURVIVOR_SECONDS

    def kill(self) -> None:
        processes.signal_ranks(self.process.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def launch(place: Place, start: Message, pod_output: PodOutput) -> Launch:
    """Start torchrun as the coordinator says."""
    attempt, position = int(start["attempt"]), int(start["position"])
    ranks = range(position * place.ranks, (position + 1) * place.ranks)
    logs = place.scratch / "logs" / f"attempt-{attempt}"
    for old in logs.parent.glob("attempt-*"):
        if int(old.name.rpartition("-")[2]) < attempt - 1:
            shutil.rmtree(old, ignore_errors=True)  # forwarded long ago, and a pod's disk is small
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "launcher.log"
    environment = launcher_environment(os.environ, place)
    environment |= {ATTEMPT_VARIABLE: str(attempt), FOLDER_VARIABLE: str(place.folder.path), SAY_ALL_VARIABLE: "1"}
    command = _torchrun(place, start, position, logs)
    with log.open("ab") as output:
        try:
            code = unpack_code(place.carried, place.scratch, start.get("code"))
        except NotArrivedError as error:
            output.write(f"windlass: {error}\n".encode())
            code, command = None, (sys.executable, "-c", "raise SystemExit(1)")
        if code:
            environment["PYTHONPATH"] = os.pathsep.join(
                path for path in (str(code), environment.get("PYTHONPATH")) if path
            )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    about = {"node": place.node, "attempt": attempt, "ranks": list(ranks), "host": os.uname().nodename}
    pod_output.record("node", {**about, "pod": place.pod})
    return Launch(attempt, ranks, process, log, logs, code=start.get("code"), oom_kills=oom_kills())


def end_of(place: Place, ended: Launch, *, leaving: bool) -> NodeEnd:
    words = "\n".join(Tail(ended.log).lines(rest=True))
    code = ended.ended if ended.ended is not None else -1
    return NodeEnd(
        node=place.node,
        code=code,
        deaths=tuple(parse_deaths(words)),
        errors=tuple(errors_of(place.folder, ended.attempt, ended.ranks)),
        trouble=bool(TROUBLE.search(words)),
        leaving=leaving,
        out_of_memory=describe_limit() if oom_kills() > ended.oom_kills else None,
    )


def oom_kills(root: Path = CGROUP) -> int:
    """How often the kernel has killed a process of this container for its memory limit."""
    return max(group_kills(root), group_kills(root / "memory"))  # cgroup v2, v1


def describe_limit(root: Path = CGROUP) -> str:
    """The limit that was reached, and what helps."""
    limit = group_limit(root) or group_limit(root / "memory")
    size = f" of {limit / 2**30:.3g} GiB" if limit else ""
    return (
        f"the pod's memory limit{size} was reached, and the kernel killed what used most; loaders, whole state dicts "
        "and /dev/shm count as memory; target.kubernetes.memory=AMOUNT gives it more"
    )


def _torchrun(place: Place, start: Message, position: int, logs: Path) -> tuple[str, ...]:
    return torchrun(
        sys.executable,
        f"--nnodes={start['nodes']}",
        f"--node-rank={position}",
        f"--nproc-per-node={place.ranks}",
        f"--master-addr={start['address']}",
        f"--master-port={start['port']}",
        "--max-restarts=0",
        "--redirects=3",
        f"--log-dir={logs}",
        "--signals-to-handle=SIGINT,SIGQUIT",  # the entry tells the ranks itself
        run_file=str(place.run_file),
    )
