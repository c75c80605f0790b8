"""What a pod of a HyperPodPyTorchJob runs: HyperPod's own agent, which its operator tells when to start and stop."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

from windlass.errors import UserError
from windlass.runfolder import RUNS_VARIABLE, RunFolder
from windlass.spec import load_run
from windlass.targets.kubernetes.pod import interface as names
from windlass.targets.kubernetes.pod.launching import SAY_ALL_VARIABLE
from windlass.targets.kubernetes.pod.log_forwarder import LogForwarder, PodOutput, Records
from windlass.targets.kubernetes.pod.place import code_digest, paths_of, unpack_code
from windlass.targets.launch import processes
from windlass.targets.launch.torchrun import FOLDER_VARIABLE

AGENT = "hyperpodrun"
TICK_SECONDS = 0.5


def run_agent() -> int:
    """Run the agent until its operator is done with it; its exit code."""
    agent = shutil.which(AGENT)
    if agent is None:
        raise UserError(
            f"the image has no {AGENT}",
            cause="HyperPod's training operator talks to an agent in every pod",
            fix="image.hyperpod_agent=true and `windlass image build`, or target.kubernetes.job=job",
        )
    run_file, scratch, carried = paths_of(os.environ)
    run = load_run(run_file, saved=True)
    logs = scratch / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(RUNS_VARIABLE, names.RUNS)
    folder = RunFolder.of(run)
    code = unpack_code(carried, scratch, code_digest(carried))
    environment = {**os.environ, SAY_ALL_VARIABLE: "1", FOLDER_VARIABLE: str(folder.path)}
    if code:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
    command = [
        agent,
        "--server-host=0.0.0.0",
        f"--server-port={names.HYPERPOD_AGENT_PORT}",
        "--rdzv-backend=hyperpod",
        f"--nnodes={os.environ.get(names.NODES_VARIABLE) or run.resources.nodes}",
        f"--nproc-per-node={run.resources.processes_per_node or 1}",
        "--shutdown-signal=SIGTERM",
        f"--shutdown-timeout={run.checkpoint.grace_seconds}",
        "--tee=3",
        f"--log-dir={logs}",
        "-m",
        "windlass.trainer",
        str(run_file),
    ]
    environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: processes.send(process.pid, received))
    forwarder: LogForwarder | None = None
    while process.poll() is None:
        if forwarder is None and folder.path.is_dir() and 0 in processes.ranks_of(process.pid):
            # rank 0 is here: its records are this pod's to print
            forwarder = LogForwarder(PodOutput(), Records(folder))
        time.sleep(TICK_SECONDS)
    if forwarder:
        forwarder.close()
    sys.stdout.flush()
    return int(process.returncode)
