"""A killed pod, a killed kubelet, a drained node in mid-training: the job goes on by itself, with the same losses."""

import contextlib

import pytest

from tests.cluster.bench import EVERY, HELD_STEP, STEPS, Bench, events, hold, local_losses, losses

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return local_losses(tmp_path_factory.mktemp("local"), ranks=3)


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
    "drained node": (drained_node, "job", 25, False),
}


@pytest.mark.parametrize("what", DISTURBANCES)
def test_it_goes_on_by_itself(bench, undisturbed, what, capsys):
    disturb, kind, seconds, repeats = DISTURBANCES[what]
    name = what.replace(" ", "-")
    arguments = ("run", bench.file, f"name={name}", f"target.kubernetes.job={kind}", *hold(seconds))
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
