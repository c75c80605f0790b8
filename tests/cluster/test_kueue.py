"""A run in a real Kueue: it waits with Kueue's reason, is admitted, is preempted, and goes on where it was."""

import json

import pytest

from tests.cluster.bench import HELD_STEP, STEPS, Bench, events, hold
from tests.cluster.box import build, machine, operators
from tests.cluster.box.api import Api
from tests.cluster.box.layout import KUBECONFIG

# compiled for these tests alone: minutes
pytestmark = [pytest.mark.cluster, pytest.mark.campaign, pytest.mark.campaign_only]
QUEUE, FLAVOR, ASKED = "team", "box", "100m"
SMALL = ("resources.nodes=1", "train.global_batch=2")  # one pod, which asks for that


@pytest.fixture(scope="module")
def kueue(cluster):
    """Kueue, compiled on the first use, and gone afterwards: its webhooks are asked about every pod of the cluster."""
    cluster.need_box("installs Kueue")
    build.build("kueue")
    objects = operators.manifests([operators.KUEUE])
    machine.apply(objects)
    api = Api(KUBECONFIG)
    deployment = (operators.KUEUE.namespace, operators.KUEUE.deployment)
    cluster.wait(lambda: machine.deployment_ready(api, *deployment), "Kueue is ready")
    operators.wait_for_webhooks(api)
    yield
    hooks = [one for one in objects if one["kind"].endswith("WebhookConfiguration")]
    definitions = [one for one in objects if one["kind"] == "CustomResourceDefinition"]
    rest = [one for one in objects if one not in hooks and one not in definitions]
    # the definitions while Kueue is there to let go of its objects; for its own pods nobody waits
    for group, waits in ((hooks, "true"), (definitions, "true"), (rest, "false")):
        listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": group})
        cluster.kubectl("delete", "--ignore-not-found", f"--wait={waits}", "--timeout=60s", "-f", "-", stdin=listing)


def kueue_object(kind, name, namespace=None, **parts):
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, **parts}


def cluster_queue(name, cpu, flavor=FLAVOR):
    flavors = [{"name": flavor, "resources": [{"name": "cpu", "nominalQuota": cpu}]}]
    spec = {
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}],
    }
    return kueue_object("ClusterQueue", name, spec=spec)


@pytest.fixture
def bench(kueue, cluster, namespace, tmp_path):
    """A queue in the test's namespace, whose quota is what the small run asks for, and not a millicore more."""
    machine.apply(
        [
            kueue_object("ResourceFlavor", FLAVOR),
            kueue_object("WorkloadPriorityClass", "urgent", value=100),
            cluster_queue(namespace, ASKED),
            kueue_object("LocalQueue", QUEUE, namespace, spec={"clusterQueue": namespace}),
        ]
    )
    yield Bench(cluster, namespace, tmp_path)
    cluster.kubectl("delete", "jobs,trainjobs", "--all", "-n", namespace)
    cluster.kubectl("delete", "clusterqueue", namespace)


def rival(bench, name, priority=None):
    """Somebody else's job that needs the whole quota."""
    container = {"name": "main", "image": bench.cluster.shell_image, "command": ["sleep", "600"]}
    container["resources"] = {"requests": {"cpu": ASKED}}
    pod = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    labels = {"kueue.x-k8s.io/queue-name": QUEUE}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = priority
    metadata = {"name": name, "namespace": bench.namespace, "labels": labels}
    bench.cluster.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {"template": {"spec": pod}, "suspend": True},
        }
    )
    bench.wait(lambda: bench.cluster.get("job", name, bench.namespace)["status"].get("active"), f"{name} is admitted")


def end(bench, name):
    bench.cluster.kubectl("delete", "job", name, "-n", bench.namespace)


def test_a_run_waits_is_admitted_preempted_and_comes_back(bench):
    name, options = "queued", (*SMALL, f"target.kubernetes.queue={QUEUE}")
    rival(bench, "first")
    with bench.following("run", bench.file, f"name={name}", *options, *hold(25)) as follower:
        bench.wait(lambda: "insufficient unused quota for cpu" in bench.said(), "Kueue's reason", name)
        shown = bench.show(name)
        assert shown["state"] == "waiting"
        assert f"Kueue's queue {QUEUE}: couldn't assign flavors" in shown["reason"]
        assert "insufficient unused quota for cpu in flavor box" in bench.windlass("why", name).stdout
        end(bench, "first")
        bench.wait_for_step(name, HELD_STEP - 1)
        rival(bench, "second", priority="urgent")
        bench.wait(
            lambda: "Preempted to accommodate a workload" in str(bench.show(name)["reason"]), "Kueue's reason", name
        )
        assert bench.show(name)["state"] == "waiting"
        end(bench, "second")
        assert follower.wait(timeout=900) == 0, bench.said() + bench.evidence(name)
    folder = bench.run_folder(name)
    assert bench.show(name)["state"] == "finished"
    assert bench.show(name)["summary"]["steps"] == STEPS
    (resumed,) = events(folder, "resumed")
    assert resumed["step"] >= HELD_STEP - 1, "what it had done before the preemption was not saved"


def queue_results(bench, queue=QUEUE):
    answer = bench.windlass("cluster", "check", bench.file, *SMALL, f"target.kubernetes.queue={queue}", "--json")
    assert answer.stdout, answer.stderr
    results = [one for one in json.loads(answer.stdout)["results"] if one["check"] == "queue"]
    return {one["status"] for one in results}, "\n".join(f"{one['summary']}: {one['evidence']}" for one in results)


def test_the_check_reads_kueues_queues(bench):
    kinds, told = queue_results(bench)
    assert kinds == {"pass"}, told
    kinds, told = queue_results(bench, "nowhere")
    assert kinds == {"fail"}
    assert f"queues there: {QUEUE}" in told
    machine.apply([cluster_queue(bench.namespace, "50m")])
    kinds, told = queue_results(bench)
    assert "fail" in kinds
    assert "can never give 0.1 cpu by its own quota" in told
    machine.apply([cluster_queue(bench.namespace, ASKED, flavor="nowhere")])
    bench.wait(lambda: "is not active" in queue_results(bench)[1], "an inactive queue")
    assert "nowhere" in queue_results(bench)[1]  # Kueue names the flavor that is missing
