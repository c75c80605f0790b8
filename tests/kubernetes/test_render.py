"""Runs as Kubernetes objects: golden files, schemas of every supported version, single decisions. Talks to nobody."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.golden import CLUSTERS, GOLDEN, KINDS, SERVED, cluster_of, files, rendered, request_of, run_of
from windlass.catalog.models import presets
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import parse_run
from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, JobKind, NodeFacts, Served, ServedKind
from windlass.targets.kubernetes.manifests.code import Carried
from windlass.targets.kubernetes.manifests.labels import LONGEST_NAME, safe_name
from windlass.targets.kubernetes.manifests.pod import merge_pod
from windlass.targets.kubernetes.manifests.render import check, layout_of, pick, render, settle
from windlass.targets.kubernetes.manifests.validation import mistakes_in, schema_of, validate, versions_of


def test_golden():
    """`python -m tests.kubernetes.golden` writes the files anew: read what changed before it is committed."""
    expected = dict(files())
    assert {path.name for path in GOLDEN.glob("*.yaml")} == {path.name for path in expected}
    for path, text in expected.items():
        assert path.read_text() == text, path.name


@pytest.mark.parametrize("kind", JobKind)
def test_every_preset_as_every_kind_is_valid_in_every_supported_version(kind):
    for preset in presets():
        for manifest in rendered(preset, kind).objects:
            for version in versions_of(manifest["kind"]):
                assert mistakes_in(manifest, version) == [], (preset, manifest["kind"], version)


def test_every_option_is_in_some_golden_file():
    shown = {key for _, _, options in CLUSTERS.values() for key in options}
    assert shown >= {"queue", "deadline", "keep_for", "min_nodes", "secrets", "service_account", "pod", "spread"}


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True))
def test_names_are_safe_stable_and_different(name):
    safe = safe_name(name)
    assert len(safe) <= LONGEST_NAME
    assert safe == safe.lower()
    assert safe[0].isalpha()
    assert safe[-1].isalnum()
    assert all(letter.isalnum() or letter == "-" for letter in safe)
    assert safe_name(name) == safe
    if safe != name:
        assert safe_name(name + "x"[: 63 - len(name)]) != safe or len(name) == 63
        assert safe_name(safe) == safe


def test_names_that_differ_only_in_letters_kubernetes_does_not_have():
    names = ["a.b", "a_b", "A-b", "a-b", "a--b"]
    assert len({safe_name(name) for name in names}) == len(names)


def kinds(*served, **more):
    return Served({kind: KINDS[kind] for kind in served}, **more)


@pytest.mark.parametrize(
    ("served", "picked"),
    [
        ([JobKind.TRAINJOB, JobKind.PYTORCHJOB, JobKind.HYPERPOD, JobKind.INDEXED], JobKind.TRAINJOB),
        ([JobKind.PYTORCHJOB, JobKind.HYPERPOD, JobKind.INDEXED], JobKind.PYTORCHJOB),
        ([JobKind.HYPERPOD, JobKind.INDEXED], JobKind.HYPERPOD),
        ([JobKind.INDEXED], JobKind.INDEXED),
        ([], JobKind.INDEXED),
    ],
)
def test_the_kind_is_what_the_cluster_serves(served, picked):
    run = run_of("llama-tiny", JobKind.INDEXED)
    options = run.target.kubernetes.model_copy(update={"job": None})
    run = run.model_copy(update={"target": run.target.model_copy(update={"kubernetes": options})})
    assert pick(run, kinds(*served)) is picked


def test_a_kind_by_name_that_is_not_there():
    with pytest.raises(UserError) as error:
        pick(run_of("llama-tiny", JobKind.TRAINJOB), kinds(JobKind.PYTORCHJOB))
    assert "Kubeflow Trainer is not installed" in error.value.what
    assert "it serves pytorchjob, job" in error.value.evidence


def test_what_is_printed_is_what_is_sent_but_for_secrets():
    request = request_of("llama3.1-8b", JobKind.PYTORCHJOB)
    for secret in ("hf_golden", "golden-token"):
        assert secret not in str(request)
        assert secret not in repr(request)
        assert secret not in json.dumps(request.as_dict())
    assert tuple(yaml.safe_load_all(str(request))) == request.objects
    sent = [request.with_secret_values(manifest) for manifest in request.objects]
    values = {"HF_TOKEN": "hf_golden", "WINDLASS_TOKEN": "golden-token"}
    assert [manifest["stringData"] for manifest in sent if manifest["kind"] == "Secret"] == [values]
    assert [manifest for manifest in sent if manifest["kind"] != "Secret"] == [
        manifest for manifest in request.objects if manifest["kind"] != "Secret"
    ]


def test_the_digest_is_of_the_request_and_not_of_the_submission():
    cluster = cluster_of("llama-tiny")
    run = resolve(settle(run_of("llama-tiny", JobKind.INDEXED), cluster))

    def digest(run=run, submission="a", **carried):
        return render(run, cluster, Carried(**carried), submission=submission).digest

    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 7})})
    elsewhere = run.target.kubernetes.model_copy(update={"context": "other"})
    from_elsewhere = run.model_copy(update={"target": run.target.model_copy(update={"kubernetes": elsewhere})})
    assert digest() == digest(submission="b") == digest(from_elsewhere)
    assert len({digest(), digest(longer), digest(archives={"code": b"1"}), digest(archives={"code": b"2"})}) == 4


@pytest.mark.parametrize("kind", [JobKind.TRAINJOB, JobKind.PYTORCHJOB, JobKind.INDEXED])
def test_pods_map_to_ranks(kind):
    run = settle(run_of("llama-tiny", kind), cluster_of("llama-tiny"))
    layout = layout_of(kind, run)
    indexed = {"batch.kubernetes.io/job-completion-index": "2"}
    replica = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "1"}
    master = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    assert layout.node_of(replica if kind is JobKind.PYTORCHJOB else indexed) == 2
    if kind is JobKind.PYTORCHJOB:
        assert layout.node_of(master) == 0
    assert layout.node_of({}) is None
    assert list(layout.ranks_of(2)) == [4, 5]
    assert layout.node_of_rank(5) == 2


def container_of(request):
    spec = request.job["spec"]
    template = spec.get("template") or spec["pytorchReplicaSpecs"]["Master"]["template"]
    return template["spec"]["containers"][0], template["spec"]


def test_a_part_of_an_instance_gets_its_share_and_no_efa():
    cluster = cluster_of("llama3.1-8b")
    run = run_of("llama3.1-8b", JobKind.INDEXED)
    part = run.resources.model_copy(update={"gpus_per_node": 4})
    run = resolve(settle(run.model_copy(update={"resources": part}), cluster))
    container, pod = container_of(render(run, cluster, Carried(), submission="a"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "vpc.amazonaws.com/efa" not in container["resources"]["limits"]
    assert float(container["resources"]["requests"]["cpu"]) <= 96
    assert "podAffinity" not in pod.get("affinity", {})


def test_more_efa_than_the_instance_has_is_refused():
    with pytest.raises(UserError, match="has 32 EFA interfaces, not 33"):
        request_of("llama3.1-8b", JobKind.INDEXED, efa=33)


def test_amounts_come_from_the_nodes_where_no_instance_is_named():
    nodes = [
        NodeFacts("cpu", allocatable={"cpu": "64", "memory": "256Gi"}),
        NodeFacts(
            "gpu",
            allocatable={"cpu": "100", "memory": "1000Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"},
        ),
        NodeFacts("broken", allocatable={"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "16"}, ready=False),
    ]
    cluster = ClusterFacts(SERVED, "team", nodes)
    run = run_of("llama3.1-8b", JobKind.INDEXED)
    anywhere = run.resources.model_copy(update={"instance": None})
    run = settle(run.model_copy(update={"resources": anywhere}), cluster)
    assert (run.resources.gpus_per_node, run.resources.processes_per_node) == (8, 8)
    container, pod = container_of(render(resolve(run), cluster, Carried(), submission="a"))
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "4"
    assert container["resources"]["requests"]["cpu"] == "93"
    assert "nodeSelector" not in pod


def test_gpus_are_not_guessed():
    run = run_of("llama3.1-8b", JobKind.INDEXED)
    unsaid = run.model_copy(update={"resources": run.resources.model_copy(update={"instance": None})})
    with pytest.raises(UserError, match="how many GPUs"):
        settle(unsaid, ClusterFacts(SERVED, "team"))


def test_only_instances_without_efa_are_told_to_use_sockets():
    def names(instance):
        run = run_of("llama3.1-8b", JobKind.INDEXED)
        on = run.model_copy(update={"resources": run.resources.model_copy(update={"instance": instance})})
        cluster = ClusterFacts(SERVED, "team")
        container, _ = container_of(render(resolve(settle(on, cluster)), cluster, Carried(), submission="a"))
        return {variable["name"] for variable in container["env"]}

    assert "NCCL_NET" in names("g5.4xlarge")
    assert "NCCL_NET" not in names("p5.48xlarge")
    for forbidden in ("NCCL_ALGO", "NCCL_BUFFSIZE", "FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "GLOO_SOCKET_IFNAME"):
        assert forbidden not in names("p5.48xlarge")


@pytest.mark.parametrize(
    ("version", "way"),
    [
        ("2.0", "podSpecOverrides"),
        ("2.1", "podTemplateOverrides"),
        ("2.2", "runtimePatches"),
        ("2.3", "runtimePatches"),
    ],
)
def test_a_named_runtime_is_changed_as_its_version_allows(version, way):
    schema = schema_of(f"trainjob-{version}", "TrainJob")
    kind = ServedKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", schema)
    served = Served({JobKind.TRAINJOB: kind}, kubernetes=(1, 33))
    request = request_of("llama-tiny", JobKind.TRAINJOB, served, runtime="torch-distributed")
    assert [manifest["kind"] for manifest in request.objects].count("TrainingRuntime") == 0
    assert way in request.job["spec"]
    assert mistakes_in(request.job, f"trainjob-{version}") == []


def test_what_an_old_trainer_cannot_change_is_refused():
    kind = ServedKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", schema_of("trainjob-2.0", "TrainJob"))
    served = Served({JobKind.TRAINJOB: kind}, kubernetes=(1, 33))
    with pytest.raises(UserError, match="cannot change affinity"):
        request_of("llama3.1-8b", JobKind.TRAINJOB, served, runtime="torch-distributed")


def test_a_deadline_on_a_named_runtime_needs_a_trainer_that_knows_it():
    kind = ServedKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", schema_of("trainjob-2.1", "TrainJob"))
    served = Served({JobKind.TRAINJOB: kind}, kubernetes=(1, 33))
    with pytest.raises(UserError, match="knows no deadline"):
        request_of("llama3.1-8b", JobKind.TRAINJOB, served, runtime="torch-distributed", deadline="1h")


def test_elastic_jobs_of_each_kind():
    assert request_of("mistral-tiny", JobKind.INDEXED).job["spec"]["successPolicy"]
    spec = request_of("mistral-tiny", JobKind.PYTORCHJOB).job["spec"]
    assert spec["elasticPolicy"]["minReplicas"] == 2
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    old = Served(KINDS, kubernetes=(1, 30))
    with pytest.raises(UserError, match=r"needs Kubernetes 1\.31"):
        request_of("mistral-tiny", JobKind.INDEXED, old)


def test_grace_is_longer_than_a_save():
    run = run_of("llama-tiny", JobKind.INDEXED)
    longer = run.checkpoint.model_copy(update={"grace_seconds": 500})
    cluster = cluster_of("llama-tiny")
    run = resolve(settle(run.model_copy(update={"checkpoint": longer}), cluster))
    _, pod = container_of(render(run, cluster, Carried(), submission="a"))
    assert pod["terminationGracePeriodSeconds"] == 560


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "none"}, "no place in common"),
        ({"min_nodes": 9}, "min_nodes is 9 but the run has 3 nodes"),
    ],
)
def test_what_no_cluster_can_run_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        check(run_of("llama-tiny", JobKind.INDEXED, **options))


def test_a_run_without_an_image_is_refused():
    run = run_of("llama-tiny", JobKind.INDEXED)
    with pytest.raises(UserError, match="which image"):
        check(run.model_copy(update={"image": run.image.model_copy(update={"name": None})}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "fsx"}, "is not understood"),
        ({"storage": "pvc:fsx/../other"}, "leads out of its claim"),
        ({"deadline": "soon"}, "is no duration"),
        ({"memory": "lots"}, "is no quantity"),
        ({"secrets": ["HF_TOKEN=hf_abc123"]}, "never belongs into a run file"),
        ({"secrets": ["A"], "environment": {"A": "1"}}, "gives the variable A twice"),
        ({"runtime": "x", "job": "job"}, "belongs to a trainjob"),
        ({"imagee": "x"}, "did you mean target.kubernetes.image?"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(UserError) as error:
        run_of("llama-tiny", JobKind.INDEXED, **options)
    assert words in str(error.value)
    assert "hf_abc123" not in str(error.value)


def test_an_overlay_is_merged_by_name():
    below = {
        "containers": [
            {"name": "node", "image": "a", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        ],
        "volumes": [{"name": "runs", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": [{"key": "gpu"}],
        "nodeSelector": {"a": "1"},
        "restartPolicy": "Never",
    }
    above = {
        "containers": [
            {"name": "trainer", "env": [{"name": "B", "valueFrom": {"fieldRef": {}}}, {"name": "C", "value": "3"}]},
            {"name": "sidecar", "image": "b"},
        ],
        "volumes": [{"name": "runs", "hostPath": {"path": "/x"}}, {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}],
        "tolerations": [{"key": "other"}],
        "nodeSelector": {"b": "2"},
        "restartPolicy": None,
        "hostNetwork": True,
    }
    merged = merge_pod(below, above, container="node")
    assert [container["name"] for container in merged["containers"]] == ["node", "sidecar"]
    assert merged["containers"][0]["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {}}},
        {"name": "C", "value": "3"},
    ]
    assert merged["volumes"] == [
        {"name": "runs", "hostPath": {"path": "/x"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]
    assert merged["tolerations"] == [{"key": "gpu"}, {"key": "other"}]
    assert merged["nodeSelector"] == {"a": "1", "b": "2"}
    assert merged["hostNetwork"] is True
    assert "restartPolicy" not in merged
    assert below["restartPolicy"] == "Never"


def test_an_overlay_with_a_mistake_is_named_before_anything_is_sent():
    request = request_of("llama-tiny", JobKind.INDEXED, pod={"containers": [{"name": "trainer", "comand": ["x"]}]})
    with pytest.raises(UserError) as error:
        validate(request.objects)
    assert "containers[0].comand; did you mean command?" in error.value.evidence


def test_wrong_types_values_and_missing_fields_are_named():
    request = request_of("llama-tiny", JobKind.INDEXED, pod={"hostNetwork": "yes", "restartPolicy": 3})
    with pytest.raises(UserError) as error:
        validate(request.objects)
    assert "hostNetwork: boolean is expected, not 'yes'" in error.value.evidence
    job = request_of("mistral-tiny", JobKind.HYPERPOD).job
    job["spec"]["runPolicy"]["cleanPodPolicy"] = "Some"
    del job["spec"]["replicaSpecs"][0]["name"]
    assert mistakes_in(job, "hyperpod-1") == [
        "spec.replicaSpecs[0].name is missing",
        "spec.runPolicy.cleanPodPolicy: 'Some' is none of All, OnlyComplete, None",
    ]


def test_fields_newer_than_a_version_are_not_in_its_schema():
    job = request_of("llama-tiny", JobKind.PYTORCHJOB).job
    job["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert mistakes_in(job, "pytorchjob-1.9") == []
    assert mistakes_in(job, "pytorchjob-1.7") == ["unknown field spec.runPolicy.managedBy"]


def test_schemas_are_small():
    from importlib import resources

    folder = resources.files("windlass.targets.kubernetes.manifests").joinpath("schemas")
    assert sum(len(path.read_bytes()) for path in folder.iterdir()) < 300_000


def test_the_run_file_says_where(tmp_path):
    run = parse_run(
        {
            "name": "x",
            "model": {"preset": "llama-tiny"},
            "data": {},
            "target": {"kind": "kubernetes", "kubernetes": {"context": "prod", "namespace": "team"}},
        }
    )
    assert (run.target.kubernetes.context, run.target.kubernetes.namespace) == ("prod", "team")


def job_of(request):
    """The batch Job's spec, alone or inside a TrainingRuntime."""
    runtime = next((manifest for manifest in request.objects if manifest["kind"] == "TrainingRuntime"), None)
    if runtime is None:
        return request.job["spec"]
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("kind", [JobKind.INDEXED, JobKind.TRAINJOB])
def test_pods_that_had_to_leave_do_not_count_as_failures(kind):
    spec = job_of(request_of("llama-tiny", kind, max_pod_failures=0))
    assert spec["backoffLimit"] == 0
    container = spec["template"]["spec"]["containers"][0]["name"]
    codes = {"containerName": container, "operator": "In"}
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailIndex", "onExitCodes": {**codes, "values": [1, 2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [143]}},
    ]
    assert spec["backoffLimitPerIndex"] > spec["backoffLimit"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    before = job_of(request_of("llama-tiny", kind, Served(KINDS, kubernetes=(1, 28))))
    assert "backoffLimitPerIndex" not in before
    assert before["podFailurePolicy"]["rules"][0]["action"] == "FailJob"


def test_a_lost_node_costs_seconds():
    def given(**options):
        tolerations = container_of(request_of("llama-tiny", JobKind.PYTORCHJOB, **options))[1]["tolerations"]
        return {toleration["key"]: toleration.get("tolerationSeconds") for toleration in tolerations}

    unreachable, not_ready = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"
    assert given() == {unreachable: 30, not_ready: 30}
    assert given(node_lost_seconds=5) == {unreachable: 5, not_ready: 5}
    own = {"key": unreachable, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}
    assert given(tolerations=[own]) == {unreachable: 600, not_ready: 30}
    assert given(pod={"tolerations": [own]}) == {unreachable: 600, not_ready: 30}


def big(number, **more):
    amounts = {"cpu": "191", "memory": "2000Gi", "nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    return NodeFacts(f"p5-{number}", labels={"pool": "big"}, allocatable={**amounts, **more})


SMALL = [
    NodeFacts(f"g5-{i}", labels={"pool": "small"}, allocatable={"cpu": "47", "memory": "180Gi", "nvidia.com/gpu": "4"})
    for i in range(2)
]
WITHOUT = NodeFacts("system", allocatable={"cpu": "4", "memory": "16Gi"})
TAINTED = NodeFacts("control", allocatable={"cpu": "2"}, taints=[{"key": "control-plane", "effect": "NoSchedule"}])


def on(nodes, kind=JobKind.INDEXED, served=SERVED, gpus=None, instance=None, **options):
    """A run of two nodes on a cluster, settled, and its request."""
    cluster = ClusterFacts(served, "team", nodes)
    run = run_of("llama3.1-8b", kind, **{"secrets": [], **options})
    asked = run.resources.model_copy(update={"instance": instance, "gpus_per_node": gpus})
    run = resolve(settle(run.model_copy(update={"resources": asked}), cluster))
    return run, render(run, cluster, Carried(), submission="a")


def limits_of(request):
    return container_of(request)[0]["resources"]["limits"]


def test_huge_pages_are_asked_for_where_the_nodes_have_them():
    pages = "hugepages-2Mi"
    assert pages not in limits_of(on([big(0), big(1)])[1])
    assert limits_of(on([big(0, **{pages: "10Gi"}), big(1, **{pages: "10Gi"})])[1])[pages] == "5120Mi"
    assert pages not in limits_of(on([big(0, **{pages: "10Gi"}), big(1)])[1])
    assert pages not in limits_of(on([], instance="p5.48xlarge")[1])


def test_amounts_are_those_of_the_nodes_that_the_selector_chooses():
    run, request = on([big(0), *SMALL], node_selector={"pool": "small"})
    assert run.resources.gpus_per_node == 4
    assert limits_of(request)["nvidia.com/gpu"] == "4"
    assert "podAntiAffinity" in container_of(request)[1]["affinity"]
    assert on([big(0), *SMALL, TAINTED])[0].resources.gpus_per_node == 8
    assert on([WITHOUT, TAINTED], gpus=0)[0].resources.threads_per_process == 3  # of the four of the node that takes it


@pytest.mark.parametrize("selector", [{}, {"karpenter.sh/nodepool": "gpu"}])
def test_a_gpu_pool_that_is_scaled_to_zero_is_no_reason_to_train_on_cpus(selector):
    with pytest.raises(UserError) as error:
        on([WITHOUT], node_selector=selector)
    assert error.value.what == "it is not known how many GPUs the nodes have"
    assert "scaled to zero" in error.value.cause
    assert "resources.gpus_per_node=8    (0 trains on the CPU), or resources.instance=TYPE" in error.value.fix
    assert on([WITHOUT], gpus=0)[0].resources.gpus_per_node == 0


def test_gpus_by_number_alone_get_the_rest_from_the_nodes_or_are_told_what_is_missing():
    _, request = on([big(0), big(1)], gpus=8)
    assert limits_of(request)["vpc.amazonaws.com/efa"] == "32"
    assert request.warnings == ()
    _, request = on([WITHOUT], gpus=8)
    (warning,) = request.warnings
    assert "no node is there that has 8 GPUs" in warning
    assert "no CPUs, memory, EFA, nodes of their own" in warning
    assert "resources.instance" in warning
    (warning,) = on([], gpus=8)[1].warnings  # offline, or nodes that may not be listed
    assert "no node is there" not in warning
    assert "what the nodes have is not known here: the pods ask for GPUs" in warning
    assert on([WITHOUT], gpus=8, cpu="90", memory="900Gi", efa=0, spread="hosts")[1].warnings == ()


GANGS = Served(KINDS, volcano=True, coscheduling=True, kubernetes=(1, 36))


@pytest.mark.parametrize("kind", [JobKind.INDEXED, JobKind.HYPERPOD])
@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_a_gang_that_a_kind_does_not_do_is_refused(kind, gang):
    with pytest.raises(UserError, match=f"gang is {gang}, which a {kind} does not do"):
        on([big(0), big(1)], kind, GANGS, gang=gang)
    on([big(0), big(1)], kind, GANGS, gang="auto")


@pytest.mark.parametrize(
    ("options", "policy", "scheduler"),
    [
        ({"gang": "volcano"}, {"volcano": {}}, "volcano"),
        ({}, {"volcano": {}}, "volcano"),
        ({"gang": "coscheduling"}, {"coscheduling": {"scheduleTimeoutSeconds": 600}}, "scheduler-plugins-scheduler"),
        ({"gang": "coscheduling", "scheduler": "gang"}, {"coscheduling": {"scheduleTimeoutSeconds": 600}}, "gang"),
        ({"gang": "none"}, None, None),
        ({"queue": "research"}, None, None),
    ],
)
def test_the_pods_of_a_gang_go_to_the_scheduler_that_knows_it(options, policy, scheduler):
    _, request = on([big(0), big(1)], JobKind.TRAINJOB, GANGS, **options)
    runtime = next(manifest for manifest in request.objects if manifest["kind"] == "TrainingRuntime")
    assert runtime["spec"].get("podGroupPolicy") == policy
    assert job_of(request)["template"]["spec"].get("schedulerName") == scheduler


def test_coscheduling_is_not_taken_unasked_where_its_scheduler_has_no_name():
    served = Served(KINDS, coscheduling=True, kubernetes=(1, 36))
    _, request = on([big(0), big(1)], JobKind.TRAINJOB, served)
    assert (
        "podGroupPolicy"
        not in next(manifest for manifest in request.objects if manifest["kind"] == "TrainingRuntime")["spec"]
    )


@pytest.mark.parametrize(
    "options", [{"scheduler": "gang"}, {"keep_for": "1h"}, {"max_pod_failures": 3}, {"gang": "volcano"}], ids=str
)
def test_what_a_named_runtime_decides_itself_is_refused(options):
    (key,) = options
    with pytest.raises(UserError, match=f"target.kubernetes.{key} cannot be changed in a named runtime"):
        on([big(0), big(1)], JobKind.TRAINJOB, GANGS, runtime="torch", **options)


def test_nodes_that_come_and_go_do_not_make_another_run():
    """The same request, whatever the nodes are at the time: sizes, spelling of an instance, huge pages, security."""
    tiny = run_of("llama-tiny", JobKind.INDEXED)
    more = NodeFacts("late", allocatable={"cpu": "4", "memory": "16Gi"})
    before = cluster_of("llama-tiny")
    run = resolve(settle(tiny, before))
    after = ClusterFacts(SERVED, "team", [*before.nodes, more], pod_security="baseline")
    assert len({render(run, item, Carried(), submission="a").digest for item in (before, after)}) == 1
    large = resolve(settle(run_of("llama3.1-8b", JobKind.INDEXED), cluster_of("llama3.1-8b")))
    empty = ClusterFacts(SERVED, "team", [more])
    assert (
        len({render(large, item, Carried(), submission="a").digest for item in (cluster_of("llama3.1-8b"), empty)}) == 1
    )
    faulty = render(run, before, Carried(), submission="a", faults="kill:rank=0,step=3")
    assert faulty.digest != render(run, before, Carried(), submission="a").digest


@pytest.mark.parametrize(
    ("level", "locks"), [(None, True), ("privileged", True), ("baseline", False), ("restricted", False)]
)
def test_pods_lock_memory_where_the_namespace_allows_it(level, locks):
    cluster = ClusterFacts(SERVED, "team", [big(0), big(1)], pod_security=level)
    run = run_of("llama3.1-8b", JobKind.INDEXED, secrets=[])
    run = resolve(
        settle(run.model_copy(update={"resources": run.resources.model_copy(update={"instance": None})}), cluster)
    )
    request = render(run, cluster, Carried(), submission="a")
    assert ("IPC_LOCK" in str(container_of(request)[0].get("securityContext"))) == locks
    assert any("IPC_LOCK" in warning for warning in request.warnings) != locks
    assert ("runAsNonRoot" in str(container_of(request)[0].get("securityContext"))) == (level == "restricted")


def test_pods_on_the_hosts_network_find_each_other_by_name():
    _, pod = container_of(request_of("llama-tiny", JobKind.INDEXED, pod={"hostNetwork": True}))
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    _, pod = container_of(request_of("llama-tiny", JobKind.INDEXED, pod={"hostNetwork": True, "dnsPolicy": "Default"}))
    assert pod["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in container_of(request_of("llama-tiny", JobKind.INDEXED))[1]


def test_pods_get_the_labels_and_annotations_that_are_asked_for():
    own = {"team": "maths", "windlass.dev/run": "another"}
    template = request_of("llama-tiny", JobKind.INDEXED, labels=own, annotations={"cost": "7"}).template
    assert template["metadata"]["labels"]["team"] == "maths"
    assert template["metadata"]["labels"]["windlass.dev/run"] == "llama-tiny"  # by which windlass finds them
    assert template["metadata"]["annotations"]["cost"] == "7"


LAYER = "topology.k8s.aws/network-node-layer-2"


@pytest.mark.parametrize("kind", JobKind)
def test_pods_are_placed_near_each_other_by_kueue_or_by_the_scheduler(kind):
    _, request = on([big(0), big(1)], kind, required_topology=LAYER, preferred_topology="rack")
    pods = request.template["spec"]["affinity"]["podAffinity"]
    assert LAYER in [term["topologyKey"] for term in pods["requiredDuringSchedulingIgnoredDuringExecution"]]
    (near,) = pods["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "rack"
    _, request = on([big(0), big(1)], kind, required_topology=LAYER, preferred_topology="rack", queue="research")
    annotations = request.template["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == LAYER
    assert annotations["kueue.x-k8s.io/podset-preferred-topology"] == "rack"
    assert LAYER not in json.dumps(request.template["spec"])


@pytest.mark.parametrize("kind", JobKind)
def test_hyperpods_nodes_are_taken_only_while_they_are_healthy(kind):
    health = "sagemaker.amazonaws.com/node-health-status"
    labelled = NodeFacts("node0", {health: "Schedulable"}, big(0).allocatable)
    spec = on([labelled, big(1)], kind, exclude_nodes=["node7"])[1].template["spec"]
    if kind is JobKind.HYPERPOD:
        assert spec["nodeSelector"][health] == "Schedulable"
    else:
        (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        (rule,) = term["matchExpressions"]
        assert (rule["key"], rule["operator"]) == (health, "NotIn")
        assert "UnschedulablePendingReplacement" in rule["values"]
        assert term["matchFields"][0]["values"] == ["node7"]
    assert health not in json.dumps(on([big(0), big(1)], JobKind.INDEXED)[1].template)


def test_spare_pods_are_hyperpods_alone():
    _, request = on([big(0), big(1)], JobKind.HYPERPOD, spares=1)
    (replicas,) = request.job["spec"]["replicaSpecs"]
    assert (replicas["replicas"], replicas["spares"]) == (2, 1)
    with pytest.raises(UserError, match="spares is 1, which a pytorchjob does not have"):
        on([big(0), big(1)], JobKind.PYTORCHJOB, spares=1)


def monitored(hang_seconds, log_every):
    run = run_of("llama-tiny", JobKind.HYPERPOD)
    changed = {
        "train": run.train.model_copy(update={"log_every": log_every}),
        "parallel": run.parallel.model_copy(update={"hang_seconds": hang_seconds}),
    }
    cluster = cluster_of("llama-tiny")
    run = resolve(settle(run.model_copy(update=changed), cluster))
    request = render(run, cluster, Carried({}, {}, token="t"), submission="0a1b2c3d")
    return request.job["spec"]["runPolicy"].get("logMonitoringConfiguration")


@pytest.mark.parametrize(("hang", "every", "seconds"), [(None, 10, 1800), (None, 100, 18000), (2000, 10, 4000)])
def test_hyperpods_log_rules_wait_longer_than_windlass_own_watch(hang, every, seconds):
    ready, steps = monitored(hang, every)
    assert ready["expectedStartCutOffInSeconds"] == 3600
    assert steps["expectedRecurringFrequencyInSeconds"] == seconds
    assert "expectedStartCutOffInSeconds" not in steps  # pods without rank 0 print no steps
    assert monitored(0, every) is None  # a run that is allowed to stand still


@pytest.mark.parametrize(
    ("resource", "taint"), [("amd.com/gpu", "amd.com/gpu"), ("nvidia.com/mig-3g.40gb", "nvidia.com/gpu")]
)
def test_gpus_of_other_makes_parts_of_gpus_and_further_devices_by_name(resource, taint):
    allocatable = {"cpu": "16", "memory": "64Gi", resource: "1", "rdma/hca": "4"}
    taints = [{"key": taint, "effect": "NoSchedule"}]
    nodes = [NodeFacts(f"node{i}", allocatable=allocatable, taints=taints) for i in range(2)]
    run, request = on(nodes, gpu_resource=resource, devices={"rdma/hca": 2})
    assert run.resources.gpus_per_node == 1
    spec = request.template["spec"]
    asked = spec["containers"][0]["resources"]
    assert (asked["limits"][resource], asked["limits"]["rdma/hca"]) == ("1", "2")
    assert (asked["requests"][resource], asked["requests"]["rdma/hca"]) == ("1", "2")
    assert "nvidia.com/gpu" not in asked["limits"]
    assert spec["tolerations"][0]["key"] == taint
    assert request.warnings == ()


def test_a_process_sees_one_part_of_a_divided_gpu():
    with pytest.raises(UserError, match="cannot train on 2 nvidia"):
        on([big(0), big(1)], gpus=2, gpu_resource="nvidia.com/mig-3g.40gb")
    with pytest.raises(UserError, match="'gpu' is no device"):
        on([big(0)], gpu_resource="gpu")
