"""One run folder, one job, on a real Slurm: whatever happens around sbatch, and whoever else submits."""

import json
import signal
import subprocess
import sys

import pytest

from tests.slurm.conftest import events, job_of, wait
from windlass.targets.slurm.state import SubmittedJob

pytestmark = pytest.mark.slurm
HELD = "target.slurm.sbatch=[--hold]"


@pytest.fixture
def site(bench, cluster):
    """Puts a site's own command before Slurm's on PATH; `real` in its text is the command it stands before."""
    folder = bench.folder / "site-bin"
    folder.mkdir()

    def install(command, text):
        real = cluster.ask("which", command)
        path = folder / command
        # only where a job is sent: windlass also asks for the version
        text = f'case " $* " in *" --parsable "*) ;; *) exec @real "$@" ;; esac\n{text}'
        path.write_text("#!/bin/bash\n" + text.replace("@real", real).replace("@controller", str(controller(cluster))))
        path.chmod(0o755)
        bench.environment["PATH"] = f"{folder}:{cluster.environment()['PATH']}"

    def remove():
        bench.environment["PATH"] = cluster.environment()["PATH"]

    install.remove = remove
    yield install
    remove()


def controller(cluster):
    return cluster.daemons["slurmctld"].pid


def jobs_named(cluster, name):
    """Jobs of a name in the queue, those that wait and those that run; elements of an array one by one."""
    text = cluster.ask("squeue", "-h", "-r", "-t", "PD,R,CF,S", "-o", "%i|%j")
    return sorted(line.split("|")[0] for line in text.splitlines() if line.split("|")[1] == name)


def submit(bench, name, *arguments, timeout=300):
    return bench.windlass(
        "run", bench.file, f"name={name}", "--on", "slurm", "--detach", "--no-retry", HELD, *arguments, timeout=timeout
    )


def assert_one_job(bench, cluster, name):
    """Running it again attaches to the one job there is, and stop takes exactly that one back."""
    again = submit(bench, name)
    assert again.returncode == 0, again
    jobs = jobs_named(cluster, name)
    assert jobs == [job_of(bench.run_folder(name))], (jobs, again)
    assert bench.show(name)["state"] == "waiting"
    stopped = bench.windlass("stop", name)
    assert stopped.returncode == 0, stopped
    assert jobs_named(cluster, name) == []


def test_a_controller_that_is_frozen_around_sbatch(bench, cluster, site):
    """sbatch gives up after MessageTimeout, and the controller takes the job when it goes on."""
    site("sbatch", 'kill -STOP @controller\n(sleep 8; kill -CONT @controller) >/dev/null 2>&1 &\nexec @real "$@"\n')
    first = submit(bench, "frozen")
    print(first.returncode, first.stderr)
    site.remove()
    wait(lambda: jobs_named(cluster, "frozen"), "the controller takes it", bench.run_folder("frozen"), 30)
    assert_one_job(bench, cluster, "frozen")


def test_the_terminal_goes_away_just_after_sbatch_was_accepted(bench, cluster, site):
    site("sbatch", '@real "$@" >/dev/null\nkill -HUP $PPID\nsleep 1\n')
    assert submit(bench, "hung-up").returncode == -signal.SIGHUP
    site.remove()
    assert len(jobs_named(cluster, "hung-up")) == 1
    assert bench.show("hung-up")["state"] == "waiting"
    assert_one_job(bench, cluster, "hung-up")


@pytest.mark.parametrize("words", ['echo; echo "Thank you for computing with us: 3"; echo 17', "exec >/dev/null"])
def test_a_site_that_prints_lines_of_its_own(bench, cluster, site, words):
    before = 'out=$(@real "$@") || exit\n'
    text = f"{before}{words}\n" if words.startswith("exec") else f'{before}echo "$out"\n{words}\n'
    site("sbatch", text)
    first = submit(bench, "chatty")
    assert first.returncode == 0, first
    site.remove()
    assert_one_job(bench, cluster, "chatty")


