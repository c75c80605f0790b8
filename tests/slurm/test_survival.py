"""Training on real nodes, disturbed in every way Slurm knows: it goes on by itself, bitwise as if nothing had been."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.campaign import campaign
from tests.slurm.conftest import EVERY, HELD_STEP, STEPS, Bench, events, hold, job_of, losses, wait
from windlass.targets.slurm import queue
from windlass.targets.slurm.commands import Commands

pytestmark = pytest.mark.slurm
NAME = """it's "my" run; $(date) `x` #1 100%j"""


def test_three_nodes_train_as_this_machine_does(bench, cluster, undisturbed, monkeypatch):
    """FSDP over three nodes; a job name and a run folder with everything that quoting can get wrong."""
    runs = bench.folder / 'it\'s 100% "my" runs'
    runs.mkdir()
    bench.environment["WINDLASS_RUNS"] = str(runs)
    name = NAME.replace("\\", "\\\\")
    bench.file.write_text(bench.file.read_text() + f"target: {{slurm: {{job_name: {name!r}}}}}\n".replace("\\'", "''"))
    answer = bench.run("name=three", "--on", "slurm", "--nodes", "3")
    assert (answer["returncode"], answer["state"], answer["step"]) == (0, "finished", STEPS), answer
    folder = bench.run_folder("three")
    assert losses(folder) == undisturbed(3)
    job = job_of(folder)
    assert cluster.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%j") == NAME
    assert (folder.logs / f"slurm-{job}.out").exists()
    assert (folder.logs / "rank-0002.log").exists()
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    wait(lambda: queue._from_accounting(Commands(), job) is not None, "accounting", folder, 30)
    assert queue._from_accounting(Commands(), job) == queue.QueuedJob("COMPLETED", exit_code=0)
    listed = bench.windlass("ls").stdout
    assert "three" in listed
    assert "slurm" in listed


def disturbed(bench, name, nodes, *arguments):
    folder = bench.submit(name, "--nodes", nodes, *hold(3), *arguments)
    bench.wait_for_step(folder, HELD_STEP - 1)
    return folder


def assert_went_on(bench, folder, undisturbed, nodes):
    end = bench.wait_for_end(folder.name)
    assert (end["state"], end["exit_code"], end["step"]) == ("finished", 0, STEPS), end
    resumed = events(folder, "resumed")
    assert resumed, "it was never resumed"
    assert all(item["step"] >= 1 for item in resumed)
    assert losses(folder) == undisturbed(nodes)
    assert end["summary"]["restarts"] >= 1


def test_requeue_then_scancel_then_run_again(bench, cluster, undisturbed):
    holds = f"sleep:rank=0,step={HELD_STEP - 3},seconds=3;sleep:rank=0,step={HELD_STEP},seconds=3"
    folder = bench.submit("requeued", "--nodes", 2, "--inject", holds)
    bench.wait_for_step(folder, HELD_STEP - 4)
    cluster.ask("scontrol", "requeue", job_of(folder))

    bench.wait_for_step(folder, HELD_STEP - 1)  # it went on by itself
    assert len(events(folder, "resumed")) == 1
    cluster.ask("scancel", job_of(folder))
    end = bench.wait_for_end("requeued")
    assert (end["state"], end["exit_code"], end["attempt"]) == ("stopped", 75, 2), end
    assert "cancelled in Slurm; saved at step" in end["reason"]
    saved = events(folder, "preempted")[-1]["step"]
    assert saved < STEPS

    again = bench.run("name=requeued", "--on", "slurm", "--nodes", 2)
    assert (again["returncode"], again["state"]) == (0, "finished"), again
    assert events(folder, "resumed")[-1]["step"] == saved
    assert losses(folder) == undisturbed(2)


def test_time_limit(bench, undisturbed):
    """Every step takes 2 s once, so that Slurm's signal, 40 s before the end of the minute, comes among them."""
    slow = ";".join(f"sleep:rank=0,step={step},seconds=2" for step in range(3, STEPS + 1))
    folder = bench.submit(
        "limited", "--nodes", 2, "target.slurm.time=1min", "checkpoint.grace_seconds=20", "--inject", slow
    )
    assert_went_on(bench, folder, undisturbed, 2)
    assert events(folder, "requeue")[0]["why"] == "the time limit is near"


