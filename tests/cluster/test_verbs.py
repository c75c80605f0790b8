"""The verbs on a run that is under way: exec, top, debug, sync, logs, checkpoints, another machine, stop."""

import json
import signal

import pytest

from tests.cluster.bench import EVERY, Bench, events
from windlass.checkpoint import CheckpointFolder
from windlass.common.files import read_json_lines
from windlass.runfolder import steps_of

pytestmark = pytest.mark.cluster

LEFTOVERS = "pods,jobs,services,configmaps,secrets,pytorchjobs,trainjobs,trainingruntimes,jobsets"


@pytest.fixture(scope="module")
def bench(cluster, tmp_path_factory):
    with cluster.namespace("verbs") as namespace:
        yield Bench(cluster, namespace, tmp_path_factory.mktemp("verbs"))


@pytest.fixture(scope="module")
def running(bench):
    """A run with code of its own that goes on for as long as the tests need it."""
    (bench.folder / "code").mkdir()
    (bench.folder / "code" / "mine.py").write_text("VALUE = 1\n")
    bench.submit("long", "train.steps=100000", "target.kubernetes.code=code", "target.kubernetes.job=job")
    bench.wait_until_running("long", step=EVERY)
    yield "long"
    bench.windlass("stop", "long", "--now")


def objects(bench, name):
    """Everything in the cluster that belongs to a run."""
    listing = bench.cluster.kubectl(
        "get", LEFTOVERS, "-n", bench.namespace, "-l", f"windlass.dev/run={name}", "-o", "name", "--ignore-not-found"
    )
    return listing.split()


def test_exec_runs_beside_any_rank(bench, running):
    pods = {pod["ranks"][0]: pod["name"] for pod in bench.show(running)["pods"]}
    for rank in (0, 2):
        asked = bench.must("exec", running, rank, "--", "sh", "-c", "echo $WINDLASS_POD")
        assert asked.strip() == pods[rank]
    assert bench.must("exec", running, "--", "cat", stdin="what goes in\n") == "what goes in\n"
    failing = bench.windlass("exec", running, "1", "--", "sh", "-c", "echo bad >&2; exit 7")
    assert (failing.returncode, failing.stderr) == (7, "bad\n")
    beyond = bench.windlass("exec", running, "9", "--", "true")
    assert beyond.returncode == 2
    assert "its ranks are 0 to 2" in beyond.stderr


def test_top_measures_every_pod(bench, running):
    seen = bench.json("top", running)
    assert seen["step"] >= EVERY
    assert len(seen["pods"]) == 3
    for pod in seen["pods"]:
        assert pod["memory"] > 50 * 2**20  # torch is in it
        assert pod["cpus"] >= 0
        assert pod["tokens_per_s"] == pytest.approx(seen["tokens_per_s"] / 3)
    assert "MEMORY" in bench.must("top", running)


def test_debug_measures_names_ports_and_bandwidth(bench, running):
    found = bench.json("debug", running)
    assert [one["ok"] for one in found] == [True] * 9
    assert sorted(one["check"] for one in found) == ["bandwidth"] * 3 + ["name"] * 3 + ["port"] * 3
    assert all(one["gbit_s"] > 0 for one in found if one["check"] == "bandwidth")


def test_the_same_request_attaches_and_another_is_an_error(bench, running):
    asked = ("run", bench.file, f"name={running}", "target.kubernetes.code=code", "target.kubernetes.job=job")
    before = objects(bench, running)
    same = bench.windlass(*asked, "train.steps=100000", "--detach", "--no-retry")
    assert same.returncode == 0, same.stderr
    assert "following it" in same.stderr
    other = bench.windlass(*asked, "train.steps=99999", "--detach", "--no-retry")
    assert other.returncode == 2
    assert "train.steps  100000 there, 99999 asked" in other.stderr
    assert f"windlass stop {running}" in other.stderr
    assert objects(bench, running) == before


