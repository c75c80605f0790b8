"""A rank that is killed, or stopped: the others name it and leave soon, to be started again, under any launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Job, start
from windlass.runfolder import RunFolder
from windlass.trainer.distributed.peers import BEAT_S

pytestmark = pytest.mark.train

LEAVE_WITHIN_S = 30
HERE = socket.gethostname()


def error_of(folder: RunFolder, rank: int) -> dict[str, Any]:
    return dict(json.loads(folder.rank_error(rank).read_text()))


def left(job: Job, ranks: tuple[int, ...], since: float) -> None:
    """These ranks have ended by themselves, in time, with the code that asks for another attempt."""
    for rank in ranks:
        job.processes[rank].join(max(0.0, since + LEAVE_WITHIN_S - time.monotonic()))
        if job.processes[rank].exitcode is None:
            for process in job.processes:
                process.kill()
            raise AssertionError(f"rank {rank} was still there after {LEAVE_WITHIN_S} s:\n{job.output()}")
    assert [job.processes[rank].exitcode for rank in ranks] == [75] * len(ranks), job.output()


@pytest.mark.parametrize("killed", [0, 2])
def test_the_others_leave_wherever_they_are(killed: int, corpus: Path, tmp_path: Path) -> None:
    """One of them is busy elsewhere, as with a kernel that waits on the device: no broken connection wakes it."""
    busy, waiting = [rank for rank in (0, 1, 2) if rank != killed]
    job = start(tmp_path, tiny_run(corpus), ranks=3, faults=f"sleep:rank={busy},step=3,seconds=100")
    job.wait_for(lambda: job.step() >= 2)
    time.sleep(0.5)
    job.signal(killed, signal.SIGKILL)
    left(job, (busy, waiting), time.monotonic())
    job.result()
    for rank in (busy, waiting):
        error = error_of(job.folder, rank)
        assert error["retry"] is True
        assert error["error"].startswith(f"rank {killed} on {HERE} ended without a word"), error["error"]


def test_under_plain_torchrun(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_run(corpus)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "windlass.trainer", "mine.yaml"]
    faults = "sleep:rank=0,step=3,seconds=100;kill:rank=1,step=3"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"WINDLASS_RUNS": str(tmp_path / "runs"), "WINDLASS_FAULTS": faults}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    folder = RunFolder(tmp_path / "runs" / "mine")
    assert done.returncode == 1, "torchrun's own code"
    error = error_of(folder, 0)
    assert error["error"].startswith(f"rank 1 on {HERE} ended without a word")
    killed_at = (folder.logs / ".fault-1-1").stat().st_mtime
    assert error["time"] - killed_at < LEAVE_WITHIN_S
    assert "exitcode  : 75" in done.stderr or "exitcode  : -9" in done.stderr, done.stderr


def test_a_stopped_rank_is_named_with_the_collective_it_missed(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, train__steps=500, checkpoint__every=1000, parallel={"timeout_minutes": 0.15})
    job = start(tmp_path, run, ranks=3)
    job.wait_for(lambda: job.step() >= 3)
    time.sleep(1.5 * BEAT_S)  # each rank has sent since then where it is
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    left(job, (0, 2), time.monotonic())
    job.signal(1, signal.SIGKILL)
    job.result()
    for rank in (0, 2):
        error = error_of(job.folder, rank)
        assert error["retry"] is True
        assert error["error"].startswith(f"rank 1 on {HERE} has sent nothing for"), error["error"]
        assert "it missed gloo:" in error["error"], error["error"]
        assert "of step" in error["error"]
    assert "rank 1 on" in job.folder.rank_log(0).read_text()


def test_an_error_of_one_rank_is_told_to_the_others(corpus: Path, tmp_path: Path) -> None:
    """With its words: the rank that failed may be on a node whose logs are hard to reach."""
    job = start(tmp_path, tiny_run(corpus), ranks=2, prelude=break_rank_1)
    since = time.monotonic()
    job.wait_for(lambda: job.processes[1].exitcode is not None)
    left(job, (0,), max(since, time.monotonic()))
    assert job.result().codes == [75, 1]
    assert error_of(job.folder, 1)["retry"] is False
    assert "rank 1 on" in error_of(job.folder, 0)["error"]
    assert "a mistake of this rank alone" in error_of(job.folder, 0)["error"]


def break_rank_1(rank: int) -> None:
    if rank != 1:
        return
    from windlass.trainer.step import Stepper

    def broken(*_args: Any, **_options: Any) -> None:
        raise TypeError("a mistake of this rank alone")

    Stepper.backward = broken  # type: ignore[method-assign,assignment]
