"""What objects of a cluster mean: pods, jobs, nodes, amounts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.common.files import append_json_line
from windlass.common.quantities import parse_quantity, show_quantity
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.manifests.capacity import charge, node_room, why_not
from windlass.targets.kubernetes.manifests.request import PodLayout
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot
from windlass.targets.kubernetes.watch.pods import newest_by_node, pod_of
from windlass.targets.kubernetes.watch.state import bare_status, end_of, status_of
from windlass.targets.launch.progress import recorded_end

INDEX = "batch.kubernetes.io/job-completion-index"
LAYOUT = PodLayout("windlass.dev/run=a", (INDEX,), None, num_pods=2, ranks_per_pod=4, container="trainer")


def pod_value(
    name="a-0", index=0, created="2026-11-15T06:00:00Z", state=None, phase="Running", deleting=False, **status
):
    metadata = {"name": name, "uid": name, "labels": {INDEX: str(index)}, "creationTimestamp": created}
    if deleting:
        metadata["deletionTimestamp"] = created
    containers = [{"name": "sidecar", "state": {"running": {}}}]
    if state is not None:
        containers.append({"name": "trainer", "restartCount": 0, "state": state})
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, "containerStatuses": containers, **status}}


def pod(*arguments, **options):
    return pod_of(pod_value(*arguments, **options), LAYOUT)


@pytest.mark.parametrize(
    ("options", "reason", "started"),
    [
        ({"state": {"running": {}}}, "", True),
        (
            {"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}, "phase": "Pending"},
            "ErrImagePull",
            False,
        ),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}, "phase": "Pending"}, "ContainerCreating", False),
        ({"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "phase": "Failed"}, "OOMKilled", True),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "Evicted", False),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}
                ],
            },
            "Unschedulable",
            False,
        ),
    ],
)
def test_why_a_pod_does_not_run(options, reason, started):
    found = pod(**options)
    assert (found.reason, found.started) == (reason, started)


def test_the_pod_that_counts_is_not_the_one_that_leaves():
    old = pod("a-0-old", created="2026-11-15T06:00:00Z", state={"running": {}})
    new = pod("a-0-new", created="2026-11-15T06:05:00Z", phase="Pending")
    leaving = pod("a-0-leaving", created="2026-11-15T06:09:00Z", state={"running": {}}, deleting=True)
    assert newest_by_node([new, old])[0].name == "a-0-new"
    assert newest_by_node([leaving, old])[0].name == "a-0-old"


def job(kind=None, **metadata):
    conditions = [{"type": kind, "status": "True", "reason": "R", "message": "M"}] if kind else []
    return {"metadata": {"uid": "u", **metadata}, "status": {"conditions": conditions}}


@pytest.mark.parametrize("kind", ["Complete", "Succeeded", "Completed"])
def test_every_operators_word_for_the_end(kind):
    assert end_of(job(kind)).finished
    assert bare_status(job(kind)).state == "finished"
    assert not end_of(job("Failed")).finished
    assert end_of(job("Running")) is None


@pytest.mark.parametrize(
    ("value", "history", "pods", "state", "words"),
    [
        (job(), [], [], "waiting", "starting"),
        (job(), ["launched"], [{"state": {"running": {}}}], "waiting", "starting"),
        (job(), ["launched", "started"], [{"state": {"running": {}}}], "running", "1 of 2 pods are missing"),
        (job(), ["launched", "started", "restart"], [{"state": {"running": {}}}], "waiting", "starting"),
        (job(), ["launched", "started", "exit"], [{"state": {"running": {}}}], "running", "leaving"),
        (job(), ["started", "exit"], [{"state": {"terminated": {"exitCode": 0}}, "phase": "Succeeded"}],
         "finished", None),  # although the job itself waits for a pod on a lost node
        (job("Complete"), [], [], "finished", None),
        (job("Failed"), [], [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "phase": "Failed"}],
         "failed", "memory limit was reached"),
        (job("Failed"), ["gave-up"], [], "failed", "too often"),
        (None, ["submitted", "started"], [], "stopped", "no longer in the cluster"),
        (None, ["started", "preempted"], [], "preempted", "no longer in the cluster"),
        (None, ["started", "finished"], [], "finished", None),
        (None, ["started"], [{"state": {"running": {}}, "deleting": True}], "running", "1 Terminating"),
    ],
)  # fmt: skip
def test_where_a_job_stands(tmp_path, value, history, pods, state, words):
    folder = RunFolder(tmp_path)
    for event in history:
        folder.record(event, why="died too often", state="finished", code=0)
    seen = JobSnapshot(value, {str(index): pod(index=index, **item) for index, item in enumerate(pods)})
    found = status_of(folder, seen, num_pods=2)
    assert found.state == state
    assert words is None or words in found.reason


DRAINED = ("submitted", "launched", "started", "preempted", "exit")


def terminated(folder, state="preempted", code=75):
    """The records of a run whose pods were all told to leave."""
    for event in DRAINED:
        folder.record(event, step=80, state=state, code=code, reason="told to leave; saved first", job="s")
    return folder


LEFT_POD = {"state": {"terminated": {"exitCode": 143}}, "phase": "Failed"}


@pytest.mark.parametrize("state", ["preempted", "stopped"])
def test_a_drained_run_has_not_ended_while_its_job_makes_a_new_pod(tmp_path, state):
    folder = terminated(RunFolder(tmp_path), state)
    for pods in ({"0": pod(**LEFT_POD)}, {}, {"1": pod("a-1", created="2026-11-15T06:09:00Z", phase="Pending")}):
        found = status_of(folder, JobSnapshot(job(), pods), num_pods=1)
        assert (found.state, found.ended, found.exit_code) == ("waiting", False, None)
        assert "told to leave" in found.reason
        assert "its job makes a new pod" in found.reason


def test_a_drained_run_has_ended_when_its_job_is_gone_or_failed(tmp_path):
    folder = terminated(RunFolder(tmp_path))
    assert status_of(folder, JobSnapshot(None, {}), num_pods=1).state == "preempted"
    found = status_of(folder, JobSnapshot(job("Failed"), {"0": pod(**LEFT_POD)}), num_pods=1)
    assert (found.state, found.exit_code) == ("failed", 1)


def test_a_run_that_failed_has_ended_though_a_replacement_waits_for_room(tmp_path):
    folder = RunFolder(tmp_path)
    for event in ("launched", "started", "exit"):
        folder.record(event, state="failed", code=1, reason="the loss is not finite")
    ended = pod("a-0", state={"terminated": {"exitCode": 1}}, phase="Failed")
    pending = pod("a-1", index=1, phase="Pending")
    found = status_of(folder, JobSnapshot(job(), {"0": ended, "1": pending}), num_pods=2)
    assert (found.state, found.exit_code, found.reason) == ("failed", 1, "the loss is not finite")


OUT_OF_MEMORY = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "phase": "Failed"}


def test_a_pod_that_ran_out_of_memory_is_named_though_the_run_said_why_it_gave_up(tmp_path):
    folder = RunFolder(tmp_path)
    folder.record("gave-up", why="torchrun was killed by SIGKILL; given up after 3 restarts")
    found = status_of(folder, JobSnapshot(job("Failed"), {"0": pod(**OUT_OF_MEMORY)}), num_pods=1)
    assert "given up after 3 restarts" in found.reason
    assert "a-0 ended with code 137 (OOMKilled): its memory limit was reached" in found.reason
    assert "target.kubernetes.memory" in found.reason


def test_steps_of_the_attempt_before_are_not_where_a_rolled_back_run_stands(tmp_path):
    folder = RunFolder(tmp_path)

    def log(step, attempt):
        append_json_line(folder.metrics, {"kind": "step", "step": step, "steps": 1000, "attempt": attempt, "step_s": 1})

    folder.record("started", attempt=1, step=0)
    log(846, attempt=1)
    folder.record("restart", attempt=2)
    folder.record("resumed", attempt=2, step=800)
    folder.record("stop-requested", save_first=False)
    assert status_of(folder, JobSnapshot(None, {}), num_pods=1).step == 800
    log(801, attempt=2)
    assert status_of(folder, JobSnapshot(None, {}), num_pods=1).step == 801


def test_a_run_that_its_owner_stops_is_stopped_though_one_pod_left_before_the_others(tmp_path):
    """Node 0 hears of its own end last: it records a restart for the pod that left first, which never comes."""
    folder = RunFolder(tmp_path)
    for event in ("submitted", "launched", "started", "stop-requested", "preempted", "restart"):
        folder.record(event)
    folder.record("exit", state="preempted", code=75, reason="the job is no longer in the cluster")
    end = recorded_end(folder)
    assert (end.state, end.exit_code) == ("stopped", 75)
    folder.record("submitted")
    assert recorded_end(folder) is None
    folder.record("exit", state="preempted", code=75)
    assert recorded_end(folder).state == "preempted"


def test_a_record_that_came_twice_does_not_hide_what_stood_between(tmp_path):
    """Logs are read again from the last kept place: a line may repeat, but none is lost."""
    folder = RunFolder(tmp_path)
    end = {"event": "exit", "state": "preempted", "code": 75, "reason": "saved", "time": 3.0}
    for record in ({"event": "submitted", "time": 1.0}, end, {"event": "stop-requested", "time": 2.0}, end):
        append_json_line(folder.history, record)
    assert recorded_end(folder).state == "stopped"


def test_a_cluster_that_does_not_answer_ends_no_job(tmp_path):
    found = status_of(RunFolder(tmp_path), JobSnapshot(None, {}, trouble="it does not answer"), num_pods=1)
    assert (found.state, found.reason) == ("waiting", "it does not answer")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1500m", 1.5), ("2Gi", 2**31), ("1k", 1000), ("3", 3), ("0.5", 0.5), ("1e3", 1000), ("12E", 12e18), (4, 4)],
)
def test_quantities(text, amount):
    assert parse_quantity(text) == pytest.approx(amount)


@given(st.integers(0, 10**6))
def test_whole_mebibytes_are_read_as_written(number):
    assert parse_quantity(f"{number}Mi") == number * 2**20


def test_amounts_for_a_person():
    assert show_quantity("memory", 3 * 2**30) == "3 GiB"
    assert show_quantity("cpu", 1.5) == "1.5"
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity("many")


def node_value(name, gpus=8, cpu="10", ready=True, taints=(), **labels):
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": list(taints)},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": cpu},
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def asking(gpus, cpu="1", node=None, run=None, **spec):
    labels = {"windlass.dev/run": run} if run else {}
    container = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": cpu}}}
    return {
        "metadata": {"name": "p", "namespace": "n", "labels": labels},
        "spec": {"containers": [container], **({"nodeName": node} if node else {}), **spec},
        "status": {"phase": "Running" if node else "Pending"},
    }


def told(pod, nodes, pods=(), waiting=1):
    rooms = {room.name: room for room in map(node_room, nodes)}
    charge(rooms, pods)
    return "; ".join(why_not(pod, list(rooms.values()), num_waiting=waiting))


def test_what_is_in_use_and_by_whom():
    nodes = [node_value("n1"), node_value("n2")]
    pods = [asking(8, node="n1", run="mistral"), asking(4, node="n2")]
    said = told(asking(8), nodes, pods)
    assert said == "nvidia.com/gpu: 8 asked, 16 allocatable, 12 in use by run mistral (8), n/p (4)"


def test_more_than_any_node_has():
    said = told(asking(16), [node_value("n1")])
    assert said == "nvidia.com/gpu: 16 asked, 8 is the most one node has"


def test_several_pods_that_would_fit_one_by_one():
    said = told(asking(8), [node_value("n1")], waiting=2)
    assert "8 asked by each of 2 pods, 8 allocatable, 0 in use" in said


def test_nodes_that_are_out_of_bounds():
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    nodes = [node_value("n1", ready=False), node_value("n2", taints=[taint]), node_value("n3", zone="b")]
    said = told(asking(1, nodeSelector={"zone": "a"}), nodes)
    assert said.startswith("0 of 3 nodes may take it: 1 not ready, 2 excluded by labels or taints")
    tolerant = asking(1, tolerations=[{"key": "gpu", "operator": "Exists"}])
    assert told(tolerant, nodes).startswith("2 of 3 nodes")


def test_what_has_ended_holds_nothing():
    done = asking(8, node="n1", run="old")
    done["status"]["phase"] = "Succeeded"
    assert told(asking(8), [node_value("n1")], [done]) == ""
