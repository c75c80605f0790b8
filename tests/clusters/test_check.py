"""`windlass cluster check` over HTTP: a sound cluster passes, and each planted fault is named with its evidence."""

import base64
import json
from xml.etree import ElementTree

import pytest

from tests.clusters.conftest import daemonset, named, node
from tests.data.test_access import MODEL, start  # noqa: F401
from windlass.clusters.preflight import preflight
from windlass.clusters.snapshot import take
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import load_run
from windlass.targets import target
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access

RUN = """
name: big
model: {preset: llama-tiny}
data: {source: corpus:austen, sequence_length: 128}
train: {steps: 10, global_batch: 16}
resources: {nodes: 2, instance: p5.48xlarge}
image: {name: REGISTRY/train:2.9-cuda12.8}
target: {kubernetes: {job: pytorchjob, storage: "pvc:work", service_account: trainer, queue: main}}
"""


@pytest.fixture
def check(windlass, cluster, tmp_path):
    """Runs the check, with a run file unless told otherwise: exit code and results by check."""
    path = write_run(tmp_path, cluster)

    def run(*arguments, with_run=True):
        cluster.serve()
        answer = windlass("cluster", "check", *([str(path)] if with_run else []), *arguments, "--json")
        assert answer.out, answer.err
        value = json.loads(answer.out)
        return answer.code, value["results"]

    return run


def write_run(folder, cluster):
    path = folder / "big.yaml"
    path.write_text(RUN.replace("REGISTRY", cluster.server.url.removeprefix("http://")))
    return path


def statuses(results, check):
    return [result["status"] for result in results if result["check"] == check]


@pytest.mark.parametrize("with_run", [True, False])
def test_a_sound_cluster_passes(check, with_run):
    code, results = check(with_run=with_run)
    assert {result["status"] for result in results} == {"pass"}, [one for one in results if one["status"] != "pass"]
    assert code == 0


def plant_pod(cluster, *, gpus):
    resources = {"requests": {"nvidia.com/gpu": str(gpus)}}
    spec = {"nodeName": "a", "containers": [{"name": "c", "resources": resources}]}
    cluster.objects["pods"] = [named("other", "else", spec=spec, status={"phase": "Running"})]


def quota(hard, used):
    return named(
        "team", spec={}, status={"hard": {"requests.nvidia.com/gpu": hard}, "used": {"requests.nvidia.com/gpu": used}}
    )


