"""Three pods train a small Llama as each kind of job: the numbers, the checkpoint and the logs are the local run's."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.campaign import campaign
from tests.cluster.bench import EVERY, STEPS, Bench, events, losses
from tests.cluster.box.overlay import python
from tests.kubernetes.golden import KINDS, rendered
from windlass.catalog.models import presets
from windlass.checkpoint.folder import CheckpointFolder
from windlass.targets.kubernetes.manifests.cluster_facts import GROUPS, PLURALS, JobKind
from windlass.targets.kubernetes.pod.interface import RUNS

pytestmark = pytest.mark.cluster
PATIENCE = 900.0


@pytest.fixture
def bench(cluster, namespace, tmp_path):
    return Bench(cluster, namespace, tmp_path)


@pytest.fixture
def code(tmp_path):
    """Code that goes with the job and makes every rank say something."""
    folder = tmp_path / "code"
    folder.mkdir()
    lines = (
        "import os, sys",
        "if 'RANK' in os.environ and 'windlass.trainer' in sys.orig_argv:",
        "    print('carried code in rank', os.environ['RANK'], flush=True)",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return folder


# test_survival.py compares the losses of the other kinds too
@pytest.mark.parametrize("kind", campaign(["trainjob", "pytorchjob", "job"], always=1))
def test_three_pods_train_what_this_machine_trains(bench, undisturbed, code, kind):
    name = f"small-{kind}"
    options = (f"target.kubernetes.job={kind}", f"target.kubernetes.code={code}")
    run_when_operators_answer(bench, "run", bench.file, f"name={name}", *options)
    folder = bench.run_folder(name)

    trained = losses(folder)
    assert sorted(trained) == list(range(1, STEPS + 1)), "steps are missing"
    assert trained == undisturbed, "the losses are not those of the local run"
    (started,) = events(folder, "started")
    assert started["world_size"] == 3
    assert events(folder, "exit")[-1]["state"] == "finished"

    logs = {rank: folder.rank_log(rank).read_text() for rank in range(3)}
    for rank, text in logs.items():
        assert text.count(f"carried code in rank {rank}") == 1
    for step in (1, STEPS):
        assert f"step {step}/{STEPS}" in logs[0]
    assert f"finished after step {STEPS}" in logs[0]
    if bench.cluster.is_box:  # what the client archived is what the pods wrote, byte for byte
        theirs = bench.cluster.storage(bench.namespace) / name
        assert folder.metrics.read_bytes() == (theirs / "metrics.jsonl").read_bytes()
        for record in (theirs / "history.jsonl").read_text().splitlines():
            assert record in folder.history.read_text()
        for rank, text in logs.items():
            for line in (theirs / "logs" / f"rank-{rank:04d}.log").read_text().splitlines():
                assert line in text, f"a line of rank {rank} is not in the archive"

    listed = bench.json("ckpt", "ls", name)
    steps = [one["step"] for one in (listed["checkpoints"] if isinstance(listed, dict) else listed)]
    assert STEPS in steps
    assert all(step % EVERY == 0 for step in steps)
    bench.must("ckpt", "get", name)
    newest = CheckpointFolder(folder.checkpoints).at(STEPS)
    manifest = newest.manifest()
    assert manifest.world_size == 3
    assert not list(newest.damages()), "the downloaded checkpoint is not whole"


def test_every_golden_manifest_is_taken_by_the_api_server(cluster, namespace):
    """Strict field validation and the operators' own webhooks, by a create that creates nothing."""
    cluster.need_box("has every operator")
    for kind in JobKind:
        objects = {}
        for preset in presets():
            for one in rendered(preset, kind).objects:
                here = json.loads(json.dumps(one))
                here["metadata"]["namespace"] = namespace
                objects[(here["kind"], here["metadata"]["name"])] = here
        runtimes = [one for one in objects.values() if one["kind"] == "TrainingRuntime"]
        if runtimes:  # a TrainJob is checked against the runtime it names
            create(cluster, runtimes)
        others = [one for one in objects.values() if one["kind"] != "TrainingRuntime"]
        told = create(cluster, others, "--dry-run=server")
        assert told.count("created (server dry run)") == len(others), told
        assert cluster.get(f"{PLURALS[kind]}.{GROUPS[kind]}", namespace=namespace)["items"] == []


