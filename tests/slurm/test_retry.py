"""`windlass run --detach` on the real Slurm: a failure is answered by a job of its own, with nobody there."""

import shutil

import pytest

from tests.slurm.conftest import events, job_of, wait

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def loops(cluster):
    return [line for line in cluster.ask("squeue", "-h", "-o", "%j").splitlines() if line.endswith("-loop")]


def test_a_full_gpu_is_answered_with_nobody_there(cluster, bench):
    asked = ("name=full", "--on", "slurm", "train.micro_batch=2", "--inject", "oom:rank=0,step=5")
    answer = bench.windlass("run", bench.file, *asked, "--detach")
    assert answer.returncode == 0, answer.stderr
    folder = bench.run_folder("full")
    assert loops(cluster) == ["full-loop"]
    wait(lambda: events(folder, "finished"), "the end", folder, 400)
    assert [record["edit"] for record in events(folder, "retry")] == [{"train.micro_batch": [2, 1]}]
    assert len(events(folder, "submitted")) == 2
    wait(lambda: bench.show("full")["state"] == "finished", "its end in Slurm", folder, 60)
    wait(lambda: not loops(cluster), "the loop of a job that ended well is dropped", folder, 60)


SLOW_LOOP = "target.slurm.setup=['case $SLURM_JOB_NAME in *-loop) sleep 600;; esac']"


def test_stop_ends_the_loop_too_and_waits_for_it(cluster, bench):
    """One that waits for its job, and one that is at work: it would submit the next job behind the back of `stop`."""
    held = ("--on", "slurm", "target.slurm.sbatch=[--hold]", SLOW_LOOP, "--detach")
    for name, begins in (("ended", False), ("busy", True)):
        folder = bench.run_folder(name)
        answer = bench.windlass("run", bench.file, f"name={name}", *held)
        assert answer.returncode == 0, answer.stderr
        assert loops(cluster) == [f"{name}-loop"]
        if begins:
            cluster.ask("scancel", job_of(folder))
            wait(lambda: "RUNNING" in cluster.ask("squeue", "-h", "-o", "%T"), "the loop at work", folder, 60)
        stopped = bench.windlass("stop", name)
        assert stopped.returncode == 0, stopped.stderr
        assert loops(cluster) == []
        assert not events(folder, "retry")


def test_stop_ends_a_loop_whose_number_nobody_wrote_down(cluster, bench):
    """The process that submits it is killed when Slurm has the loop and the run folder does not know it yet."""
    real = shutil.which("sbatch", path=bench.environment["PATH"])
    wrapper = bench.folder / "commands" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--dependency=*) {real} "$@"; kill -9 $PPID ;; *) exec {real} "$@" ;; esac\n'
    )
    wrapper.chmod(0o755)
    bench.environment["PATH"] = f"{wrapper.parent}:{bench.environment['PATH']}"
    asked = ("name=cut", "--on", "slurm", "target.slurm.sbatch=[--hold]", "--detach")
    assert bench.windlass("run", bench.file, *asked).returncode == -9
    assert loops(cluster) == ["cut-loop"]
    stopped = bench.windlass("stop", "cut")
    assert stopped.returncode == 0, stopped.stderr
    assert loops(cluster) == []
