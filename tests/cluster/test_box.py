"""The cluster in a box is a cluster, survives what is done to it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.box import host, keeper
from tests.cluster.box.hyperpod import GROUP as HYPERPOD
from tests.cluster.box.layout import DEVELOPER_KUBECONFIG
from tests.cluster.box.overlay import REPOSITORY, RUNS

# of the box alone: what it gets wrong shows in every test that trains on it
pytestmark = [pytest.mark.cluster, pytest.mark.campaign, pytest.mark.campaign_only]


def metadata(name, namespace):
    return {"name": name, "namespace": namespace}


def pod(cluster, command, container="main", **spec):
    main = {"name": container, "image": cluster.shell_image, "command": command}
    return {"restartPolicy": "Never", "containers": [main], **spec}


def indexed_job(name, namespace, pods, template):
    """One pod a node, each with a name that the others can look up."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"job-name": name}},
    }
    service = {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True}
    job = {
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": template | {"subdomain": name, "topologySpreadConstraints": [spread]}},
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata(name, namespace), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(name, namespace), "spec": job},
    ]


def pytorch_job(name, namespace, pods, template):
    def replicas(count):
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": template}}

    spec = {"Master": replicas(1), "Worker": replicas(pods - 1)}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(name, namespace),
            "spec": {"pytorchReplicaSpecs": spec, "runPolicy": {"cleanPodPolicy": "None"}},
        }
    ]


def train_job(name, namespace, pods, template):
    main = template["containers"][0]
    trainer = {"numNodes": pods, "image": main["image"], "command": main["command"]}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return [kind | {"metadata": metadata(name, namespace), "spec": spec}]


def hyperpod_job(name, namespace, pods, template):
    group = {"name": "pods", "replicas": pods, "template": {"spec": template}}
    spec = {"nprocPerNode": "1", "replicaSpecs": [group], "runPolicy": {"cleanPodPolicy": "None"}}
    kind = {"apiVersion": f"{HYPERPOD}/v1", "kind": "HyperPodPyTorchJob"}
    return [kind | {"metadata": metadata(name, namespace), "spec": spec}]


def conditions(cluster, kind, name, namespace):
    status = cluster.get(kind, name, namespace).get("status", {})
    return {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}


def wait_for(cluster, kind, name, namespace, condition, seconds=180):
    def there():
        now = conditions(cluster, kind, name, namespace)
        assert "Failed" not in now or condition == "Failed", cluster.kubectl(
            "get", "pods", "-n", namespace, "-o", "yaml"
        )
        return condition in now

    cluster.wait(there, f"{kind} {name}: {condition}", seconds)


def logs(cluster, namespace):
    """What each pod has said so far."""
    names = [pod["metadata"]["name"] for pod in cluster.get("pods", namespace=namespace)["items"]]
    return {name: cluster.kubectl("logs", name, "-n", namespace, check=False) for name in names}


# --- a cluster


def test_nodes_are_ready_and_the_system_runs(cluster):
    assert len(cluster.nodes) >= 3
    assert all(cluster.is_ready(node) for node in cluster.nodes)
    served = cluster.kubectl("api-resources", "--no-headers", "-o", "name").split()
    assert {"jobs.batch", "pytorchjobs.kubeflow.org", "trainjobs.trainer.kubeflow.org", "jobsets.jobset.x-k8s.io"} <= {
        *served
    }


def test_every_pod_finds_and_reaches_every_other(cluster, namespace):
    # each serves its name until everybody has asked it (three times), then all end
    ask = f"until echo | nc net-$i.net.{namespace}.svc.cluster.local 8000 | grep -q here; do sleep 0.2; done"
    serve = "for i in 0 1 2; do echo here | nc -l -p 8000 > /dev/null; done"
    template = pod(cluster, ["sh", "-c", f"({serve}) & for i in 0 1 2; do {ask}; echo reached $i; done; wait"])
    cluster.apply(*indexed_job("net", namespace, 3, template))
    wait_for(cluster, "job", "net", namespace, "Complete")
    pods = cluster.get("pods", namespace=namespace)["items"]
    assert len({p["spec"]["nodeName"] for p in pods}) == 3
    for text in logs(cluster, namespace).values():
        assert [line for line in text.splitlines() if line.startswith("reached")] == [f"reached {i}" for i in range(3)]