FAULTS = {
    "old server": (lambda it: it.version.update(minor="24", gitVersion="v1.24.0"), "api", "warn", "v1.24.0"),
    "no permission": (lambda it: it.forbidden.add(("create", "pytorchjobs")), "permissions", "fail", "SelfSubject"),
    "no exec": (lambda it: it.forbidden.add(("create", "pods/exec")), "permissions", "warn", "SelfSubject"),
    "operator down": (
        lambda it: it.objects["deployments"][0]["status"].clear(), "operators", "fail", "0 of 1 replicas are ready",
    ),
    "operator gone": (lambda it: it.objects["deployments"].clear(), "operators", "warn", "training-operator"),
    "other version": (
        lambda it: it.groups.update({"kubeflow.org": ["v2"]}), "operators", "fail", "v2 is served, v1 is needed",
    ),
    "node down": (
        lambda it: it.objects["nodes"].append(node("c", ready="Unknown")), "nodes", "warn", "stopped posting",
    ),
    "node cordoned": (
        lambda it: it.objects["nodes"].append(node("c", unschedulable=True)), "nodes", "warn", "spec.unschedulable: c",
    ),
    "pressure": (
        lambda it: it.objects["nodes"][0]["status"]["conditions"].append(
            {"type": "GpuXidError", "status": "True", "message": "XID 79 on GPU 3"}
        ),
        "health", "warn", "a: GpuXidError: XID 79 on GPU 3",
    ),
    "hyperpod label": (
        lambda it: it.objects["nodes"][1]["metadata"]["labels"].update(
            {"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"}
        ),
        "health", "warn", "UnschedulablePendingReboot",
    ),
    "two zones": (
        lambda it: it.objects["nodes"][1]["metadata"]["labels"].update({"topology.kubernetes.io/zone": "us-west-2b"}),
        "zones", "fail", "us-west-2a: 1 nodes, us-west-2b: 1 nodes",
    ),
    "plugin not ready": (
        lambda it: it.objects.update(daemonsets=[daemonset("nvidia-device-plugin-daemonset", ready=1)]),
        "gpu-plugin", "fail", "desiredNumberScheduled 2, numberReady 1",
    ),
    "gpu missing": (
        lambda it: it.objects["nodes"].append(node("c", gpus=7)), "gpu-plugin", "warn", "status.allocatable says 7",
    ),
    "no plugin": (
        lambda it: it.objects.update(daemonsets=[], nodes=[node("a", gpus=0), node("b", gpus=0)]),
        "gpu-plugin", "fail", "no DaemonSet is called nvidia-device-plugin",
    ),
    "no efa": (
        lambda it: it.objects.update(nodes=[node("a", efa=0), node("b", efa=0)]), "efa-plugin", "fail", "has 32",
    ),
    "old driver": (
        lambda it: it.objects["nodes"].append(node("c", driver="470.57.02")), "driver", "fail", "c: 470.57.2",
    ),
    "gpus in use": (lambda it: plant_pod(it, gpus=4), "capacity", "warn", "a pod asks for"),
    "too few nodes": (lambda it: it.objects["nodes"].pop(), "capacity", "fail", "a pod asks for"),
    "quota nearly full": (
        lambda it: it.objects["quotas"].append(quota("16", "8")), "quota", "warn", "8 of 16 used",
    ),
    "quota too small": (lambda it: it.objects["quotas"].append(quota("8", "0")), "quota", "fail", "0 of 8 used"),
    "no queue": (lambda it: it.objects["local_queues"].clear(), "queue", "fail", "queues there: none"),
    "queue stopped": (
        lambda it: it.objects["cluster_queues"][0].update(
            status={"conditions": [{"type": "Active", "status": "False", "message": "cluster queue is stopped"}]}
        ),
        "queue", "fail", "cluster queue is stopped",
    ),
    "queue too small": (
        lambda it: it.objects["cluster_queues"][0]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0].update(
            nominalQuota="8"
        ),
        "queue", "fail", "may borrow: 8",
    ),
    "no kueue": (lambda it: it.groups.pop("kueue.x-k8s.io"), "queue", "fail", "kueue.x-k8s.io is not in /apis"),
    "namespace going": (
        lambda it: it.namespace.update(status={"phase": "Terminating"}), "run", "fail", "context here",
    ),
    "no service account": (
        lambda it: it.objects["service_accounts"].pop(), "service-account", "fail", "service accounts there: default",
    ),
    "no claim": (lambda it: it.objects["claims"].clear(), "claim", "fail", "claims there: none"),
    "not shared": (
        lambda it: it.objects["claims"][0]["spec"].update(accessModes=["ReadWriteOnce"]), "claim", "fail", "WriteOnce",
    ),
    "not bound": (
        lambda it: it.objects["claims"][0]["status"].update(phase="Pending"), "claim", "warn", "phase of team/work",
    ),
    "no csi driver": (lambda it: it.objects["csi_drivers"].clear(), "storage", "warn", "provisioner fsx.csi.aws.com"),
}  # fmt: skip


def challenge(handler):
    """A registry that wants a password."""
    if handler.headers.get("Authorization") == "Basic " + base64.b64encode(b"ann:right").decode():
        handler.json({"config": {}})
    else:
        handler.json({"errors": [{"code": "UNAUTHORIZED"}]}, 401, WWW_Authenticate="Basic realm=here")


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io"])
def test_a_pull_secret_of_docker_hub_is_known_by_what_kubectl_calls_it(key):
    from windlass.clusters.outside import _from_secret

    config = json.dumps({"auths": {key: {"username": "me", "password": "p"}}})
    secret = {"data": {".dockerconfigjson": base64.b64encode(config.encode()).decode()}}
    assert _from_secret(secret, "docker.io") is not None
    assert _from_secret(secret, "registry.example.com") is None


def pull_secret(cluster, password):
    auth = {"auth": base64.b64encode(f"ann:{password}".encode()).decode()}
    config = json.dumps({"auths": {cluster.server.url.removeprefix("http://"): auth}})
    cluster.secrets["pull"] = named("pull", data={".dockerconfigjson": base64.b64encode(config.encode()).decode()})
    cluster.objects["service_accounts"][1]["imagePullSecrets"] = [{"name": "pull"}]


