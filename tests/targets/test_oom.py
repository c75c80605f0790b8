"""A rank that the kernel kills for memory: found, named, and not restarted for ever."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.targets.local_runs import events
from windlass.cli.main import run_command
from windlass.runfolder import RunFolder
from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath, follow_up
from windlass.targets.launch.machine import memory_groups
from windlass.targets.launch.oom import OomWatch, killed_by_kernel
from windlass.targets.local.state import status_of
from windlass.targets.protocol import JobRef

OOM = RankDeath(0, -9, "t", pid=4, oom="the memory limit of its control group, 1.5 GiB, was reached")


def test_a_second_kill_for_memory_without_progress_is_the_end():
    end = AttemptEnd(1, deaths=[OOM])
    first = follow_up(end, [], 3)
    assert first.reason == f"rank 0 was killed by the kernel's OOM killer: {OOM.oom}"
    second = follow_up(end, [{"event": "restart", **first.as_record()}], 3)
    assert isinstance(second, Done)
    assert "given up after 1 restart without a new checkpoint" in second.reason
    assert "a smaller train.micro_batch" in second.reason


@pytest.mark.parametrize(
    ("lines", "folders"),
    [
        ("0::/user.slice/a\n", ["user.slice/a", "user.slice", ""]),
        ("5:cpu:/x\n4:memory:/jobs/b\n0::/\n", ["memory/jobs/b", "memory/jobs", "memory", ""]),
        ("4:memory,hugetlb:/not/mounted/here\n", ["memory"]),
        ("nonsense\n", []),
    ],
)
def test_the_groups_that_account_for_memory(tmp_path, lines, folders):
    root = tmp_path / "cgroup"
    for name in ("user.slice/a", "memory/jobs/b"):
        (root / name).mkdir(parents=True)
    (tmp_path / "own").write_text(lines)
    found = list(memory_groups(root, tmp_path / "own"))
    assert found == [root / name for name in folders]


@pytest.mark.parametrize(
    ("name", "limit_name"), [("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")]
)
def test_counters_of_both_versions(tmp_path, name, limit_name):
    (tmp_path / name).write_text("oom 3\noom_kill 3\n")
    (tmp_path / limit_name).write_text(f"{3 * 2**29}\n")
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 7\n")
    watch = OomWatch([tmp_path], vmstat)
    nothing = tmp_path / "no-log"
    assert watch.why([4], nothing) is None
    (tmp_path / name).write_text("oom 4\noom_kill 4\n")
    assert watch.why([4], nothing) == "the memory limit of its control group, 1.5 GiB, was reached"


def test_the_kernels_log_and_the_machines_counter(tmp_path):
    log, vmstat = tmp_path / "kmsg", tmp_path / "vmstat"
    vmstat.write_text("oom_kill 7\n")
    watch = OomWatch([], vmstat)
    log.write_text("3,1,2,-;Out of memory: Killed process 44 (python) total-vm:1kB\n6,2,3,-;usb 1-1: new\n")
    assert list(killed_by_kernel(log)) == [44]
    assert watch.why([44], log) == "the machine ran out of memory"
    vmstat.write_text("oom_kill 8\n")
    assert watch.why([45], log) is None  # it was another process
    assert watch.why([45], tmp_path / "no-log") == "the machine ran out of memory at that time"


@contextlib.contextmanager
def memory_limited(size, name=""):
    """A control group with a limit, below the one that this process is in."""
    own = next(memory_groups(), None)
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control group can be made here")
    group = own / f"windlass-test-{os.getpid()}{name}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(str(error))
    try:
        name = next(
            (name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()),
            None,
        )
        if name is None:
            pytest.skip("control groups here do not account for memory")
        (group / name).write_text(str(size))
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


PROGRAM = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from tests.targets.local_runs import Local
from windlass.spec import load_run
from windlass.targets.launch.machine import Machine
local = Local(Machine((), 2, 2**33), torchrun=False)
local.wait(local.submit(load_run(sys.argv[2]), fill_memory=[0, 3]))
"""


@pytest.mark.slow
def test_a_rank_killed_for_memory_names_the_oom_killer(in_tmp, make_run, capfd):
    """A real limit, a real kill: once more from the beginning, since nothing was saved, and then it is over."""
    from windlass.spec import dump_run

    Path("r.yaml").write_text(dump_run(make_run()))
    with memory_limited(300 * 2**20) as group:
        words = [sys.executable, "-c", PROGRAM, str(group), "r.yaml"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert answer.returncode == 0, answer.stderr
    folder = RunFolder(Path("runs/r"))
    status = status_of(folder)
    assert status.state == "failed"
    assert "was killed by the kernel's OOM killer: the memory limit of its control group, 0.3 GiB, was reached" in (
        status.reason
    )
    assert len(events(JobRef("local", "r", folder), "launched")) == 2
    capfd.readouterr()
    run_command(["show", "r"])
    shown = capfd.readouterr().out
    assert "restarting from the beginning: no checkpoint was saved (attempt 2)" in shown
    assert "OOM killer" in shown
    assert signal.SIGKILL.name not in shown
