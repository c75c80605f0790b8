"""A pod that leaves restarts to torchrun's elastic agent: `benchmarks.elastic` compares the coordinator with it.

`pod` is what a container would run. It starts torchrun with a c10d rendezvous at node 0, again whenever torchrun gives
up for a reason that may pass, and forwards the run's records. `agent` is torchrun itself, with two decisions of ours at
the place where it restarts its ranks; without them a pod that was told to leave would join the next round, and an
error that comes every time would be tried until the restarts are used up. `rank` is the trainer, after rank 0 has
written down that an attempt begins.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from windlass.common.files import parse_record, read_json_lines
from windlass.diagnose.decision import Policy, spent
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.entry import pod_code
from windlass.targets.kubernetes.pod.attempt_history import AttemptHistory
from windlass.targets.kubernetes.pod.launching import SAY_ALL_VARIABLE
from windlass.targets.kubernetes.pod.log_forwarder import LogForwarder, PodOutput, Records
from windlass.targets.kubernetes.pod.place import Place, launcher_environment
from windlass.targets.kubernetes.pod.verdict import LEFT
from windlass.targets.launch import processes
from windlass.targets.launch.torchrun import ATTEMPT_VARIABLE, FOLDER_VARIABLE

# A pod counts as dead after 3 × 3 s without a heartbeat; a store that does not answer is given up after 20 s.
RENDEZVOUS = "join_timeout=900,keep_alive_interval=3,keep_alive_max_attempt=3,read_timeout=20"
SHUTDOWN_SECONDS = 5  # from SIGTERM to SIGKILL, for ranks whose peers are gone
TICK_SECONDS = 0.1


def pod() -> int:
    place = Place.of(os.environ)
    processes.adopt_orphans()
    place.scratch.mkdir(parents=True, exist_ok=True)
    history = AttemptHistory(place.folder, place.run)
    if place.is_host:
        history.open()
    place.folder.logs.mkdir(parents=True, exist_ok=True)
    before = history.ended_before(place.submission)
    if before is not None:
        return pod_code(int(before.code))
    forwarder = LogForwarder(PodOutput(), Records(place.folder) if place.is_host else None)
    told: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
    try:
        return _run_until_decided(place, told)
    finally:
        forwarder.close()


def _run_until_decided(place: Place, told: list[float]) -> int:
    allowed = place.run.target.max_restarts
    while not told:
        began = time.time()
        code = _run_torchrun(place, told)
        if code == 0:
            return _end(place, "finished", 0, None)
        errors = hopeless_errors(place.folder, began)
        if errors and not told:
            return _end(place, "failed", int(errors[0].get("exit_code") or 1), str(errors[0].get("error")))
        ended = AttemptHistory(place.folder, place.run).ended_before(place.submission)
        if ended is not None:
            return pod_code(int(ended.code))
        used = spent(list(read_json_lines(place.folder.history)), Policy(allowed), "node_lost")
        if used > allowed and not told:
            return _end(place, "failed", 1, f"given up after {used} restarts without a new checkpoint")
    if place.nodes == 1 and any(one.get("event") == "preempted" for one in read_json_lines(place.folder.history)):
        _end(place, "preempted", int(ExitCode.PREEMPTED), "told to leave; saved first")
    return LEFT


def _run_torchrun(place: Place, told: list[float]) -> int:
    environment = launcher_environment(os.environ, place)
    environment |= {
        FOLDER_VARIABLE: str(place.folder.path),
        SAY_ALL_VARIABLE: "1",
        # With the shared store, pods that are not group rank 0 keep the address of a lost one's (torch 2.15).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    nodes = f"{place.min_nodes}:{place.nodes}" if place.min_nodes < place.nodes else str(place.nodes)
    command = [
        *(sys.executable, "-m", "benchmarks.elastic_pod", "agent"),
        *(f"--nnodes={nodes}", f"--nproc-per-node={place.ranks}", f"--max-restarts={place.run.target.max_restarts}"),
        *("--rdzv-backend=c10d", f"--rdzv-id={place.submission}", f"--local-addr={place.address}"),
        f"--rdzv-endpoint={place.address if place.is_host else place.host}:{place.port}",
        f"--rdzv-conf={RENDEZVOUS},is_host={int(place.is_host)}",
        *("--tee=3", f"--log-dir={place.scratch / 'logs'}", f"--shutdown-timeout={SHUTDOWN_SECONDS}"),
        *("--signals-to-handle=SIGINT,SIGQUIT", "-m", "benchmarks.elastic_pod", "rank", str(place.run_file)),
    ]
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    asked = False
    while agent.poll() is None:
        time.sleep(TICK_SECONDS)
        if told and not asked:  # the ranks save and leave; torchrun itself would kill them in the middle of a save
            asked = True
            processes.send(agent.pid, signal.SIGUSR1)
            ranks = processes.ranks_of(agent.pid)
            for pid in ranks.values():
                processes.send(pid, signal.SIGTERM)
            if len(ranks) < place.ranks:
                agent.kill()
        if told and time.monotonic() > told[0] + place.run.checkpoint.grace_seconds:
            agent.kill()
    for pid in processes.all_pids():  # ranks that a killed torchrun left
        if processes.parent(pid) == os.getpid() and pid != agent.pid:
            processes.send(pid, signal.SIGKILL)
    processes.reap()
    return int(agent.returncode)


def _end(place: Place, state: str, code: int, reason: str | None) -> int:
    if place.is_host or state == "failed":
        place.folder.record("exit", state=state, code=code, reason=reason, job=place.submission)
    return pod_code(code)


def hopeless_errors(folder: RunFolder, since: float) -> list[dict[str, Any]]:
    """The errors of any rank that would come again."""
    errors = [parse_record(path.read_bytes()) or {} for path in folder.logs.glob("rank-*.error.json")]
    return [error for error in errors if error.get("time", 0.0) >= since and not error.get("retry")]


def agent(arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher import api

    leaving = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: leaving.set())
    folder, began = RunFolder(Path(os.environ[FOLDER_VARIABLE])), time.time()

    class Agent(api.LocalElasticAgent):
        def _restart_workers(self, worker_group: Any) -> None:
            if leaving.is_set():  # a signal is the one end that leaves the rendezvous open for the others
                raise SignalException("told to leave", signal.SIGTERM)
            if hopeless_errors(folder, began):
                raise RuntimeError("an error that would come again")  # closes the rendezvous: the others end too
            super()._restart_workers(worker_group)

    api.LocalElasticAgent = Agent  # type: ignore[misc]
    run.main(arguments)


def rank(run_file: str) -> None:
    folder = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
    history = list(read_json_lines(folder.history))
    attempt = 1 + max((int(one.get("attempt") or 0) for one in history if one["event"] == "launched"), default=0)
    if os.environ["RANK"] == "0":
        if attempt > 1:
            folder.record("restart", attempt=attempt, why="torchrun started the ranks again", left=0)
        folder.record("launched", attempt=attempt, job=os.environ.get("WINDLASS_SUBMISSION"))
    os.environ[ATTEMPT_VARIABLE] = str(attempt)
    sys.argv = ["windlass.trainer", run_file]
    runpy.run_module("windlass.trainer", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    match sys.argv[1]:
        case "pod":
            sys.exit(pod())
        case "agent":
            agent(sys.argv[2:])
        case "rank":
            rank(sys.argv[2])