@pytest.mark.parametrize(
    ("answer", "password", "status", "evidence"),
    [
        (challenge, "right", "pass", ""),
        (challenge, "wrong", "fail", "UNAUTHORIZED"),
        (challenge, None, "warn", "UNAUTHORIZED"),  # nodes may have credentials that this machine has not
        (lambda handler: handler.json({"errors": []}, 404), None, "fail", "answers 404"),
        (lambda handler: handler.json({"errors": []}, 500), None, "skip", "answers 500"),
    ],
)
def test_the_image_can_be_pulled(check, cluster, monkeypatch, tmp_path, answer, password, status, evidence):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    cluster.image = answer
    if password:
        pull_secret(cluster, password)
    (result,) = [result for result in check()[1] if result["check"] == "image"]
    assert (result["status"], evidence in (result["evidence"] or "")) == (status, True), result


def test_an_image_of_ecr_is_skipped_where_aws_knows_nobody(check, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    results = check("image.name=123456789012.dkr.ecr.us-west-2.amazonaws.com/train:cuda12.8")[1]
    (result,) = [result for result in results if result["check"] == "image"]
    assert (result["status"], "AWS does not know who you are" in result["evidence"]) == ("skip", True)


@pytest.mark.parametrize(
    ("gated", "token", "secrets", "status", "words"),
    [
        ("manual", None, "", "fail", "access to it must be granted first"),
        ("manual", "known", "", "fail", "HF_TOKEN does not go to the pods"),
        ("manual", "known", "target.kubernetes.secrets=['HF_TOKEN']", "pass", ""),
        (False, "known", "", "pass", ""),
    ],
)
def test_a_gated_model_needs_a_token_in_the_pods(check, start, monkeypatch, gated, token, secrets, status, words):  # noqa: F811
    start(gated=gated, tokens={"known": "granted"})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    results = check(f"data.tokenizer={MODEL}", *([secrets] if secrets else []))[1]
    (result,) = [result for result in results if result["check"] == "hub"]
    assert (result["status"], words in result["summary"]) == (status, True), result


def test_a_restricted_namespace_takes_the_runs_pods(check, cluster):
    """What its pods would lack without the namespace being known is in test_odd.py."""
    cluster.namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
    (result,) = [result for result in check()[1] if result["check"] == "namespace"]
    assert (result["status"], result["summary"]) == ("pass", "the namespace team enforces PodSecurity restricted")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_its_evidence(check, cluster, fault):
    plant, name, status, evidence = FAULTS[fault]
    plant(cluster)
    code, results = check()
    found = [result for result in results if result["check"] == name and result["status"] == status]
    assert any(evidence in (result["evidence"] or "") for result in found), results
    assert all(result["fix"] for result in found if result["status"] == "fail" and "active" not in result["summary"])
    assert code == (1 if "fail" in {result["status"] for result in results} else 0)


def test_what_may_not_be_read_is_skipped_and_said(check, cluster):
    cluster.refused = dict.fromkeys(
        ("nodes", "pods", "daemonsets", "deployments", "quotas"), 'nodes is forbidden: "ann"'
    )
    cluster.forbidden = {("list", "nodes")}
    code, results = check(with_run=False)
    skipped = {result["check"] for result in results if result["status"] == "skip"}
    assert {"nodes", "capacity", "quota"} <= skipped
    assert all("forbidden" in result["evidence"] for result in results if result["status"] == "skip")
    assert statuses(results, "permissions") == ["warn"]
    assert code == 0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("operator down", "is not ready, so no pods are made"),
        ("old driver", "CUDA 12 needs driver 525.60.13"),
        ("two zones", "no zone has the 2 nodes"),
        ("plugin not ready", "is ready on 1 of 2 nodes"),
    ],
)
def test_every_run_is_checked_before_it_is_sent(cluster, tmp_path, fault, expected):
    FAULTS[fault][0](cluster)
    cluster.serve()
    run, request = rendered(write_run(tmp_path, cluster))
    try:
        told = " ".join(preflight(run, request))
    except UserError as error:
        told = str(error)
    assert expected in told


