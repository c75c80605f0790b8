"""`windlass cluster check`, `fix` and `--deep` on a real cluster: sound, and with a fault planted in it."""

import contextlib
import json
from dataclasses import replace

import pytest

from tests.cluster.bench import Bench
from tests.cluster.box import host
from tests.cluster.box.layout import NODES
from tests.cluster.test_refusals import as_user, quota  # noqa: F401
from tests.kubernetes.golden import cluster_of, run_of
from windlass.clusters.deep.inside import PORT
from windlass.plan import resolve
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind
from windlass.targets.kubernetes.manifests.code import Carried
from windlass.targets.kubernetes.manifests.render import render, settle

pytestmark = pytest.mark.cluster


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    return Bench(cluster, namespace, tmp_path)


def check(bench, *arguments):
    """Exit code and results of a check of the small run."""
    answer = bench.windlass("cluster", "check", bench.file, *arguments, "--json")
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)["results"]


def found(results, name, status):
    return [result for result in results if (result["check"], result["status"]) == (name, status)]


def named(kind, version, name, **parts):
    metadata = {"name": name, **({"namespace": parts.pop("namespace")} if "namespace" in parts else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


@contextlib.contextmanager
def cordoned(bench):
    node = bench.cluster.expendable[0]
    bench.cluster.kubectl("cordon", node)
    try:
        yield "nodes", "warn", f"spec.unschedulable: {node}"
    finally:
        bench.cluster.uncordon(node)


@contextlib.contextmanager
def plugin_not_ready(bench):
    """A device plugin whose image nobody has."""
    labels = {"matchLabels": {"app": "plugin"}}
    container = {"name": "plugin", "image": "nowhere.invalid/plugin:1"}
    template = {"metadata": {"labels": {"app": "plugin"}}, "spec": {"containers": [container]}}
    spec = {"selector": labels, "template": template}
    bench.cluster.apply(
        named("DaemonSet", "apps/v1", "nvidia-device-plugin-daemonset", namespace="kube-system", spec=spec)
    )
    node = bench.cluster.expendable[0]
    bench.cluster.set_capacity(node, **{"nvidia.com/gpu": 8})
    try:
        yield "gpu-plugin", "fail", "numberReady 0"
    finally:
        bench.cluster.set_capacity(node, **{"nvidia.com/gpu": None})
        bench.cluster.kubectl("delete", "daemonset", "nvidia-device-plugin-daemonset", "-n", "kube-system")


@contextlib.contextmanager
def operator_down(bench):
    scale = ("scale", "deployment", "kubeflow-trainer-controller-manager", "-n", "kubeflow-system")
    bench.cluster.kubectl(*scale, "--replicas=0")
    try:
        yield "operators", "fail", "0 of 0 replicas are ready"
    finally:
        bench.cluster.kubectl(*scale, "--replicas=1")
        bench.cluster.kubectl("rollout", "status", *scale[1:], timeout=180)


@contextlib.contextmanager
def quota_full(bench):
    bench.cluster.apply(quota(bench.namespace, pods="1"))
    bench.wait(lambda: bench.cluster.get("quota", "small", bench.namespace)["status"].get("used"), "a quota in force")
    try:
        yield "quota", "fail", "pods: 0 of 1 used"
    finally:
        bench.cluster.kubectl("delete", "quota", "small", "-n", bench.namespace)


@contextlib.contextmanager
def restricted(bench):
    label = "pod-security.kubernetes.io/enforce"
    bench.cluster.kubectl("label", "namespace", bench.namespace, f"{label}=restricted")
    try:
        yield "namespace", "fail", "is of the kind hostPath"
    finally:
        bench.cluster.kubectl("label", "namespace", bench.namespace, f"{label}-")


@contextlib.contextmanager
def claim_of_one_node(bench):
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    bench.cluster.apply(named("PersistentVolumeClaim", "v1", "single", namespace=bench.namespace, spec=spec))
    try:
        yield "claim", "fail", "ReadWriteOnce", "target.kubernetes.storage=pvc:single", "resources.nodes=2"
    finally:
        bench.cluster.kubectl("delete", "pvc", "single", "-n", bench.namespace)


@contextlib.contextmanager
def other_version(bench):
    """PyTorchJobs are served as v9 alone; the other kinds of their group stay as they are."""
    first, second = "/spec/versions/0", "/spec/versions/1"

    def patch(*operations):
        crd = "customresourcedefinition/pytorchjobs.kubeflow.org"
        bench.cluster.kubectl("patch", crd, "--type=json", "-p", json.dumps(operations))

    patch(
        {"op": "copy", "from": first, "path": second},
        {"op": "replace", "path": f"{second}/name", "value": "v9"},
        {"op": "replace", "path": f"{second}/storage", "value": False},
        {"op": "replace", "path": f"{first}/served", "value": False},
    )
    served = "/apis/kubeflow.org/v9"
    bench.wait(lambda: "pytorchjobs" in bench.cluster.kubectl("get", "--raw", served, check=False), "another version")
    try:
        yield "operators", "fail", "v9 is served, v1 is needed", "target.kubernetes.job=pytorchjob"
    finally:
        patch({"op": "remove", "path": second}, {"op": "replace", "path": f"{first}/served", "value": True})


FAULTS = (cordoned, plugin_not_ready, operator_down, quota_full, restricted, claim_of_one_node, other_version)


def test_a_sound_cluster_passes_and_each_planted_fault_is_found(bench):
    code, results = check(bench)
    assert code == 0, [result for result in results if result["status"] == "fail"]
    for plant in FAULTS:
        with plant(bench) as (name, status, evidence, *options):
            _, results = check(bench, *options)
            told = [result["evidence"] for result in found(results, name, status)]
            assert any(evidence in (text or "") for text in told), (plant.__name__, results)
    code, results = check(bench)
    assert code == 0, [result for result in results if result["status"] == "fail"]


def test_fix_gives_a_user_what_is_missing_and_takes_it_away(bench, as_user):  # noqa: F811
    administrator = dict(bench.environment)
    rules = [
        {"apiGroups": [""], "resources": ["pods", "events", "configmaps", "services"], "verbs": ["*"]},
        {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["watch", "delete"]},
    ]
    as_user(rules)
    developer = dict(bench.environment)
    options = ("target.kubernetes.service_account=trainer",)
    code, results = check(bench, *options)
    assert code == 1
    missing = {result["summary"].partition(" in the")[0] for result in found(results, "permissions", "fail")}
    assert "you may not create secrets" in missing
    bench.environment = administrator
    who = f"system:serviceaccount:{bench.namespace}:ann"
    answer = bench.windlass("cluster", "fix", bench.file, *options, "--for", who, "--yes")
    assert "ServiceAccount trainer" in answer.stdout
    bench.environment = developer
    _, results = check(bench, *options)
    assert not found(results, "permissions", "fail"), results
    assert found(results, "service-account", "pass") or found(results, "service-account", "skip"), results
    bench.environment = administrator
    bench.must("cluster", "fix", bench.file, *options, "--undo", "--yes")
    accounts = bench.cluster.get("serviceaccounts", namespace=bench.namespace)["items"]
    assert "trainer" not in {account["metadata"]["name"] for account in accounts}


def test_a_restricted_namespace_takes_the_pods_of_an_image_that_is_not_roots(cluster, namespace):
    """Up to the API server's admission: what runs in the box mounts folders of the host, which no such pod may."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    facts = replace(cluster_of("llama-tiny"), namespace=namespace, pod_security="restricted")
    users = {"securityContext": {"runAsUser": 1000, "fsGroup": 1000}}
    run = resolve(settle(run_of("llama-tiny", JobKind.INDEXED, pod=users), facts))
    request = render(run, facts, Carried(token="t"), submission="0a1b2c3d")
    pod = json.dumps(request.example_pod)
    assert "created (server dry run)" in cluster.kubectl(
        "create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=pod
    )


@contextlib.contextmanager
def blocked_port(node):
    """Nothing comes in to the pods of a node; what they send goes out."""
    inside = ("nsenter", "-t", str(host.pid_of(f"holder-{node.name}")), "-n")
    rule = ("FORWARD", "-p", "tcp", "-d", node.pods, "--dport", str(PORT), "-j", "DROP")
    host.run(*inside, "iptables", "-I", *rule)
    try:
        yield
    finally:
        host.run(*inside, "iptables", "-D", *rule)


@contextlib.contextmanager
def slow_cable(node):
    host.run(
        "tc", "qdisc", "add", "dev", node.link, "root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "50ms"
    )
    try:
        yield
    finally:
        host.run("tc", "qdisc", "del", "dev", node.link, "root")


def test_pods_find_a_slow_cable_and_a_blocked_port(bench):
    bench.cluster.need_box("hurts its network")
    slow, blocked = NODES[1:]
    with slow_cable(slow), blocked_port(blocked):
        code, results = check(bench, "--deep", "--no-train")
    assert code == 1
    assert any(f"to {slow.name} " in result["summary"] for result in found(results, "links", "warn")), results
    broken = [result["summary"] for result in found(results, "links", "fail")]
    assert broken, results
    assert all(summary.endswith(f"does not reach {blocked.name}") for summary in broken), broken
    assert found(results, "dns", "pass")
    assert found(results, "all-reduce", "pass")
    assert not bench.cluster.get("jobs", namespace=bench.namespace)["items"]


@pytest.mark.campaign
@pytest.mark.campaign_only
def test_pods_of_a_sound_cluster_pass_and_train(bench):
    code, results = check(bench, "--deep")
    told = {result["check"]: result["status"] for result in results}
    assert code == 0, [result for result in results if result["status"] == "fail"]
    assert (told["dns"], told["links"], told["all-reduce"], told["training"]) == ("pass",) * 4
    assert "disk" in told
    for kind in ("jobs", "trainjobs", "services"):
        assert not bench.cluster.get(kind, namespace=bench.namespace)["items"], kind