def test_preemption(bench, cluster, undisturbed):
    folder = disturbed(bench, "spot", 2, "target.slurm.partition=spot", "target.slurm.exclusive=true")
    nodes = cluster.ask("squeue", "-h", "-j", job_of(folder), "-o", "%N")
    # somebody else's job, that goes before
    rival = ["sbatch", "--parsable", "--exclusive", "--nodes=2", f"--nodelist={nodes}", "--output=/dev/null"]
    rival_job = cluster.ask(*rival, "--wrap", "sleep 600")
    wait(lambda: events(folder, "preempted"), "saved and left", folder, 60)
    wait(lambda: bench.show("spot")["state"] == "waiting", "waiting in the queue", folder, 30)
    cluster.ask("scancel", rival_job)
    assert_went_on(bench, folder, undisturbed, 2)


def set_down(cluster, head, others):
    cluster.ask("scontrol", "update", f"nodename={others[0]}", "state=down", "reason=test")
    return others[0]


def kill_slurmd(cluster, head, others):
    cluster.kill(others[0], signal.SIGKILL)
    stall(cluster, others[0])  # without its slurmd a node trains on; so that it is missed in the middle of training
    return others[0]


def lose_head(cluster, head, others):
    """The first node is gone with everything on it: rendezvous and batch script too."""
    cluster.lose_node(head)
    return head


@pytest.mark.parametrize("disasters", campaign([((lose_head,),), ((set_down, kill_slurmd, lose_head),)], always=1))
def test_nodes_are_lost_one_after_another(bench, cluster, undisturbed, disasters):
    moments = (4, 7, 10)[-len(disasters) :]
    holds = ";".join(f"sleep:rank=0,step={moment},seconds=4" for moment in moments)
    folder = bench.submit("unlucky", "--nodes", 3, "--inject", holds)
    for attempt, (moment, disaster) in enumerate(zip(moments, disasters, strict=True), start=2):
        bench.wait_for_step(folder, moment - 1)
        launch = events(folder, "launched")[-1]
        nodes = cluster.ask("scontrol", "show", "hostnames", launch["nodes"]).split()
        lost = disaster(cluster, launch["head"], [node for node in nodes if node != launch["head"]])
        try:
            wait(lambda: len(events(folder, "launched")) == attempt, f"back after {disaster.__name__}", folder, 90)  # noqa: B023
        finally:
            if disaster is not set_down:
                cluster.start_slurmd(lost)
            cluster.revive(lost)
    assert_went_on(bench, folder, undisturbed, 3)
    launches = events(folder, "launched")
    assert [launched["attempt"] for launched in launches] == list(range(1, len(disasters) + 2))
    assert launches[-1]["head"] != lost
    assert {launched["job"] for launched in launches} == {job_of(folder)}


def test_a_killed_rank_is_restarted_on_the_same_nodes(bench, cluster, undisturbed):
    answer = bench.run("name=killed-rank", "--on", "slurm", "--nodes", 2, "--inject", "kill:rank=1,step=8")
    assert (answer["returncode"], answer["state"], answer["attempt"]) == (0, "finished", 2), answer
    folder = bench.run_folder("killed-rank")
    assert losses(folder) == undisturbed(2)
    died = next(record for record in events(folder, "rank-died") if record["first"])
    assert (died["rank"], died["signal"]) == (1, "SIGKILL")
    assert "Restarts=0" in cluster.ask("scontrol", "show", "job", "-o", job_of(folder))


