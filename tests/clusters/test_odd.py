"""Checks of clusters as they are: shared, mixed, half ready, with other people's operators. Pure."""

import pytest

from tests.clusters.conftest import daemonset, named, node
from windlass.clusters.checks.capacity import free_devices, quotas
from windlass.clusters.checks.devices import driver, gpu_plugin
from windlass.clusters.checks.namespace import pod_security
from windlass.clusters.checks.nodes import health
from windlass.clusters.checks.operators import job_operators
from windlass.clusters.checks.queues import VOLCANO_QUEUE, kueue, volcano
from windlass.clusters.checks.storage import storage_classes
from windlass.clusters.needs import GPU, Needs
from windlass.clusters.result import Result, junit
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind

LISTS = ("nodes", "pods", "daemonsets", "deployments", "storage_classes", "csi_drivers", "claims", "quotas")


def snapshot(**changes):
    lists = dict.fromkeys([*LISTS, "service_accounts", "local_queues", "cluster_queues", "volcano_queues"], ())
    return Snapshot(
        **{
            "context": "here",
            "namespace": "team",
            "version": {},
            "groups": {},
            "namespace_object": named("team"),
            "accesses": (),
            **lists,
            **changes,
        }
    )


def needs(pod=None, **changes):
    resources = {"requests": {GPU: "8", "cpu": "4"}, "limits": {GPU: "8", "memory": "64Gi"}}
    container = {"name": "trainer", "resources": resources, **(pod or {}).pop("container", {})}
    spec = {"nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"}, "containers": [container]}
    values = {"pod": {"spec": {**spec, **(pod or {})}}, "num_pods": 2, "image": "train:cuda12.8", **changes}
    return Needs(**values)


def statuses(results):
    return [result.status for result in results]


def test_the_driver_of_a_pool_that_the_run_does_not_use_is_no_matter():
    nodes = [node("a"), node("old", instance="g4dn.xlarge", gpus=1, driver="470.57.02")]
    assert statuses(driver(snapshot(nodes=nodes), needs())) == ["pass"]


def test_one_ready_controller_of_several_is_enough():
    off = named("training-operator-old", "kubeflow", spec={"replicas": 0}, status={})
    on = named("training-operator", "kubeflow", spec={"replicas": 1}, status={"readyReplicas": 1})
    groups = {"kubeflow.org": {"versions": [{"version": "v1"}]}}
    given = snapshot(groups=groups, deployments=[off, on])
    assert "fail" not in statuses(job_operators(given, needs(kind=JobKind.PYTORCHJOB)))


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ({"type": "EtcdIsVoter", "status": "True", "message": "voting member"}, "pass"),  # k3s and RKE2
        ({"type": "EtcdIsVoter", "status": "False", "message": "learner"}, "warn"),
        ({"type": "KernelReady", "status": "True"}, "pass"),  # the EKS node monitoring agent's
        ({"type": "AcceleratedHardwareReady", "status": "False", "message": "XID 79"}, "warn"),
        ({"type": "NetworkUnavailable", "status": "False"}, "pass"),
        ({"type": "KubeletUnhealthy", "status": "True"}, "warn"),  # node-problem-detector's
        ({"type": "GPUMissing", "status": "True"}, "warn"),  # AKS
        ({"type": "CWNodeHealthy", "status": "True"}, "pass"),
    ],
)
def test_conditions_that_are_good_when_true(kind, status):
    value = node("a")
    value["status"]["conditions"].append(kind)
    assert statuses(health(snapshot(nodes=[value]), needs())) == [status]


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"])
def test_divided_gpus_are_not_missing(resource):
    value = node("a", gpus=0)
    value["status"]["allocatable"][resource] = "56"
    given = snapshot(nodes=[value, node("b")], daemonsets=[daemonset("nvidia-device-plugin-daemonset")])
    assert set(statuses(gpu_plugin(given, needs()))) == {"pass"}


