"""`windlass run --detach` on the real Slurm: a failure is answered by a job of its own, with nobody there."""

import pytest

from tests.slurm.conftest import events, wait

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
    assert [one["edit"] for one in events(folder, "retry")] == [{"train.micro_batch": [2, 1]}]
    assert len(events(folder, "submitted")) == 2
    wait(lambda: bench.show("full")["state"] == "finished", "its end in Slurm", folder, 60)
    wait(lambda: not loops(cluster), "the loop of a job that ended well is dropped", folder, 60)


def test_stop_ends_the_loop_too(cluster, bench):
    held = ("name=ended", "--on", "slurm", "target.slurm.sbatch=[--hold]")
    answer = bench.windlass("run", bench.file, *held, "--detach")
    assert answer.returncode == 0, answer.stderr
    assert loops(cluster) == ["ended-loop"]
    assert bench.windlass("stop", "ended").returncode == 0
    wait(lambda: not loops(cluster), "no loop", bench.run_folder("ended"), 30)
    assert not events(bench.run_folder("ended"), "retry")