def test_another_machine_finds_it(bench, running, tmp_path):
    """No run folder there: state, steps and run file come from the cluster."""
    elsewhere = Bench(bench.cluster, bench.namespace, tmp_path)
    view = json.loads(bench.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    view["contexts"][0]["context"]["namespace"] = bench.namespace
    (tmp_path / "kubeconfig").write_text(json.dumps(view))
    elsewhere.environment["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    listed = elsewhere.json("ls", "--on", "kubernetes")
    assert [(one["name"], one["state"]) for one in listed] == [(running, "running")]
    lost = elsewhere.windlass("show", "lnog", "--on", "kubernetes")
    assert lost.returncode == 2
    assert running in lost.stderr
    shown = elsewhere.json("show", running, "--on", f"kubernetes:{view['contexts'][0]['name']}")
    assert shown["state"] == "running"
    assert min(steps_of(elsewhere.run_folder(running))) == 1  # from the beginning, not from when it was asked


def test_followers_that_are_killed_lose_and_repeat_nothing(bench, running):
    folder = bench.run_folder(running)
    for _ in range(3):
        before = max(steps_of(folder), default=0)
        with bench.following("logs", running, "--follow") as follower:
            bench.wait_for_step(running, before + 3)
            follower.send_signal(signal.SIGKILL)
    bench.show(running)
    steps = [one["step"] for one in read_json_lines(folder.metrics) if one.get("kind") == "step"]
    assert steps == list(range(1, steps[-1] + 1))


def test_logs_of_one_rank_come_when_asked(bench, running):
    bench.must("exec", running, "1", "--", "sh", "-c", "echo '[rank 1] hello from the shell' > /proc/1/fd/1")
    bench.wait(lambda: "hello from the shell" in bench.windlass("logs", running, "--rank", "1").stdout, "the line")
    assert bench.must("logs", running, "--rank", "1").count("hello from the shell") == 1
    assert "[1] hello from the shell" in bench.must("logs", running)


def test_sync_brings_new_code_without_new_pods(bench, running):
    def value():
        found = bench.must("exec", running, "2", "--", "sh", "-c", "cat /windlass/scratch/*/mine.py /dev/null")
        return found.split()[-1] if found else ""

    pods = {pod["name"] for pod in bench.show(running)["pods"]}
    resumed = len(events(bench.run_folder(running), "resumed"))
    assert bench.json("sync", running)["changed"] is False
    (bench.folder / "code" / "mine.py").write_text("VALUE = 2\n")
    assert bench.json("sync", running)["changed"] is True
    bench.wait(
        lambda: bench.show(running) and len(events(bench.run_folder(running), "resumed")) > resumed,
        "ranks that start anew",
        running,
        600,
    )
    assert {pod["name"] for pod in bench.show(running)["pods"]} == pods
    assert "VALUE = 2" in bench.must("exec", running, "2", "--", "sh", "-c", "cat /windlass/scratch/*/mine.py")
    again = ("run", bench.file, f"name={running}", "target.kubernetes.code=code", "target.kubernetes.job=job")
    assert (
        bench.windlass(*again, "train.steps=100000", "--detach", "--no-retry").returncode == 0
    )  # it is this code's job now


def test_stop_saves_and_leaves_nothing_behind(bench, running):
    """The last of these tests: it ends the run, and brings its last checkpoint here."""
    rows = bench.json("ckpt", "ls", running)
    assert any(row["complete"] for row in rows)
    stopped = bench.json("stop", running)
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 75)
    bench.wait(lambda: objects(bench, running) == [], "an empty cluster")
    saved = events(bench.run_folder(running), "preempted")[-1]["step"]
    assert saved == stopped["step"]
    assert bench.show(running)["state"] == "stopped"
    bench.must("ckpt", "get", running, "--step", saved)  # from the claim: there are no pods any more
    checkpoint = CheckpointFolder(bench.run_folder(running).checkpoints).at(saved)
    assert checkpoint.complete
    assert list(checkpoint.damages()) == []
    assert objects(bench, running) == []
    readers = bench.cluster.get("pods", namespace=bench.namespace, selector="windlass.dev/reader")["items"]
    assert [pod for pod in readers if not pod["metadata"].get("deletionTimestamp")] == []


def test_two_jobs_at_once_and_those_that_do_not_fit(bench):
    bench.cluster.need_box("knows how large the nodes are")
    here, there = bench.cluster.expendable[:2]
    small = ("resources.nodes=1", "train.global_batch=2", "train.steps=6", "target.kubernetes.job=job")
    names = ("first", "second", "late", "huge")

    def on(node):
        return f'target.kubernetes.node_selector={{"kubernetes.io/hostname": "{node}"}}'

    bench.submit("first", *small, on(here), "target.kubernetes.cpu=1500m")
    bench.submit("second", *small, on(there))
    bench.submit("late", *small, on(here), "target.kubernetes.cpu=1500m")
    bench.submit("huge", *small, 'target.kubernetes.cpu="64"')
    try:
        bench.wait(lambda: "is the most one node has" in (bench.show("huge")["reason"] or ""), "a reason", "huge")
        shown = bench.show("huge")
        assert shown["state"] == "waiting"
        assert "Insufficient cpu" in shown["reason"]
        assert "cpu: 64 asked, 2 is the most one node has" in shown["reason"]
        assert [(pod["phase"], pod["reason"]) for pod in shown["pods"]] == [("Pending", "Unschedulable")]
        assert shown["pods"][0]["age"] > 0
        assert "Unschedulable" in bench.must("show", "huge")
        reason = bench.show("late")["reason"]
        assert "cpu: 1.5 asked, 2 allocatable" in reason
        assert "run first (1.5)" in reason
        assert "excluded by labels" in reason
        for name in ("first", "second"):
            bench.wait(lambda name=name: bench.show(name)["state"] == "finished", "the end", name, 900)
            assert bench.show(name)["summary"]["steps"] == 6
        bench.wait(lambda: bench.show("late")["pods"][0]["phase"] == "Running", "its turn", "late")
    finally:
        for name in names:
            bench.must("stop", name, "--now")
    assert {name: objects(bench, name) for name in names} == {name: [] for name in names}


def test_a_sweep_submits_so_many_at_a_time(bench):
    settings = ["name=rates", "train.learning_rate=1e-4,3e-4", "train.steps=3", "resources.nodes=1", "--at-most", "1"]
    rows = bench.json("sweep", bench.file, *settings)
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [
        ("rates-0", "finished", 3),
        ("rates-1", "finished", 3),
    ]
    first, second = (bench.run_folder(row["name"]) for row in rows)
    assert events(first, "finished")[-1]["time"] <= events(second, "submitted")[0]["time"]
    again = bench.windlass("sweep", bench.file, *settings, "--json")
    assert (again.returncode, "started" in again.stderr) == (0, False)  # all are finished