def run_when_operators_answer(bench, *arguments):
    """An operator whose webhook does not answer on a busy machine is waited for; nothing else is."""
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = bench.windlass(*arguments, timeout=2 * PATIENCE)
        away = "failed calling webhook" in answer.stderr
        if not away or time.monotonic() > deadline:
            assert answer.returncode == 0, f"{arguments}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
            return
        time.sleep(2)


def create(cluster, objects, *options):
    """Strictly, and also on a busy machine."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return cluster.kubectl(
                "create", "--validate=strict", *options, "-f", "-", stdin=yaml.safe_dump_all(objects), timeout=600
            )
        except AssertionError as error:
            away = "failed calling webhook" in str(error) or "failed to call webhook" in str(error)
            if not away or time.monotonic() > deadline:
                raise
            if not options:  # some of them are there by now
                cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(objects))
            time.sleep(2)


def test_the_golden_kinds_are_what_the_cluster_serves(cluster):
    cluster.need_box("has every operator")
    served = cluster.kubectl("api-resources", "--no-headers", "-o", "name").split()
    for kind, one in KINDS.items():
        assert f"{one.plural}.{GROUPS[kind]}" in served


AGENT = """\
#!/bin/sh
# stands in for HyperPod's agent: torchrun with what the operator's stand-in tells
while [ "$1" != -m ]; do shift; done
exec {python} -m torch.distributed.run --nnodes=$PET_NNODES --node-rank=$PET_NODE_RANK --nproc-per-node=1 \\
    --master-addr=$PET_MASTER_ADDR --master-port=$PET_MASTER_PORT "$@"
