"""Real torchrun under the real supervisor: ranks are killed, stopped and left alone."""

import os
import signal

import pytest

from tests.targets.local_runs import events
from windlass.errors import UserError
from windlass.targets.launch import processes
from windlass.targets.launch.supervision import supervisor_of

pytestmark = pytest.mark.slow


@pytest.mark.torch_floor  # it reads what torchrun prints
def test_a_killed_rank_is_named_and_the_run_goes_on(local, make_run):
    job = local.submit(make_run(), kill=[1, 12])
    status = local.wait(job)
    assert (status.state, status.exit_code, status.step, status.attempt) == ("finished", 0, 20, 2)
    first = next(record for record in events(job, "rank-died") if record["first"])
    assert (first["rank"], first["signal"], first["attempt"]) == (1, "SIGKILL", 1)
    assert [record["why"] for record in events(job, "restart")] == ["rank 1 was killed by SIGKILL"]
    assert events(job, "resumed")[0]["step"] == 10
    assert [record["attempt"] for record in events(job, "launched")] == [1, 2]
    assert processes.processes_of(job.folder.path) == []
    lines = [line.text for line in local.target.logs(job, rank=0, follow=False)]
    assert "rank 0 is done" in lines
    lines = list(local.target.logs(job, rank=None, follow=True))
    assert {line.rank for line in lines} == {0, 1, None}
    assert any("SIGKILL" in line.text for line in lines if line.rank is None), "the launcher says why"


def test_stop_lets_the_ranks_save_then_the_run_goes_on_where_it_was(local, make_run):
    job = local.submit(make_run(train={"steps": 400}), save_seconds=1.0)
    local.wait(job, lambda status: (status.step or 0) >= 3)
    with pytest.raises(UserError, match="already running"):
        local.submit(make_run(train={"steps": 400}))
    stopped = local.target.stop(job, save_first=True)
    assert (stopped.state, stopped.exit_code) == ("stopped", 75)
    assert processes.processes_of(job.folder.path) == []
    step = events(job, "preempted")[0]["step"]

    again = local.submit(make_run(train={"steps": step + 2}))
    assert local.wait(again).state == "finished"
    assert events(again, "resumed")[0]["step"] == step


def test_a_killed_supervisor_leaves_no_process_and_the_run_can_be_started_again(local, make_run):
    job = local.submit(make_run(train={"steps": 4000}), pause=0.05)
    local.wait(job, lambda status: (status.step or 0) >= 3)
    assert len(processes.processes_of(job.folder.path)) >= 3
    os.kill(supervisor_of(job.folder).pid, signal.SIGKILL)
    status = local.wait(job, lambda status: status.state == "failed")
    assert "supervisor was killed" in status.reason
    local.wait(job, lambda _: not processes.processes_of(job.folder.path), seconds=20)

    saved = max(record["step"] for record in events(job, "checkpoint"))
    again = local.submit(make_run(train={"steps": saved + 1}))
    assert local.wait(again).state == "finished"


def test_sigterm_to_torchrun_itself_lets_the_ranks_save(local, make_run):
    job = local.submit(make_run(train={"steps": 4000}), save_seconds=7.0)
    local.wait(job, lambda status: (status.step or 0) >= 3)
    launcher = processes.parent(next(pid for pid in processes.processes_of(job.folder.path) if is_rank(pid)))
    os.kill(launcher, signal.SIGTERM)
    status = local.wait(job)
    assert (status.state, status.exit_code, status.attempt) == ("preempted", 75, 1)


def is_rank(pid):
    return "RANK" in processes.environment(pid)