def test_services_have_addresses_of_their_own(cluster, namespace):
    cluster.need_box("pods of other clusters may not reach the API server")
    command = ["sh", "-c", "until echo | nc kubernetes.default.svc.cluster.local 443; do sleep 0.2; done"]
    cluster.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata("call", namespace), "spec": pod(cluster, command)}
    )
    cluster.wait(lambda: cluster.get("pod", "call", namespace)["status"].get("phase") == "Succeeded", "the pod is done")


JOBS = {
    "job": (indexed_job, "Complete"),
    "pytorchjob": (pytorch_job, "Succeeded"),
    "trainjob": (train_job, "Complete"),
    "hyperpodpytorchjob": (hyperpod_job, "Completed"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_each_kind_of_job_runs_three_pods(cluster, namespace, kind):
    make, done = JOBS[kind]
    if kind == "hyperpodpytorchjob":
        cluster.need_box("HyperPod's operator is a stand-in")
    container = "pytorch" if kind == "pytorchjob" else "main"
    rank = "${JOB_COMPLETION_INDEX:-$PET_NODE_RANK}" if kind == "job" else "$PET_NODE_RANK of $PET_NNODES"
    template = pod(cluster, ["sh", "-c", f"echo rank {rank}; until [ -e /tmp/go ]; do sleep 0.2; done"], container)
    cluster.apply(*make("three", namespace, 3, template))

    def ranks():
        said = "\n".join(logs(cluster, namespace).values()).splitlines()
        return sorted(line.split()[1] for line in said if line.startswith("rank"))

    cluster.wait(lambda: ranks() == ["0", "1", "2"], "three ranks have spoken")
    for name in logs(cluster, namespace):
        cluster.kubectl("exec", name, "-n", namespace, "--", "touch", "/tmp/go")
    wait_for(cluster, kind, "three", namespace, done)


def test_webhooks_refuse_what_schemas_let_through(cluster, namespace):
    wrong = pytorch_job("three", namespace, 3, pod(cluster, ["true"], container="not-pytorch"))[0]
    with pytest.raises(AssertionError, match="webhook"):
        cluster.apply(wrong)


def test_the_hyperpod_definition_refuses_unknown_fields(cluster, namespace):
    cluster.need_box("HyperPod's definition is a stand-in")
    job = hyperpod_job("three", namespace, 1, pod(cluster, ["true"]))[0]
    job["spec"]["runPolicy"]["cleanPodPolicies"] = "All"
    text = json.dumps(job)
    with pytest.raises(AssertionError, match="cleanPodPolicies"):
        cluster.kubectl("create", "--validate=strict", "--dry-run=server", "-f", "-", stdin=text)


def test_rbac_is_on(cluster):
    cluster.need_box("needs a second identity")
    developer = ("--kubeconfig", DEVELOPER_KUBECONFIG)
    assert "yes" in cluster.kubectl(*developer, "auth", "can-i", "create", "pods", "-n", "default", check=False)
    assert "no" in cluster.kubectl(*developer, "auth", "can-i", "list", "secrets", "-n", "kube-system", check=False)


def test_python_torch_and_storage_are_the_same_on_all_nodes(cluster, namespace):
    template = cluster.overlay("main") | {"restartPolicy": "Never"}
    written = f"open('{RUNS}/' + os.environ['JOB_COMPLETION_INDEX'], 'w').write(torch.__version__)"
    program = f"import os, torch, windlass; {written}"
    template["containers"][0]["command"] = ["python", "-c", program]
    cluster.apply(*indexed_job("torch", namespace, 3, template))
    wait_for(cluster, "job", "torch", namespace, "Complete", 300)
    if cluster.is_box:
        written = {path.name: path.read_text() for path in cluster.storage(namespace).iterdir()}
        assert sorted(written) == ["0", "1", "2"]
        assert len(set(written.values())) == 1


# --- what happens to clusters


def test_a_silent_kubelet_is_noticed_and_comes_back(cluster):
    node = cluster.expendable[-1]
    cluster.kill_kubelet(node)
    try:
        begin = time.monotonic()
        cluster.wait(lambda: not cluster.is_ready(node), f"{node} is not ready")
        print(f"\n{node} was found silent after {time.monotonic() - begin:.0f} s")
    finally:
        cluster.restart_node(node)
    assert cluster.is_ready(node)


def test_a_node_without_power_loses_its_pods_and_takes_new_ones(cluster, namespace):
    node = cluster.expendable[-1]

    def run(name, command):
        spec = pod(cluster, command, nodeSelector={"kubernetes.io/hostname": node})
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata(name, namespace), "spec": spec})

    run("before", ["sleep", "infinity"])
    cluster.wait(lambda: cluster.get("pod", "before", namespace)["status"].get("phase") == "Running", "the pod runs")
    cluster.cut_power(node)
    try:
        assert host.members(node) == set()
        cluster.wait(lambda: not cluster.is_ready(node), f"{node} is not ready")
        cluster.forget_node(node)
    finally:
        cluster.restart_node(node)
    run("after", ["true"])
    cluster.wait(
        lambda: cluster.get("pod", "after", namespace)["status"].get("phase") == "Succeeded", "the pod is done"
    )
    assert cluster.kubectl("get", "pod", "before", "-n", namespace, "--ignore-not-found") == ""