"""


def holds(kept, sent):
    """Whether everything that was sent is there; defaults of the server may stand beside it."""
    if isinstance(sent, dict):
        return all(key in kept and holds(kept[key], value) for key, value in sent.items())
    if isinstance(sent, list):
        return len(kept) == len(sent) and all(map(holds, kept, sent))
    return kept == sent


def test_a_hyperpod_job_keeps_every_field_and_trains(bench):
    """Submitted by windlass to a definition made from the published fields, which drops what it does not know."""
    bench.cluster.need_box("has a stand-in for HyperPod's operator")
    agent = bench.cluster.storage(bench.namespace) / "hyperpodrun"
    agent.parent.mkdir(exist_ok=True)
    agent.write_text(AGENT.format(python=python()))
    agent.chmod(0o755)
    health = "sagemaker.amazonaws.com/node-health-status"
    options = (
        "target.kubernetes.job=hyperpod",
        "target.kubernetes.spares=1",
        "target.kubernetes.preferred_topology=kubernetes.io/hostname",
        "target.kubernetes.deadline=1h",
        "resources.nodes=2",
        "train.steps=4",
        f'target.kubernetes.environment={{"PATH": "{RUNS}:{Path(python()).parent}:/usr/bin:/bin"}}',
    )
    overlay = yaml.safe_load(bench.file.read_text())
    (trainer,) = overlay["target"]["kubernetes"]["pod"]["containers"]
    trainer["env"] = [one for one in trainer["env"] if one["name"] != "PATH"]
    bench.file.write_text(yaml.safe_dump(overlay))
    shown = bench.must("run", bench.file, "name=pod", *options, "--dry-run")
    rendered = next(one for one in yaml.safe_load_all(shown) if one and one["kind"] == "HyperPodPyTorchJob")
    for node in bench.cluster.nodes:
        bench.cluster.kubectl("label", "node", node, f"{health}=Schedulable")
    try:
        bench.must("run", bench.file, "name=pod", *options)
    finally:
        for node in bench.cluster.nodes:
            bench.cluster.kubectl("label", "node", node, f"{health}-")
    kept = bench.cluster.get("hyperpodpytorchjobs", "pod", bench.namespace)["spec"]
    sent = rendered["spec"]
    there, asked = (spec["replicaSpecs"][0].pop("template")["spec"] for spec in (kept, sent))
    assert holds(kept, sent)
    for part in ("affinity", "nodeSelector", "tolerations"):  # variables name the submission, and differ
        assert there[part] == asked[part]
    assert kept["replicaSpecs"][0]["spares"] == 1
    rules = kept["runPolicy"]["logMonitoringConfiguration"]
    log = (bench.cluster.storage(bench.namespace) / "pod" / "logs" / "rank-0000.log").read_text().splitlines()
    for rule in rules:
        assert any(re.match(rule["logPattern"], line) for line in log), (rule, log)
    assert any(re.match(rules[1]["stopPattern"], line) for line in log)
    assert bench.show("pod")["state"] == "finished"


def test_a_named_runtime_in_one_zone(bench):
    """Somebody else's runtime, as its administrator made it, changed only as a TrainJob may."""
    bench.cluster.need_box("moves a node to another zone")
    pod = {"containers": [{"name": "node", "image": "nowhere/nothing:1"}]}
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    job = {"name": "node", "template": {"metadata": step, "spec": {"template": {"spec": pod}}}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": bench.namespace, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [job]}}},
    }
    zone, apart = "topology.kubernetes.io/zone", bench.cluster.expendable[0]
    before = bench.cluster.get("node", apart)["metadata"]["labels"][zone]
    bench.cluster.kubectl("label", "node", apart, f"{zone}=elsewhere", "--overwrite")
    try:
        bench.cluster.apply(runtime)
        asked = ("resources.nodes=2", "train.steps=4", f"target.kubernetes.runtime={bench.namespace}")
        run_when_operators_answer(bench, "run", bench.file, "name=named", "target.kubernetes.same_zone=true", *asked)
        assert events(bench.run_folder("named"), "started")[0]["world_size"] == 2
        pods = bench.cluster.get("pods", namespace=bench.namespace, selector="windlass.dev/run=named")["items"]
        assert len(pods) == 2
        assert len({one["spec"]["nodeName"] == apart for one in pods}) == 1
    finally:
        bench.cluster.kubectl("label", "node", apart, f"{zone}={before}", "--overwrite")
        bench.cluster.kubectl("delete", "clustertrainingruntime", bench.namespace, "--ignore-not-found")


def test_a_deadline_ends_a_job_and_its_remains_go(bench):
    asked = ("resources.nodes=1", "train.global_batch=2", "train.steps=100000", "target.kubernetes.job=job")
    limits = ("target.kubernetes.deadline=25s", "target.kubernetes.keep_for=3s")
    answer = bench.windlass("run", bench.file, "name=late", *asked, *limits)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "DeadlineExceeded" in answer.stderr
    left = ("get", "jobs,pods,configmaps,services", "-n", bench.namespace, "-l", "windlass.dev/run=late", "-o", "name")
    bench.wait(lambda: bench.cluster.kubectl(*left).split() == [], "an empty namespace", "late")
    assert bench.show("late")["state"] == "failed"


def test_a_run_goes_on_with_fewer_nodes(bench):
    """One of three pods finds no room: with min_nodes the others train, and end without it."""
    bench.cluster.need_box("knows how large the nodes are")
    quiet = 'target.kubernetes.environment={"WINDLASS_ELASTIC_SECONDS": "3"}'
    asked = ("train.steps=4", "target.kubernetes.min_nodes=2", "target.kubernetes.spread=hosts", quiet)
    node = bench.cluster.expendable[0]
    bench.cluster.kubectl("cordon", node)
    try:
        bench.must("run", bench.file, "name=fewer", "target.kubernetes.job=job", *asked)
    finally:
        bench.cluster.uncordon(node)
    assert events(bench.run_folder("fewer"), "started")[0]["world_size"] == 2
    assert bench.show("fewer")["state"] == "finished"
