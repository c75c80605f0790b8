"""A killed pod or kubelet, a node without power, a drained node: the job goes on by itself, with the same losses."""

import contextlib

import pytest

from tests.cluster.bench import EVERY, HELD_STEP, STEPS, Bench, events, hold, losses

pytestmark = pytest.mark.cluster


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    return Bench(cluster, namespace, tmp_path)


def pods_of(bench, name):
    return bench.cluster.get("pods", namespace=bench.namespace, selector=f"windlass.dev/run={name}")["items"]


def pod_on_expendable_node(bench, name):
    """A pod that is not node 0's, on a node that may be hurt."""
    mine = [pod for pod in pods_of(bench, name) if pod["spec"].get("nodeName") in bench.cluster.expendable]
    assert mine, "no pod of the run is on an expendable node"
    return mine[-1]["metadata"]["name"], mine[-1]["spec"]["nodeName"]


@contextlib.contextmanager
def killed_pod(bench, name):
    pod, _ = pod_on_expendable_node(bench, name)
    bench.cluster.kubectl("delete", "pod", pod, "-n", bench.namespace, "--grace-period=0", "--force", "--wait=false")
    yield


@contextlib.contextmanager
def killed_kubelet(bench, name):
    bench.cluster.need_box("kills a kubelet")
    _, node = pod_on_expendable_node(bench, name)
    bench.cluster.kill_kubelet(node)
    try:
        yield
    finally:
        bench.cluster.restart_node(node)


@contextlib.contextmanager
def lost_power(bench, name):
    """With the time that Kubernetes takes everywhere to notice. The node's object stays, as nobody deletes it."""
    bench.cluster.need_box("cuts a node's power")
    with bench.cluster.usual_timeouts():
        _, node = pod_on_expendable_node(bench, name)
        bench.cluster.cut_power(node)
        try:
            yield
        finally:
            bench.cluster.restart_node(node)


@contextlib.contextmanager
def drained_node(bench, name):
    _, node = pod_on_expendable_node(bench, name)
    bench.cluster.drain(node)
    try:
        yield
    finally:
        bench.cluster.uncordon(node)


# What happens, the kind of job, how long rank 0 waits for it, and whether steps are repeated. A drain lets the ranks
# save first, once rank 0 goes on; the others end the attempt at once, and cost what is newer than the last checkpoint.
DISTURBANCES = {
    "killed pod": (killed_pod, "pytorchjob", 60, True),
    "killed kubelet": (killed_kubelet, "trainjob", 90, True),
    "lost power": (lost_power, "pytorchjob", 150, True),
    "drained node": (drained_node, "job", 25, False),
}


# As late as everywhere a lost node is noticed after minutes: a campaign. test_retry.py loses one that is noticed soon.
LONG = ("lost power",)
CAMPAIGN = (pytest.mark.campaign, pytest.mark.campaign_only)


@pytest.mark.parametrize("what", [pytest.param(what, marks=CAMPAIGN if what in LONG else ()) for what in DISTURBANCES])
def test_it_goes_on_by_itself(bench, undisturbed, what, capsys):
    disturb, kind, seconds, repeats = DISTURBANCES[what]
    name = what.replace(" ", "-")
    options = (f"target.kubernetes.job={kind}", "target.kubernetes.node_lost_seconds=4")
    if kind != "pytorchjob" and disturb is not killed_pod:
        options += ("target.kubernetes.max_pod_failures=0",)  # who had to leave does not count
    arguments = ("run", bench.file, f"name={name}", *options, *hold(seconds))
    with bench.following(*arguments) as follower:
        bench.wait_for_step(name, HELD_STEP - 1)
        with disturb(bench, name):
            assert follower.wait(timeout=900) == 0, bench.said() + bench.evidence(name)
    folder = bench.run_folder(name)
    assert losses(folder) == undisturbed, "the curve is not the undisturbed one"
    assert events(folder, "resumed"), bench.said()
    shown = bench.show(name)
    summary = shown["summary"]
    assert (shown["state"], summary["steps"]) == ("finished", STEPS)
    assert summary["restarts"] >= 1
    assert (summary["steps_repeated"] > 0) == repeats
    assert summary["steps_repeated"] <= EVERY * summary["restarts"]
    said = bench.said()
    assert "steps repeated" in said
    assert "time lost" in said
    with capsys.disabled():
        print(f"\n{what} ({kind}): {summary['seconds_lost']:.0f} s lost, {summary['steps_repeated']} steps repeated")


@pytest.mark.parametrize("kind", ["job"])
def test_a_run_of_one_pod_outlives_every_loss(bench, kind):
    """Drained and deleted: the run is never called ended, no loss counts, and the wait before a new pod stays short."""
    name = "single"
    options = (
        "resources.nodes=1",
        "train.global_batch=2",
        "train.steps=100000",
        "target.kubernetes.max_pod_failures=0",
    )
    folder = bench.run_folder(name)
    with bench.following("run", bench.file, f"name={name}", f"target.kubernetes.job={kind}", *options) as follower:
        bench.wait_for_step(name, EVERY)
        waits = []
        for number, lose in enumerate((evict, delete), start=1):
            (pod,) = pods_of(bench, name)
            lose(bench, pod)
            shown = bench.show(name)
            assert (shown["state"] in ("waiting", "running"), shown["exit_code"]) == (True, None), shown
            bench.wait(lambda: len(events(folder, "resumed")) >= number, "a new pod", name)  # noqa: B023
            assert follower.poll() is None, bench.said()
            left, begun = events(folder, "preempted")[-1]["time"], events(folder, "launched")[-1]["time"]
            waits.append(begun - left)
            bench.wait_for_step(name, events(folder, "resumed")[-1]["step"] + EVERY)
        job = bench.cluster.get("job", name, bench.namespace)
        assert job["spec"]["backoffLimit"] == 0
        assert job["status"].get("failed", 0) == 0
        assert bench.show(name)["summary"]["restarts"] == 2
        stopped = bench.json("stop", name)
        assert (stopped["was"], stopped["state"], stopped["exit_code"]) == ("running", "stopped", 75)
        assert follower.wait(timeout=120) == 75, bench.said()
    assert "told to leave; saved first; its job makes a new pod" in bench.said()
    assert waits[1] < waits[0] + 8, waits  # 10 s both times; Kubernetes alone would make it 20


def evict(bench, pod):
    """As a drain does it, of this pod alone."""
    node, name = pod["spec"]["nodeName"], pod["metadata"]["labels"]["windlass.dev/run"]
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--pod-selector=windlass.dev/run={name}")
    bench.cluster.kubectl("drain", node, *flags, timeout=300)
    bench.cluster.uncordon(node)


def delete(bench, pod):
    bench.cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", bench.namespace, timeout=300)