def test_a_damaged_record_of_the_job(bench, cluster):
    folder = bench.submit("damaged", HELD)
    record = folder.path / "slurm.json"
    sent = job_of(folder)
    for content in ("", '{"job": "--user=root", "host": null}', None):
        if content is None:
            record.unlink()
            record.mkdir()
        else:
            record.write_text(content)
        listed = json.loads(bench.windlass("ls", "--json").stdout)
        assert [(item["state"], "JobHeldUser" in item["reason"]) for item in listed] == [("waiting", True)], listed
    again = submit(bench, "damaged")
    assert again.returncode == 0, again
    assert jobs_named(cluster, "damaged") == [sent]
    # and a disk that takes nothing any more does not keep it from being stopped
    stop = f"ulimit -f 0; exec {sys.executable} -m windlass.cli.main stop damaged"
    stopped = subprocess.run(["bash", "-c", stop], cwd=bench.folder, env=bench.environment, capture_output=True)
    assert stopped.returncode == 0, stopped
    assert jobs_named(cluster, "damaged") == []


def test_two_sweeps_at_once_are_one_array(bench, cluster, site):
    """sbatch takes its time, so that the second sweep has looked at its runs before the first has submitted them."""
    site("sbatch", 'sleep 3\nexec @real "$@"\n')
    command = [sys.executable, "-m", "windlass.cli.main", "run", str(bench.file), "name=both", "--on", "slurm", HELD]
    command += ["--sweep", "train.learning_rate=1e-4,3e-4", "--json"]
    both = [
        subprocess.Popen(command, cwd=bench.folder, env=bench.environment, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    said = [item.communicate(timeout=300) for item in both]
    jobs = jobs_named(cluster, "both")
    cluster.ask("scancel", "--name=both")
    assert [item.returncode for item in both] == [0, 0], said
    assert jobs == [job_of(bench.run_folder("both-0")), job_of(bench.run_folder("both-1"))], (jobs, said)
    submitted = [[row["submitted"] for row in json.loads(out)] for out, _ in said]
    assert sorted(submitted) == [[False, False], [True, True]], submitted


def test_no_attempt_begins_that_is_not_the_recorded_job(bench, cluster, site):
    """Ctrl-C twice before a job's number came; of two accepted jobs the recorded one trains, and the other leaves."""
    sent = bench.folder / "sent"
    site("sbatch", f'cat >{sent}\nprintf "%s\\n" "$@" >{sent}.options\nkill -INT $PPID\nsleep 1\n')
    assert submit(bench, "alone").returncode == 130
    shown = bench.show("alone")
    assert (shown["state"], "did not take the job" in shown["reason"]) == ("waiting", True), shown
    site("sbatch", '@real "$@" >/dev/null\nkill -INT $PPID\nsleep 1\n')
    assert submit(bench, "alone").returncode == 130
    site.remove()
    folder = bench.run_folder("alone")
    (recorded,) = jobs_named(cluster, "alone")
    with sent.open() as script:  # the first request arrives after all
        options = (bench.folder / "sent.options").read_text().splitlines()
        answer = subprocess.run(
            ["sbatch", *options], stdin=script, env=cluster.environment(), capture_output=True, text=True, check=True
        )
    late = answer.stdout.strip()
    cluster.ask("scontrol", "release", late)
    wait(lambda: "ExitCode=2:0" in cluster.ask("scontrol", "show", "job", "-o", late), "it leaves", folder, 60)
    assert not events(folder, "launched")
    assert "not the job of this run" in (folder.logs / f"slurm-{late}.out").read_text()
    cluster.ask("scontrol", "release", recorded)
    wait(lambda: events(folder, "launched"), "the recorded job begins", folder, 60)
    assert job_of(folder) == recorded
    assert [record["job"] for record in events(folder, "launched")] == [recorded]
    stopped = bench.windlass("stop", "alone", "--now")
    assert stopped.returncode == 0, stopped


def test_a_submission_that_never_arrived_is_taken_back(bench, cluster, site):
    site("sbatch", "kill -9 $PPID\n")
    assert submit(bench, "nobody").returncode == -signal.SIGKILL
    site.remove()
    stopped = bench.windlass("stop", "nobody", "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)["state"]) == (0, "stopped"), stopped
    assert jobs_named(cluster, "nobody") == []
    assert SubmittedJob.of(bench.run_folder("nobody")) is None