def test_a_drained_node_is_empty_until_it_is_released(cluster, namespace):
    node = cluster.expendable[0]
    template = pod(cluster, ["sleep", "infinity"], terminationGracePeriodSeconds=0)
    cluster.apply(*indexed_job("stay", namespace, 3, template))
    cluster.wait(lambda: cluster.get("job", "stay", namespace)["status"].get("ready") == 3, "three pods run")
    cluster.drain(node)
    try:
        living = [p for p in cluster.get("pods", namespace=namespace)["items"] if p["status"]["phase"] == "Running"]
        assert node not in {p["spec"].get("nodeName") for p in living}
    finally:
        cluster.uncordon(node)


def test_pretended_devices_are_scheduled_for_real(cluster, namespace):
    node = cluster.expendable[0]
    spec = pod(cluster, ["true"])
    wanted = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
    spec["containers"][0]["resources"] = {"limits": wanted}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata("gpus", namespace), "spec": spec})
    cluster.wait(
        lambda: "Insufficient nvidia.com/gpu" in json.dumps(cluster.get("pod", "gpus", namespace)["status"]),
        "the scheduler says what is missing",
    )
    cluster.set_capacity(node, **{name: int(value) for name, value in wanted.items()})
    try:
        cluster.wait(lambda: cluster.get("pod", "gpus", namespace)["status"]["phase"] == "Succeeded", "the pod is done")
        assert cluster.get("pod", "gpus", namespace)["spec"]["nodeName"] == node
    finally:
        cluster.set_capacity(node, **dict.fromkeys(wanted))


def test_a_thousand_nodes_can_be_pretended(cluster, namespace):
    template = pod(cluster, ["true"], nodeSelector={"windlass.test/fake": "true"})
    with cluster.fake_nodes(1000, {"nvidia.com/gpu": "8"}) as names:
        every = cluster.get("nodes", selector="windlass.test/fake")["items"]
        assert {item["metadata"]["name"] for item in every} == {*names}
        assert {item["status"]["allocatable"]["nvidia.com/gpu"] for item in every} == {"8"}
        cluster.apply(*indexed_job("wide", namespace, 20, template))
        running = 0
        deadline = time.monotonic() + 120
        while running < 20 and time.monotonic() < deadline:
            running += cluster.pretend_running(namespace, "job-name=wide")
        assert running == 20
        cluster.kubectl("delete", "job", "wide", "-n", namespace, "--wait=false")
    assert cluster.kubectl("get", "nodes", "-l", "windlass.test/fake", "-o", "name") == ""
    assert all(cluster.is_ready(node) for node in cluster.nodes)


# --- how it ends

SESSION = "from tests.cluster.box.cluster import Session; Session().start(); print('up', flush=True); input()"


def another_session_ends_by(number, *, when):
    """A test session beside this one, which is sent a signal once it has said something."""
    environment = {name: value for name, value in os.environ.items() if name != "WINDLASS_BOX"}
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process:
        said = []
        for line in process.stdout:
            said.append(line)
            if when in line:
                break
        else:
            pytest.fail(f"the session ended by itself: {said}")
        assert host.leftovers() != []
        process.send_signal(number)
        process.stdin.close()
        process.stdout.read()
    host.wait(lambda: keeper.running() is None, "the keeper has cleaned up", 180)


def test_nothing_is_left_behind_whatever_ends_a_session(box_session):
    if not box_session.owns:
        pytest.skip("the box that is up stays: it was started by `python -m tests.cluster.box up`")
    try:
        os.kill(keeper.running(), signal.SIGKILL)  # now nobody cleans up after this session
        box_session.forget()
        assert host.leftovers() != []
        another_session_ends_by(
            signal.SIGKILL, when="up"
        )  # it found the remains, removed them, started, and was killed
        assert host.leftovers() == []
        another_session_ends_by(signal.SIGINT, when="API server ready")  # Ctrl-C in the middle of a start
        assert host.leftovers() == []
    finally:
        box_session.start()
