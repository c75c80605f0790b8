"""Render, checks and state of local runs, with one quick process in place of torchrun."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests.targets.local_runs import events
from windlass.errors import UserError
from windlass.targets import target, target_of_kind
from windlass.targets.launch import processes
from windlass.targets.launch.machine import Gpu, Machine, free_bytes, this_machine
from windlass.targets.launch.supervision import supervisor_of
from windlass.targets.launch.torchrun import Place
from windlass.targets.local import checks
from windlass.targets.local.client import LocalTarget
from windlass.targets.local.render import LocalRequest, render, settle
from windlass.targets.local.state import status_of
from windlass.targets.protocol import world_size

GPUS = Machine(gpus=(Gpu("H200", 2**37),) * 4, cores=32, memory_bytes=2**38)


def test_render_is_the_command_that_is_printed(make_run, machine):
    run = settle(make_run("demo"), machine)
    request = render(run, Place(Path("runs"), Path("/home/u"), "python"), faults="kill:step=3")
    assert request.argv == (
        *("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "windlass.trainer", "runs/demo/run.yaml"),
    )
    assert request.environment["OMP_NUM_THREADS"] == "1"
    assert request.environment["WINDLASS_FOLDER"] == "/home/u/runs/demo"
    assert request.environment["WINDLASS_FAULTS"] == "kill:step=3"
    text = str(request)
    assert "torch.distributed.run --standalone --nproc-per-node 2 -m windlass.trainer runs/demo/run.yaml" in text
    assert "WINDLASS_FAULTS=kill:step=3" in text
    assert LocalRequest.from_dict(json.loads(json.dumps(request.as_dict()))) == request


def test_the_users_number_of_threads_is_kept(make_run, machine, monkeypatch):
    def threads(**resources):
        run = LocalTarget(GPUS).settle(make_run(resources=resources))
        made = render(run, Place(Path("runs"), Path("/"), "python"))
        return run.resources.threads_per_process, made.environment["OMP_NUM_THREADS"]

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == (3, "3")
    assert threads(threads_per_process=5) == (5, "5")
    for nonsense in ("", "0", "4,2", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert threads() == (16, "16")


def test_a_given_port_is_used(make_run, machine):
    run = settle(make_run(target={"port": 29501}), machine)
    argv = render(run, Place(Path("runs"), Path("/"), "python")).argv
    assert "--standalone" not in argv
    assert argv[argv.index("--master-port") + 1] == "29501"


@pytest.mark.parametrize(
    ("there", "asked", "ranks", "gpus"),
    [
        (GPUS, {}, 4, 4),
        (GPUS, {"gpus_per_node": 2}, 2, 2),
        (GPUS, {"gpus_per_node": 0, "processes_per_node": 3}, 3, 0),
        (GPUS, {"processes_per_node": 2}, 2, 2),
        (Machine((), 8, 1), {}, 1, 0),
        (Machine((), 8, 1), {"processes_per_node": 2}, 2, 0),
    ],
)
def test_ranks_follow_from_the_machine(make_run, there, asked, ranks, gpus):
    nothing = {"gpus_per_node": None, "processes_per_node": None}
    run = settle(make_run(resources={**nothing, **asked}), there)
    assert (run.resources.processes_per_node, run.resources.gpus_per_node) == (ranks, gpus)
    assert settle(run, there) == run
    assert world_size(run) == ranks
    assert run.resources.threads_per_process == there.cores // ranks


def test_more_processes_than_gpus_needs_a_word_about_the_cpu(make_run):
    with pytest.raises(UserError, match="4 GPU"):
        settle(make_run(resources={"gpus_per_node": None, "processes_per_node": 5}), GPUS)


def test_checks_say_what_cannot_work(make_run, machine, tmp_path, monkeypatch):
    def check(run, bytes_needed=None):
        LocalTarget(machine).check_run(run)
        return checks.check(run, machine, tmp_path / "not" / "there", bytes_needed=bytes_needed)

    assert check(make_run()) == []
    with pytest.raises(UserError, match="has no GPUs"):
        check(make_run(resources={"gpus_per_node": 8, "processes_per_node": None}))
    with pytest.raises(UserError, match="one machine"):
        check(make_run(resources={"nodes": 2}))
    with pytest.raises(UserError, match=r"need 1048576.0 GiB"):
        check(make_run(), bytes_needed=2**50)
    assert "share 2 cores" in check(make_run(resources={"processes_per_node": 4, "threads_per_process": 1}))[0]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match="is taken"):
            check(make_run(target={"port": other.getsockname()[1]}))
    (tmp_path / "not").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot be made"):
        check(make_run())
    (tmp_path / "not").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch and transformers") as error:
        check(make_run())
    assert error.value.fix == "pip install 'windlass[train]'"
    assert list(tmp_path.iterdir()) == []


def test_this_machine_is_seen_without_torch():
    seen = this_machine()
    assert seen.cores >= 1
    assert seen.memory_bytes > 2**28
    assert free_bytes(Path("/tmp/there/is/no/such")) > 0


def test_targets_are_found_by_kind(make_run):
    assert isinstance(target(make_run().target), LocalTarget)
    with pytest.raises(UserError, match="no target 'moon'"):
        target_of_kind("moon")


def test_an_error_that_would_come_again_is_not_retried(alone, make_run):
    status = alone.wait(alone.submit(make_run(), error=[0, 3]))
    assert (status.state, status.exit_code, status.reason) == ("failed", 1, "loss is not finite at step 3")
    assert status.attempt == 1


@pytest.mark.slow
def test_restarts_without_progress_come_to_an_end(alone, make_run):
    job = alone.submit(make_run(target={"max_restarts": 1}), kill=[0, 7], always=True)
    status = alone.wait(job)
    # step 5 is saved in the first attempt, so the restart after it is the first one; the next finds nothing new
    assert status.state == "failed"
    assert "given up after 1 restart without a new checkpoint" in status.reason
    assert len(events(job, "launched")) == 2
    assert events(job, "gave-up")


def test_stop_now_ends_at_once(alone, make_run):
    job = alone.submit(make_run(train={"steps": 4000}))
    alone.wait(job, lambda status: (status.step or 0) >= 2)
    status = alone.target.stop(job, save_first=False)
    assert (status.state, status.exit_code) == ("stopped", 130)
    assert alone.target.stop(job, save_first=True).state == "stopped"  # stopping twice is no error
    assert [item.name for item in alone.target.list()] == ["r"]


@pytest.mark.slow
def test_a_stop_that_outlasts_its_grace_is_ended(alone, make_run):
    job = alone.submit(make_run(train={"steps": 4000}, checkpoint={"grace_seconds": 1}), save_seconds=60)
    alone.wait(job, lambda status: (status.step or 0) >= 2)
    assert alone.target.stop(job, save_first=True).state == "stopped"
    assert processes.processes_of(job.folder.path) == []


def test_a_recycled_pid_is_not_the_supervisor(alone, make_run):
    job = alone.submit(make_run())
    alone.wait(job)
    record = {"pid": os.getpid(), "start_time": 1, "host": socket.gethostname()}
    (job.folder.path / "supervisor.json").write_text(json.dumps(record))
    assert not supervisor_of(job.folder).alive
    assert status_of(job.folder).state == "finished"


def test_a_run_started_by_torchrun_itself_has_a_state(in_tmp, make_run):
    from windlass.runfolder import RunFolder

    run = make_run()
    folder = RunFolder.of(run)
    folder.create(run)
    assert status_of(folder).state == "waiting"
    folder.record("started", attempt=1, step=0)
    assert status_of(folder).state == "running"
    folder.record("finished", step=20, loss=1.0)
    assert status_of(folder).state == "finished"