def rendered(path):
    run = load_run(str(path), ["target.kind=kubernetes"])
    where = target(run.target)
    settled = resolve(where.settle(run))
    return settled, where.render(settled, where.gather(settled))


@pytest.mark.parametrize("with_run", [True, False])
def test_a_thousand_nodes_take_at_most_thirty_requests(windlass, cluster, tmp_path, with_run):
    cluster.groups |= {"trainer.kubeflow.org": ["v1alpha1"], "sagemaker.amazonaws.com": ["v1"]}
    cluster.objects["nodes"] = [node(f"n{number}") for number in range(1000)]
    pod = named("p", "else", spec={"nodeName": "n1", "containers": []}, status={"phase": "Running"})
    cluster.objects["pods"] = [pod] * 10_000
    cluster.serve()
    answer = windlass("cluster", "check", *([str(write_run(tmp_path, cluster))] if with_run else []), "--json")
    assert answer.code == 0
    requests = [request for request in cluster.server.requests if not request[1].startswith("/v2/")]  # the registry's
    assert json.loads(answer.out)["requests"] == len(requests) <= 30
    asked = [(path, *sorted(params.items())) for _, path, params in requests]
    assert len(asked) == len(set(asked))  # nothing is asked twice


def test_junit_for_ci(check, cluster, tmp_path):
    cluster.objects["nodes"][0]["status"]["conditions"].append(
        {"type": "Sick", "status": "True", "message": "bell \a and <tag>"}
    )
    cluster.objects["claims"].clear()
    check("--junit", str(tmp_path / "report.xml"))
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "1"
    assert "claims there: none" in suite.find("testcase/failure").text


def test_text_is_for_people(windlass, cluster):
    cluster.objects["nodes"][1] = node("b", unschedulable=True)
    cluster.serve()
    answer = windlass("cluster", "check")
    assert "1 of 2 nodes are cordoned" in answer.out
    assert "fix: kubectl uncordon b" in answer.out
    assert answer.code == 0


def test_nobody_answers(windlass, cluster):
    cluster.server.stop()
    answer = windlass("cluster", "check")
    assert answer.code != 0
    assert "Traceback" not in answer.err
    cluster.server.stop = lambda: None


def test_another_kind_of_the_same_group_is_no_training_operator(check, cluster):
    cluster.groups["kubeflow.org"] = ["v2beta1"]  # the MPI operator's
    cluster.kubeflow = [{"name": "mpijobs", "kind": "MPIJob"}]
    code, results = check(with_run=False)
    assert statuses(results, "operators") == ["pass"]
    assert code == 0


def test_a_role_of_one_namespace_lets_nobody_list_nodes(check, cluster):
    cluster.refused = {"nodes": 'nodes is forbidden: User "ann"'}
    (result,) = [result for result in check(with_run=False)[1] if result["check"] == "permissions"]
    assert (result["status"], result["evidence"]) == ("warn", 'nodes is forbidden: User "ann"')


@pytest.mark.parametrize(
    ("forbidden", "status", "num_reviews"),
    [(set(), "pass", 2), ({("create", "secrets")}, "fail", 15)],
)
def test_rules_that_the_cluster_does_not_list_are_asked_for(check, cluster, forbidden, status, num_reviews):
    """EKS' access entries and GKE's IAM are webhooks: their rules are in no list."""
    cluster.has_other_rules, cluster.forbidden = True, forbidden
    _, results = check()
    assert statuses(results, "permissions") == [status]
    reviews = [path for _, path, _ in cluster.server.requests if "reviews" in path]
    assert len(reviews) == num_reviews


def test_of_a_pod_only_what_it_holds_is_kept(cluster):
    fields = {"managedFields": ["x" * 9000], "labels": {"windlass.dev/run": "mine"}}
    resources = {"requests": {"nvidia.com/gpu": "2"}}
    containers = [{"name": "c", "image": "x" * 9000, "resources": resources}]
    pod = {"metadata": {"name": "p", **fields}, "spec": {"nodeName": "a", "containers": containers}, "status": None}
    cluster.objects["pods"] = [pod, {"metadata": {"name": "q"}}]
    cluster.serve()
    snapshot = take(Api(access()), "team")
    assert len(json.dumps(snapshot.pods)) < 1000
    assert snapshot.rooms["a"].used["nvidia.com/gpu"] == 2