def test_neither_a_blip_nor_a_refused_stop_nor_another_jobs_variables_end_a_run(bench, cluster, undisturbed):
    """Submitted from inside a requeued job, with an empty environment; followed while the controller is frozen."""
    bench.environment |= {"SLURM_RESTART_COUNT": "3", "SLURM_NTASKS": "7", "SLURM_CPU_BIND": "map_cpu:99"}
    holds = f"sleep:rank=0,step={HELD_STEP},seconds=12;kill:rank=1,step={HELD_STEP + 1};sleep:rank=0,step=11,seconds=3"
    setup = f"target.slurm.setup=[export PYTHONPATH={bench.environment['PYTHONPATH']}]"
    command = ["run", bench.file, "name=steady", "--on", "slurm", "--nodes", "2", "--inject", holds, setup, "--json"]
    follower = subprocess.Popen(
        [sys.executable, "-m", "windlass.cli.main", *map(str, command), "target.slurm.sbatch=[--export=NONE]"],
        cwd=bench.folder, env=bench.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder = bench.run_folder("steady")
    bench.wait_for_step(folder, HELD_STEP - 1)

    refusing = bench.folder / "bin"
    refusing.mkdir()
    (refusing / "scancel").write_text("#!/bin/sh\necho 'scancel: error: Access/permission denied' >&2; exit 1\n")
    (refusing / "scancel").chmod(0o755)
    here = Bench(bench.folder, bench.environment | {"PATH": f"{refusing}:{bench.environment['PATH']}"})
    stopped = here.windlass("stop", "steady")
    assert (stopped.returncode, "could not be stopped" in stopped.stderr) == (1, True), stopped

    with cluster.frozen_controller():
        shown = bench.show("steady")
        assert (shown["state"], "this is what the run itself wrote down" in shown["reason"]) == ("running", True), shown
    # rank 1 dies, and is restarted although somebody had asked for the end
    bench.wait_for_step(folder, 10)
    cluster.ask("scontrol", "requeue", job_of(folder))
    wait(lambda: bench.show("steady")["state"] == "waiting", "back in the queue", folder, 30)
    out, err = follower.communicate(timeout=180)
    assert follower.returncode == 0, (out, err)
    assert [record["attempt"] for record in events(folder, "launched")] == [1, 2, 3]
    assert not [record for record in events(folder, "exit") if record["state"] != "finished"]
    assert losses(folder) == undisturbed(2)


def test_a_container_that_does_not_start_near_the_end(bench, cluster):
    """Pyxis is not here: its options are taken out before srun sees them, and `end` is refused once."""
    site = bench.folder / "pyxis"
    site.mkdir()
    (site / "srun").write_text(
        "#!/bin/bash\n"
        f'case " $* " in *" end "*) if rm {site}/refuse 2>/dev/null; then\n'
        '    echo "srun: error: Unable to create step: Job/step already completing" >&2; exit 1; fi ;; esac\n'
        'words=(); for word in "$@"; do case $word in --container-*) ;; *) words+=("$word") ;; esac; done\n'
        f'exec {cluster.ask("which", "srun")} "${{words[@]}}"\n'
    )
    (site / "srun").chmod(0o755)
    inside = [f"target.slurm.setup=[export PATH={site}:$PATH]", f"target.slurm.environment={sys.prefix}"]
    folder = disturbed(bench, "boxed", 1, "target.slurm.container=/image.sqsh", *inside)
    (site / "refuse").touch()
    cluster.ask("scancel", "--signal=TERM", job_of(folder))
    end = bench.wait_for_end("boxed")
    assert (end["state"], end["exit_code"], end["step"], end["attempt"]) == ("finished", 0, STEPS, 2), end
    assert events(folder, "resumed")[-1]["step"] == events(folder, "preempted")[-1]["step"]
    assert not (site / "refuse").exists()


def test_an_error_that_would_come_again_is_not_tried_again(bench, cluster):
    answer = bench.run("name=nan", "--on", "slurm", "--inject", "nan:rank=0,step=4")
    assert (answer["returncode"], answer["state"], answer["attempt"]) == (1, "failed", 1), answer
    assert "loss nan" in answer["error"]["error"]
    folder = bench.run_folder("nan")
    wait(lambda: "ExitCode=1:0" in cluster.ask("scontrol", "show", "job", "-o", job_of(folder)), "its code", folder, 20)


def test_a_full_disk_is_a_clear_end_and_the_old_checkpoints_stay(bench, cluster):
    """The disk is full in the middle of training: no save fits any more, and nothing can be written down either."""
    bench.environment["WINDLASS_RUNS"] = str(cluster.small_disk)
    try:
        folder = bench.submit("full", *hold(8), f"checkpoint.keep={1}", "train.steps=10")
        bench.wait_for_step(folder, HELD_STEP - 1)
        ballast = cluster.small_disk / "ballast"
        fill(ballast)
        wait(lambda: bench.show("full")["state"] not in ("running", "waiting"), "its end", folder, 120)
        end = bench.show("full")
        assert (end["state"], end["exit_code"]) == ("failed", 1), end
        assert "full" in end["reason"] or "No space" in end["reason"], end
        ballast.unlink()
        verified = bench.windlass("ckpt", "verify", "full")
        assert verified.returncode == 0, verified
        assert f"{2 * EVERY}  whole" in verified.stdout
        again = bench.run("name=full", "--on", "slurm", "train.steps=10", "checkpoint.keep=1")
        assert (again["returncode"], again["state"]) == (0, "finished"), again
        assert events(folder, "resumed")[-1]["step"] == 2 * EVERY
    finally:
        subprocess.run(["find", str(cluster.small_disk), "-mindepth", "1", "-delete"], check=False)


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(path).free == 0


def nodes_of(folder):
    return [record["nodes"] for record in events(folder, "launched")]


def stall(cluster, node):
    """Stop the ranks of a node until the controller has noticed that its slurmd is gone."""
    pids = [pid for pid in cluster.processes(node) if b"windlass.trainer" in command_line(pid)]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    cluster.wait(lambda: cluster.node_state(node).startswith("down"), f"{node} is missed", 60)
    time.sleep(0.1)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
