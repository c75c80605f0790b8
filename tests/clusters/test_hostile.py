"""Odd nodes and devices, API servers that misbehave, kubeconfigs and helms that are not well: what is said of each."""

import json
import multiprocessing
import os
import time

import pytest
import yaml

from tests.clusters.conftest import daemonset, named, node
from tests.clusters.test_check import statuses, write_run
from tests.clusters.test_fix import keeping  # noqa: F401
from tests.clusters.test_listing import home, make_eks  # noqa: F401
from tests.kubernetes.api_server import write_kubeconfig
from windlass.clusters import helm as helm_module

CPU = ("resources.gpus_per_node=0", "resources.processes_per_node=1", "resources.instance=null")
NO_QUEUE = "target.kubernetes.queue=null"
MIG = "nvidia.com/mig-1g.10gb"
ON_MIG = (f"target.kubernetes.gpu_resource={MIG}", "resources.gpus_per_node=1", "resources.instance=null", NO_QUEUE)
ON_AMD = ("target.kubernetes.gpu_resource=amd.com/gpu", "resources.instance=null", NO_QUEUE)
WITH_RDMA = ("target.kubernetes.devices={rdma/ib: 8}", NO_QUEUE)


@pytest.fixture
def check(windlass, cluster, tmp_path):
    """Results of a check by their kind; none of what it meets is a bug of ours."""
    path = write_run(tmp_path, cluster)

    def run(*arguments, with_run=True, before=lambda: None):
        cluster.serve()
        before()
        answer = windlass("cluster", "check", *([str(path)] if with_run else []), *arguments, "--json")
        assert "unexpected" not in answer.err
        assert answer.out, answer.err
        return json.loads(answer.out)["results"]

    return run


def failed(results):
    return [result for result in results if result["status"] == "fail"]


def words(results):
    return " ".join(f"{result['summary']} {result['evidence']}" for result in results)


def change_nodes(cluster, labels=None, taints=None, **allocatable):
    for value in cluster.objects["nodes"]:
        value["metadata"]["labels"].update(labels or {})
        value["spec"]["taints"] = taints or []
        amounts = value["status"]["allocatable"]
        amounts.update({key.replace("__", "/"): amount for key, amount in allocatable.items()})
        value["status"]["allocatable"] = {key: amount for key, amount in amounts.items() if amount is not None}


def taint(key, value=""):
    return {"taints": [{"key": key, "value": value, "effect": "NoSchedule"}]}


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        ({"labels": {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}}, ()),
        ({"labels": {"kubernetes.io/os": "windows"}}, CPU),
        (taint("eks.amazonaws.com/compute-type", "fargate"), CPU),
        (taint("virtual-kubelet.io/provider", "azure"), CPU),
        (taint("node.cilium.io/agent-not-ready"), ()),
    ],
    ids=["hyperpod's health", "windows", "fargate", "virtual kubelet", "starting"],
)
def test_nodes_that_take_no_such_pods_are_not_free(check, cluster, change, arguments):
    change_nodes(cluster, **change)
    assert statuses(check(*arguments), "capacity") == ["fail"]


@pytest.mark.parametrize(("groups", "status"), [((), "fail"), (("karpenter.sh",), "warn")])
def test_a_cluster_without_nodes(check, cluster, groups, status):
    cluster.objects["nodes"] = []
    cluster.groups |= {group: ["v1"] for group in groups}
    results = check()
    assert (statuses(results, "nodes"), statuses(results, "capacity")) == (["warn"], [status])


def test_a_gpu_pool_that_is_scaled_to_zero_is_no_failure(check, cluster):
    cluster.objects["nodes"] = [node("cpu", gpus=0, efa=0, instance="m5.large", driver=None)]
    cluster.objects["deployments"].append(named("cluster-autoscaler", "kube-system"))
    results = check()
    assert statuses(results, "capacity") == ["warn"]
    assert not failed(results)


def test_nodes_that_say_nothing_of_themselves(check, cluster):
    cluster.objects["nodes"][0]["metadata"]["labels"] = None
    cluster.objects["nodes"] += [{"metadata": {"name": "bare"}}, named("null", spec=None, status=None)]
    cluster.objects["nodes"][1]["metadata"]["labels"]["nvidia.com/cuda.driver-version.full"] = "N/A"
    assert statuses(check(), "nodes") == ["warn", "pass"]


def test_parts_of_gpus(check, cluster):
    change_nodes(cluster, **{"nvidia.com__gpu": None, "nvidia.com__mig-1g.10gb": "7"})
    assert not failed(check(*ON_MIG))
    change_nodes(cluster, labels={"nvidia.com/cuda.driver-version.full": "470.57.02"})
    assert statuses(check(*ON_MIG), "driver") == ["fail"]
    change_nodes(cluster, **{"nvidia.com__mig-1g.10gb": None, "nvidia.com__mig-3g.40gb": "2"})
    assert MIG in words(failed(check(*ON_MIG)))


