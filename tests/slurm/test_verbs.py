"""The verbs on a real Slurm: jobs that never start, bad input, attaching, sweeps, stop, and all of it over SSH."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests.slurm.conftest import events, hold, job_of, losses, wait

pytestmark = pytest.mark.slurm

NEVER_STARTS = {
    "held": (["target.slurm.sbatch=[--hold]"], "it is held (JobHeldUser)", "scontrol release"),
    # Slurm says PartitionNodeLimit or only PartitionConfig, by which of its schedulers comes first
    "too many nodes": (["resources.nodes=9", "train.global_batch=9"], "more nodes", "(PartitionNodeLimit"),
    "more nodes than the partition has": (
        ["target.slurm.partition=pair", "resources.nodes=3"],
        "more nodes than its partition gives one job",
        "(PartitionNodeLimit",
    ),
    "too much time": (
        ["target.slurm.partition=pair", "target.slurm.time=3d"],
        "more time than its partition gives (PartitionTimeLimit",
        "target.slurm.time",
    ),
    "an account without permission": (["target.slurm.partition=closed"], "its account may not use", "astronomy"),
}


@pytest.mark.parametrize("case", NEVER_STARTS)
def test_a_job_that_can_never_start_says_why(bench, case):
    overrides, *words = NEVER_STARTS[case]
    folder = bench.submit("never", *overrides)
    try:
        wait(lambda: "cannot start" in (bench.show("never")["reason"] or ""), "a reason", folder, 90)
        shown = bench.show("never")
        assert shown["state"] == "waiting"
        for word in words:
            assert word in shown["reason"]
        assert "cannot start" in bench.windlass("ls").stdout
    finally:
        stopped = bench.windlass("stop", "never", "--json")
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert bench.show("never")["state"] == "stopped"


BAD_INPUTS = {
    "unknown partition": (["target.slurm.partition=debgu"], "no partition 'debgu'", "target.slurm.partition=debug"),
    "unknown feature": (["target.slurm.constraint=h100"], "did not take the job", "Invalid feature"),
    "more GPUs than nodes have": (
        ["resources.gpus_per_node=8", "train.global_batch=8"],
        "did not take the job",
        "not available",
    ),
    "an option sbatch does not know": (["target.slurm.sbatch=[--frobnicate]"], "did not take the job", "frobnicate"),
    "no time to train": (["target.slurm.time=1min", "checkpoint.grace_seconds=60"], "leaves no time", "grace_seconds"),
    "no such login node": (
        ["target.host=no-such-host.invalid", "target.slurm.environment=/env"],
        "cannot be reached over SSH",
        "no-such-host",
    ),
    "no disk": (
        ["checkpoint.keep=2000", "checkpoint.every=1", "train.steps=900000"],
        "48.0 MiB are free",
        "checkpoint.keep",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_error_and_leaves_nothing(bench, cluster, case):
    overrides, *words = BAD_INPUTS[case]
    if case == "no disk":
        bench.environment["WINDLASS_RUNS"] = str(cluster.small_disk / "runs")
    before = sorted(bench.folder.rglob("*")), cluster.ask("squeue", "-h", "-o", "%i")
    answer = bench.windlass("run", bench.file, "name=bad", "--on", "slurm", *overrides)
    assert answer.returncode == 2, answer
    assert answer.stderr.count("error: ") == 1, answer.stderr
    for word in words:
        assert word in answer.stderr
    assert (sorted(bench.folder.rglob("*")), cluster.ask("squeue", "-h", "-o", "%i")) == before
    assert not (cluster.small_disk / "runs").exists()


def test_no_sbatch_on_path(bench, tmp_path):
    (tmp_path / "bin").mkdir()
    bench.environment["PATH"] = str(tmp_path / "bin")
    answer = bench.windlass("run", bench.file, "--on", "slurm")
    assert answer.returncode == 2
    assert "there is no s" in answer.stderr
    assert "target.host=LOGIN_NODE" in answer.stderr
    assert not (tmp_path / "runs").exists()


def test_the_controller_is_down(bench, cluster):
    """A configuration that names a port where nobody listens: an error, not minutes of silence."""
    other = bench.folder / "slurm.conf"
    text = cluster.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1") + "MessageTimeout=2\n"
    other.write_text(text)
    bench.environment["SLURM_CONF"] = str(other)
    answer = bench.windlass("run", bench.file, "name=other", "--on", "slurm", timeout=120)
    assert answer.returncode == 2, answer
    assert "Slurm does not answer" in answer.stderr
    assert not (bench.folder / "runs" / "other").exists()


def test_the_same_run_again_attaches(bench, cluster):
    held = ["target.slurm.sbatch=[--hold]"]
    folder = bench.submit("twice", *held)
    first = job_of(folder)
    answer = bench.windlass("run", bench.file, "name=twice", "--on", "slurm", "--detach", "--no-retry", *held)
    assert answer.returncode == 0, answer
    assert "under way" in answer.stderr
    assert job_of(folder) == first
    other = bench.windlass("run", bench.file, "name=twice", "--on", "slurm", "train.learning_rate=1", *held)
    assert other.returncode == 2
    assert "is under way with other settings" in other.stderr
    here = bench.windlass("run", bench.file, "name=twice")
    assert here.returncode == 2
    assert "under way on the target slurm" in here.stderr
    fresh = bench.windlass("run", bench.file, "name=twice", "--on", "slurm", "--fresh", "--yes", *held)
    assert fresh.returncode == 2
    assert "already running" in fresh.stderr
    assert bench.windlass("stop", "twice").returncode == 0
    wait(lambda: cluster.ask("squeue", "-h", "-j", first, "-t", "all", "-o", "%T") == "CANCELLED", "gone", folder, 20)


def test_a_dry_run_prints_what_is_sent(bench):
    answer = bench.windlass("run", bench.file, "name=dry", "--on", "slurm", "target.slurm.sbatch=[--hold]", "--dry-run")
    assert answer.returncode == 0, answer
    assert not (bench.folder / "runs").exists()
    folder = bench.submit("dry", "target.slurm.sbatch=[--hold]")
    sent = (folder.path / "job.sbatch").read_text()
    assert sent in answer.stdout
    assert bench.windlass("stop", "dry").returncode == 0


def test_gpus_are_found_in_the_cluster(bench):
    request = ["run", bench.file, "resources.gpus_per_node=null", "resources.threads_per_process=null"]
    answer = bench.windlass(*request, "--on", "slurm", "--dry-run", "--json")
    resources = json.loads(answer.stdout)["run"]["resources"]
    assert (resources["gpus_per_node"], resources["processes_per_node"], resources["threads_per_process"]) == (2, 2, 4)
    assert "--gpus-per-node=2" in json.loads(answer.stdout)["request"]["script"]


def test_a_sweep_is_one_array_with_a_folder_per_run(bench, cluster):
    sweep = ["--sweep", "train.learning_rate=1e-4,3e-4", "train.steps=4"]
    answer = bench.windlass("run", bench.file, "name=lr", "--on", "slurm", *sweep, "--json")
    assert answer.returncode == 0, answer
    assert [row["name"] for row in json.loads(answer.stdout)] == ["lr-0", "lr-1"]
    folders = [bench.run_folder(name) for name in ("lr-0", "lr-1")]
    jobs = [job_of(folder) for folder in folders]
    assert [job.split("_")[1] for job in jobs] == ["0", "1"]
    assert len({job.split("_")[0] for job in jobs}) == 1
    for folder in folders:
        end = bench.wait_for_end(folder.name)
        assert (end["state"], end["step"]) == ("finished", 4), end
        assert (folder.logs / f"slurm-{job_of(folder)}.out").exists()
    rates = [folder.load_run().train.learning_rate for folder in folders]
    assert rates == [1e-4, 3e-4]
    assert losses(folders[0]) != losses(folders[1])
    again = bench.windlass("run", bench.file, "name=lr", "--on", "slurm", *sweep, "--json")
    assert [row["submitted"] for row in json.loads(again.stdout)] == [False, False]


def test_a_sweep_with_a_bound_submits_one_after_the_other(bench):
    settings = ["name=bound", "train.learning_rate=1e-4,3e-4", "train.steps=4", "--on", "slurm", "--at-most", "1"]
    answer = bench.windlass("sweep", bench.file, *settings, "--json", timeout=600)
    assert answer.returncode == 0, answer
    rows = json.loads(answer.stdout)
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [
        ("bound-0", "finished", 4),
        ("bound-1", "finished", 4),
    ]
    assert rows[0]["loss"] != rows[1]["loss"]
    first, second = (bench.run_folder(row["name"]) for row in rows)
    assert events(first, "finished")[-1]["time"] <= events(second, "submitted")[0]["time"]
    again = bench.windlass("sweep", bench.file, *settings, "--json")
    assert (again.returncode, "started" in again.stderr) == (0, False)  # all are finished


def test_a_sweep_over_resources_asks_for_each_runs_own(bench, cluster):
    """And what variables say to sbatch changes nothing."""
    bench.environment |= {"SBATCH_PARTITION": "pair", "SBATCH_TIMELIMIT": "7", "SBATCH_SIGNAL": "INT@9"}
    bench.environment |= {"SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "5-9", "SQUEUE_PARTITION": "spot"}
    sweep = ["--sweep", "resources.nodes=1,2,1", "--sweep", "checkpoint.grace_seconds=15,40"]
    options = ["target.slurm.sbatch=[--hold, '--comment=\"for the lab\"']", "target.slurm.time=4h"]
    answer = bench.windlass("run", bench.file, "name=sizes", "--on", "slurm", *options, *sweep)
    assert answer.returncode == 0, answer
    assert "SBATCH_PARTITION, SBATCH_SIGNAL, SBATCH_TIMELIMIT: set here, and not used" in answer.stderr
    fields = "ArrayTaskId", "Partition", "TimeLimit", "NumNodes", "Requeue", "Comment"
    jobs = [job_of(bench.run_folder(f"sizes-{index}")) for index in range(6)]
    try:
        assert len({job.split("_")[0] for job in jobs}) == 4, jobs  # one array for each pair of values
        for index, job in enumerate(jobs):
            shown = cluster.ask("scontrol", "show", "job", "-o", job)
            said = dict(word.partition("=")[::2] for word in shown.split() if word.partition("=")[0] in fields)
            assert said["Partition"] == "debug", shown
            assert (said["TimeLimit"], said["Requeue"]) == ("04:00:00", "1"), shown
            assert said["NumNodes"].split("-")[0] == ("1", "1", "2", "2", "1", "1")[index], shown
            assert "Comment=for the lab windlass:" in shown
            lead = (bench.run_folder(f"sizes-{index}").path / "job.sbatch").read_text()
            assert f"--signal=B:USR1@{(30, 70)[index % 2]}" in lead
        again = ["run", bench.file, "name=sizes", "--on", "slurm", *options, *sweep]
        for change, way in ("data.sequence_length=16", "name=OTHER"), ("train.grad_clip=3", "windlass stop sizes-0"):
            other = bench.windlass(*again, change)
            assert (other.returncode, "--fresh" in other.stderr) == (2, False), other
            assert way in other.stderr
            assert "begins another sweep" in other.stderr
    finally:
        cluster.ask("scancel", "--name=sizes")


@pytest.fixture
def login_node(cluster, tmp_path):
    """A real sshd on this machine with a key and a configuration that are thrown away."""
    home = tmp_path / "ssh"
    home.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    shutil.copy(home / "user.pub", home / "authorized_keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {home}/host\nAuthorizedKeysFile {home}/authorized_keys\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv SLURM_CONF={cluster.conf} SBATCH_PARTITION=pair SQUEUE_STATES=SUSPENDED PYTHONPATH={os.getcwd()}\n"
        # a shell that greets, as many login nodes have it; the second greeting does not end its line
        """ForceCommand echo "Welcome! 12 users"; printf "news: "; eval "$SSH_ORIGINAL_COMMAND"; echo bye 7\n"""
    )
    (home / "config").write_text(
        f"Host login\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {home}/user\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {home}/known_hosts\n  StrictHostKeyChecking accept-new\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", f"{home}/sshd_config"], stderr=log)
    deadline = time.monotonic() + 60
    while subprocess.run(["ssh", "-F", f"{home}/config", "login", "true"], check=False, capture_output=True).returncode:
        assert time.monotonic() < deadline, (home / "log").read_text()
        time.sleep(0.1)
    yield f"ssh -F {home}/config"
    daemon.terminate()
    daemon.wait(timeout=20)


def test_everything_over_ssh(bench, cluster, login_node):
    """Here neither Slurm's configuration nor its commands are known: the login node has them."""
    bench.environment["WINDLASS_SSH"] = login_node
    del bench.environment["SLURM_CONF"]
    there = ["target.host=login", f"target.slurm.environment={sys.prefix}"]
    wrong = bench.windlass("run", bench.file, "name=wrong", "--on", "slurm", *there, "target.slurm.partition=nosuch")
    assert wrong.returncode == 2, wrong
    assert "no partition 'nosuch'" in wrong.stderr
    folder = bench.submit("far", *there, *hold(3), "train.steps=5000")
    bench.wait_for_step(folder, 2)
    assert bench.show("far")["state"] == "running"
    assert "running" in bench.windlass("ls").stdout
    stopped = bench.windlass("stop", "far", "--json")
    result = json.loads(stopped.stdout)
    assert (stopped.returncode, result["was"], result["state"], result["exit_code"]) == (0, "running", "stopped", 75)
    assert events(folder, "preempted")
    assert "step" in bench.windlass("logs", "far", "--rank", "0").stdout
    job = job_of(folder)
    assert cluster.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%P") == "debug"
    wait(lambda: cluster.ask("sacct", "-nPX", "-j", job, "-o", "State,ExitCode") == "FAILED|75:0", "code", folder, 30)