def test_the_plugins_of_gke_are_known():
    plugins = [
        daemonset("nvidia-gpu-device-plugin-large-cos", 2, 1),
        daemonset("nvidia-gpu-device-plugin-ubuntu", 0, 0),
    ]
    results = list(gpu_plugin(snapshot(nodes=[node("a", instance="a3-highgpu-8g")], daemonsets=plugins), needs()))
    assert [result.summary for result in results if result.status == "fail"] == [
        "kube-system/nvidia-gpu-device-plugin-large-cos is ready on 1 of 2 nodes"
    ]
    assert "0 of 0" not in str(results)


@pytest.mark.parametrize("name", ["rook-ceph.cephfs.csi.ceph.com", "openshift-storage.cephfs.csi.ceph.com"])
def test_rook_names_its_drivers_after_its_namespace(name):
    classes = [named("shared", provisioner=name), named("gp2", provisioner="kubernetes.io/aws-ebs")]
    given = snapshot(storage_classes=classes, csi_drivers=[named(name)])
    assert statuses(storage_classes(given, needs())) == ["pass"]


def test_a_pool_that_grows_is_no_failure():
    alone = snapshot(nodes=[], pods=[])
    assert statuses(free_devices(alone, needs())) == ["fail"]
    assert statuses(free_devices(snapshot(groups={"karpenter.sh": {}}), needs())) == ["warn"]
    autoscaler = named("cluster-autoscaler-aws-cluster-autoscaler", "kube-system")
    assert statuses(free_devices(snapshot(deployments=[autoscaler]), needs())) == ["warn"]


def quota(key, hard, used="0", **spec):
    return named("q", spec=spec, status={"hard": {key: hard}, "used": {key: used}})