def test_amd_gpus_and_their_plugin(check, cluster):
    assert "amd.com/gpu" in words(failed(check("resources.gpus_per_node=8", *ON_AMD)))
    change_nodes(cluster, **{"nvidia.com__gpu": None, "amd.com__gpu": "8"})
    cluster.objects["daemonsets"] = [daemonset("amdgpu-device-plugin-daemonset")]
    assert not failed(check(*ON_AMD))
    cluster.objects["daemonsets"] = [daemonset("amdgpu-device-plugin-daemonset", ready=1)]
    assert statuses(check(*ON_AMD), "gpu-plugin") == ["fail", "pass"]


def test_rdma_devices_and_their_plugin(check, cluster):
    assert "rdma/ib" in words(failed(check(*WITH_RDMA)))
    change_nodes(cluster, rdma__ib="1k")
    assert not failed(check(*WITH_RDMA))
    cluster.objects["daemonsets"].append(daemonset("rdma-shared-dp-ds", ready=1))
    assert statuses(check(*WITH_RDMA), "rdma-plugin") == ["fail", "pass"]


@pytest.mark.parametrize(
    "setting", ["target.kubernetes.spares=1", "train.log_every=10000", "parallel.hang_seconds=0", "max_restarts=0"]
)
def test_hyperpods_settings(check, cluster, setting):
    cluster.groups["sagemaker.amazonaws.com"] = ["v1"]
    change_nodes(cluster, labels={"sagemaker.amazonaws.com/node-health-status": "Schedulable"})
    kinds = {"resources": [{"name": "hyperpodpytorchjobs", "kind": "HyperPodPyTorchJob"}]}
    results = check(
        "target.kubernetes.job=hyperpod",
        NO_QUEUE,
        setting,
        before=lambda: cluster.server.on("/apis/sagemaker.amazonaws.com/v1", lambda handler: handler.json(kinds)),
    )
    # two nodes are there, and a spare is a third
    assert statuses(results, "capacity") == (["warn"] if "spares" in setting else ["pass"]), results


def test_a_kind_that_is_served_in_another_version_than_its_group(check, cluster):
    cluster.groups["kubeflow.org"] = ["v1", "v2"]
    nothing = {"resources": [{"name": "notebooks", "kind": "Notebook"}]}
    jobs = {"resources": [{"name": "pytorchjobs", "kind": "PyTorchJob"}]}

    def serve():
        cluster.server.on("/apis/kubeflow.org/v1", lambda handler: handler.json(nothing))
        cluster.server.on("/apis/kubeflow.org/v2", lambda handler: handler.json(jobs))

    results = check(with_run=False, before=serve)
    assert "pytorchjobs.kubeflow.org: v2 is served, v1 is needed" in words(failed(results))