def scope(operator, *values):
    return {"matchExpressions": [{"scopeName": "PriorityClass", "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (quota("requests.nvidia.com/gpu", "8"), "fail"),
        (quota("limits.memory", "100Gi"), "fail"),
        (quota("limits.memory", "1e12"), "pass"),
        (quota("cpu", "8500m", "1"), "warn"),
        (quota("count/pods", "1"), "fail"),
        (quota("count/jobs.batch", "5", "5"), "warn"),
        (quota("count/jobs.batch", "5", "4"), "pass"),
        (quota("services.nodeports", "0"), "pass"),
        (quota("gold.storageclass.storage.k8s.io/requests.storage", "1Gi"), "pass"),
        (quota("pods", "1", scopes=["BestEffort"]), None),
        (quota("pods", "1", scopes=["Terminating"]), None),
        (quota("pods", "1", scopes=["NotTerminating", "NotBestEffort"]), "fail"),
        (quota("pods", "1", scopeSelector=scope("In", "high")), None),
        (quota("pods", "1", scopeSelector=scope("In", "low", "high")), None),
        (quota("pods", "1", scopeSelector=scope("NotIn", "high")), "fail"),
        (quota("pods", "1", scopeSelector=scope("DoesNotExist")), "fail"),
        (named("new", spec={}), "pass"),
    ],
)
def test_quotas_as_administrators_write_them(given, expected):
    results = statuses(quotas(snapshot(quotas=[given]), needs(kind=JobKind.INDEXED)))
    assert results == ([expected] if expected else [])


def test_a_quota_of_a_priority_class_counts_for_pods_that_have_it():
    given = snapshot(quotas=[quota("pods", "1", scopeSelector=scope("In", "high"))])
    assert statuses(quotas(given, needs({"priorityClassName": "high"}))) == ["fail"]


def test_kueue_admits_nothing_that_no_flavor_covers():
    flavors = [{"name": "p5", "resources": [{"name": GPU, "nominalQuota": "16"}]}]
    given = snapshot(
        groups={"kueue.x-k8s.io": {}},
        local_queues=[named("main", spec={"clusterQueue": "all"})],
        cluster_queues=[named("all", spec={"resourceGroups": [{"flavors": flavors}]})],
    )
    results = [result for result in kueue(given, needs(queue="main")) if result.status != "pass"]
    assert statuses(results) == ["warn"]
    assert "cpu, memory" in results[0].summary


OPEN = named("default", spec={}, status={"state": "Open"})


@pytest.mark.parametrize(
    ("groups", "queues", "status", "evidence"),
    [
        ({}, (), "fail", "scheduling.volcano.sh is not in /apis"),
        ({"scheduling.volcano.sh": {}}, [OPEN], "pass", ""),
        ({"scheduling.volcano.sh": {}}, [named("other")], "fail", "queues: other"),
        ({"scheduling.volcano.sh": {}}, [{**OPEN, "status": {"state": "Closed"}}], "fail", "Closed"),
        ({"scheduling.volcano.sh": {}}, [{**OPEN, "spec": {"capability": {GPU: "8"}}}], "fail", f"8 {GPU}"),
        ({"scheduling.volcano.sh": {}}, Refusal(403, "forbidden"), "skip", "forbidden"),
    ],
)
def test_volcanos_queue_is_open_and_large_enough(groups, queues, status, evidence):
    given = snapshot(groups=groups, volcano_queues=queues)
    (result,) = volcano(given, needs({"schedulerName": "volcano"}))
    assert (result.status, evidence in (result.evidence or "")) == (status, True), result
    assert not list(volcano(given, needs()))  # pods of the ordinary scheduler are in none of its queues
    pod = {"metadata": {"annotations": {VOLCANO_QUEUE: "mine"}}, "spec": {"schedulerName": "volcano", "containers": []}}
    assert next(volcano(given, Needs(pod=pod))).status != "pass"


SOUND = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.mark.parametrize(
    ("level", "pod", "expected"),
    [
        ("privileged", {"hostNetwork": True}, None),
        ("baseline", {}, None),
        ("baseline", {"container": {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}}, "IPC_LOCK"),
        ("baseline", {"container": {"securityContext": {"capabilities": {"add": ["CHOWN"]}}}}, None),
        ("baseline", {"container": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}}, "seccompProfile"),
        ("baseline", {"container": {"ports": [{"containerPort": 1, "hostPort": 1}]}}, "hostPort"),
        ("baseline", {"volumes": [{"name": "v", "hostPath": {"path": "/dev"}}]}, "hostPath"),
        ("baseline", {"volumes": [{"name": "v", "nfs": {}}]}, None),
        ("baseline", {"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}, "i is privileged"),
        ("restricted", {"container": {"securityContext": SOUND}}, None),
        ("restricted", {"securityContext": {"runAsNonRoot": True}, "container": {"securityContext": SOUND}}, None),
        (
            "restricted",
            {"securityContext": SOUND, "container": {"securityContext": {**SOUND, "runAsNonRoot": False}}},
            "runAsNonRoot",
        ),
        ("restricted", {"container": {"securityContext": {**SOUND, "runAsUser": 0}}}, "runAsUser"),
        ("restricted", {"container": {"securityContext": {**SOUND, "capabilities": {}}}}, "drop"),
        ("restricted", {"container": {"securityContext": {**SOUND, "seccompProfile": {}}}}, "seccompProfile"),
        (
            "restricted",
            {"volumes": [{"name": "v", "nfs": {}}], "container": {"securityContext": SOUND}},
            "nfs",
        ),
        (
            "restricted",
            {"volumes": [{"name": "v", "emptyDir": {}}], "container": {"securityContext": SOUND}},
            None,
        ),
    ],
)
def test_pod_security_by_its_standards(level, pod, expected):
    namespace = named("team")
    namespace["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": level}
    (result,) = pod_security(snapshot(namespace_object=namespace), needs(pod))
    assert result.status == ("fail" if expected else "pass"), result.evidence
    assert (expected or "") in (result.evidence or "")


def test_junit_holds_only_what_xml_can():
    from xml.etree import ElementTree

    text = junit([Result("health", "fail", "bad \ufffe\uffff\x00\ud800 ünï 🙂")], cluster="a\x01b", seconds=1.0)
    assert ElementTree.fromstring(text.encode()).find("testcase").get("name") == "bad  ünï 🙂"