def page(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.send_header("Content-Length", "7")
    handler.end_headers()
    handler.wfile.write(b"Sign in")


def test_a_page_for_people_in_the_place_of_the_api(windlass, cluster):
    cluster.serve()
    for path in ("/apis/storage.k8s.io/v1/csidrivers", "/apis"):
        cluster.server.on(path, page)
        answer = windlass("cluster", "check")
        assert answer.code != 0
        assert "Sign in" in answer.err


def test_a_busy_server_is_asked_again_and_then_skipped(check, cluster):
    def busy(seconds):
        return lambda handler: handler.status(429, "TooManyRequests", "slow down", Retry_After=seconds)

    def serve():
        nodes = cluster.server.answers["/api/v1/nodes"]
        cluster.server.on("/api/v1/nodes", busy("1"), *nodes)
        cluster.server.on("/api/v1/pods", busy("0"))

    begin = time.monotonic()
    results = check(with_run=False, before=serve)
    assert time.monotonic() - begin >= 1
    assert (statuses(results, "nodes"), statuses(results, "capacity")) == (["pass"], ["skip"])
    assert "slow down" in words(results)


def test_who_may_do_nothing_is_told_every_verb(check, cluster):
    cluster.refused = {name: f'{name} is forbidden: User "ann"' for name in cluster.objects}
    verbs = ("create", "get", "list", "watch", "delete")
    core = ("secrets", "configmaps", "services", "pods", "pods/log", "pods/exec", "events", "pytorchjobs", "jobs")
    cluster.forbidden = {(verb, resource) for verb in verbs for resource in core}
    results = check(with_run=False)
    assert len([result for result in failed(results) if result["check"] == "permissions"]) == 15
    assert {result["check"] for result in results if result["status"] == "pass"} <= {"api", "namespace", "operators"}


def test_a_cluster_that_answers_no_review(check, cluster):
    def serve():
        for kind in ("selfsubjectrulesreviews", "selfsubjectaccessreviews"):
            path = f"/apis/authorization.k8s.io/v1/{kind}"
            cluster.server.on(path, lambda handler: handler.status(403, "Forbidden", "no reviews"))

    assert set(statuses(check(with_run=False, before=serve), "permissions")) == {"skip"}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_proxy_is_used_and_named(windlass, cluster, tmp_path, is_there):
    cluster.serve()
    proxy = cluster.server.url if is_there else "http://127.0.0.1:9"
    write_kubeconfig(tmp_path / "kubeconfig", "http://cluster.invalid", {"token": "t"}, **{"proxy-url": proxy})
    answer = windlass("cluster", "check")
    assert "2 of 2 nodes" in answer.out if is_there else proxy in answer.err, answer.err


def put_helm(folder, monkeypatch, text):
    program = folder / "bin" / "helm"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(helm_module, "TIMEOUT_SECONDS", 5.0)


def printing(text):
    return f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "evidence"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "did not end within 5 s"),
        ("no program at all", "Exec format error"),
        (printing("not: [yaml"), "cannot be read"),
        (printing("- a\n- b"), "no Kubernetes object"),
        (printing("just text"), "no Kubernetes object"),
        (printing("apiVersion: v1\nkind: ConfigMap"), "no Kubernetes object"),
        (printing(""), "rendered nothing"),
    ],
)
def test_a_helm_that_is_not_well(windlass, keeping, tmp_path, monkeypatch, program, evidence):  # noqa: F811
    keeping.serve_keeping()
    put_helm(tmp_path, monkeypatch, program)
    answer = windlass("cluster", "fix", "--helm", "kueue@0.18.3", "--yes")
    assert evidence in answer.err
    assert answer.code != 0
    assert not keeping.kept


def test_objects_of_a_list_are_made_one_by_one(windlass, keeping, tmp_path, monkeypatch):  # noqa: F811
    keeping.serve_keeping()
    inner = "{apiVersion: v1, kind: ConfigMap, metadata: {name: inner, namespace: team}}"
    put_helm(tmp_path, monkeypatch, printing(f"apiVersion: v1\nkind: List\nitems:\n- {inner}"))
    answer = windlass("cluster", "fix", "--helm", "kueue@0.18.3", "--yes")
    assert "/api/v1/namespaces/team/configmaps/inner" in keeping.kept, answer.err


def use(name):
    from windlass.cli.main import run_command

    return run_command(["cluster", "use", name])


@pytest.mark.slow
def test_clusters_that_are_used_at_once_are_all_kept(aws, home):  # noqa: F811
    names = ("one", "two", "three")
    for name in names:
        make_eks(aws, name)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert set(pool.map(use, names)) == {0}
    values = yaml.safe_load((home / ".kube" / "config").read_text())
    assert len(values["clusters"]) == len(values["contexts"]) == 3


def test_files_that_cannot_be_written(windlass, cluster, aws, home, monkeypatch):  # noqa: F811
    cluster.serve()
    answer = windlass("cluster", "check", "--context", "here", "--junit", "/proc/no/report.xml")
    assert not cluster.server.requests  # said before minutes of checks
    make_eks(aws, "one")
    monkeypatch.setenv("KUBECONFIG", "/proc/kube/config")
    answers = (answer, windlass("cluster", "use", "one"))
    assert all(answer.code != 0 and "unexpected" not in answer.err and "/proc/" in answer.err for answer in answers)


def test_a_link_to_a_kubeconfig_that_is_not_there_yet(windlass, aws, home):  # noqa: F811
    make_eks(aws, "one")
    (home / ".kube").mkdir()
    (home / ".kube" / "config").symlink_to(home / "elsewhere" / "config")
    assert windlass("cluster", "use", "one").code == 0
    assert (home / ".kube" / "config").is_symlink()
    assert (home / "elsewhere" / "config").is_file()


def test_a_current_context_that_is_gone(windlass, tmp_path, monkeypatch):
    clusters = [{"name": "c", "cluster": {"server": "https://a.example"}}]
    config = {"current-context": "gone", "contexts": [{"name": "a", "context": {"cluster": "c"}}], "clusters": clusters}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert "--context a" in windlass("cluster", "check").err
    assert windlass("cluster", "ls", "--no-aws").code == 0


def test_a_typo_of_the_target_has_a_fix(windlass, tmp_path, cluster):
    answer = windlass("run", str(write_run(tmp_path, cluster)), "--on", "kubernets")
    assert "fix       --on kubernetes\n" in answer.err
