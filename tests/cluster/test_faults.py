"""Faults produced for real, side by side in one namespace, each diagnosed with its evidence line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.cluster.bench import Bench
from tests.cluster.box import host
from tests.cluster.box.layout import NODES, Node
from tests.cluster.box.overlay import python
from tests.cluster.test_refusals import quota
from tests.cluster.test_survival import pod_on_expendable_node, pods_of
from windlass.cli.main import run_command
from windlass.runfolder import RunFolder, steps_of

pytestmark = pytest.mark.cluster
PATIENCE = 240.0
OPEN, LOCKED = "127.0.0.1:5010", "127.0.0.1:5011"  # registries, as the node sees them on its own loopback
CALM, SICK = NODES[1], NODES[2]  # neither runs DNS or an operator; the second is tainted
TORCHRUN = (
    "exec PYTHON -m torch.distributed.run --nnodes=2 --node-rank={rank} --rdzv-backend={backend} {more} /dev/null"
)
KILLED = "PYTHON -c 'import os; os.kill(os.getpid(), {})'; exit $?"
ON_ONE_RANK = (  # in front of the real one
    "import os, sys\n"
    "if os.environ.get('RANK') == '1':\n    raise KeyError('my_column')\n"
    "sys.path.remove(os.path.dirname(__file__))\ndel sys.modules['transformers']\nimport transformers\n"
)


@dataclass(frozen=True)
class Fault:
    """What is asked for, the class that it is, and words of the line that proves it."""

    name: str
    evidence: str
    options: dict[str, Any] = field(default_factory=dict)  # of target.kubernetes
    shell: str | None = None  # what the pod runs in place of windlass
    limits: dict[str, str] = field(default_factory=dict)
    secret: str | None = None  # that a variable of the pod comes from
    nodes: int = 1
    volume: dict[str, Any] | None = None  # in place of the shared claim
    code: str | None = None  # of a module `transformers` that goes with the job
    after: Callable[[Bench, str], None] | None = None  # what happens once its pod is there


def label_namespace(bench: Bench, name: str) -> None:
    """A policy that comes after the job: the pod that replaces its first one is refused."""
    bench.cluster.kubectl("label", "namespace", bench.namespace, "pod-security.kubernetes.io/enforce=restricted")
    delete_pods(bench, name)


def set_quota(bench: Bench, name: str) -> None:
    bench.cluster.apply(quota(bench.namespace, pods="0"))
    delete_pods(bench, name)


def delete_pods(bench: Bench, name: str) -> None:
    where = ("-n", bench.namespace, "-l", f"windlass.dev/run={name}")
    bench.cluster.kubectl("delete", "pod", *where, "--force", "--grace-period=0", "--wait=false")


def preempt(bench: Bench, name: str) -> None:
    """A pod of higher priority that fits only in the place of this one."""
    metadata = {"name": "urgent", "namespace": bench.namespace}
    bench.cluster.apply(
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 1000},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {
            "priorityClassName": "urgent", "terminationGracePeriodSeconds": 0,
            "nodeSelector": {"kubernetes.io/hostname": SICK.name}, "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": bench.cluster.shell_image, "command": ["sleep", "600"],
                            "resources": {"requests": {"cpu": "1500m"}}}],
        }},
    )  # fmt: skip


GPU = "nvidia.com/gpu"
REPLACED = {"max_pod_failures": 3}
TOLERATES = {"tolerations": [{"key": "windlass.test/sick", "operator": "Exists"}]}


def here(node: Node) -> dict[str, Any]:
    return {"node_selector": {"kubernetes.io/hostname": node.name}}


# Every `make test` plants the first six, a campaign all of them; those that take longest are looked at last.
FAULTS = {
    "missing secret": Fault("config_missing", 'secret "nope" not found', secret="nope"),
    "CPU": Fault("cpu_memory_request", "Insufficient cpu", {"cpu": "100"}),
    "wrong tag": Fault("image_missing", "not found", {"image": f"{OPEN}/llm:nope", **here(CALM)}),
    "exit 137": Fault("host_oom", "exit code 137", shell=KILLED.format(9)),
    "denied by the registry": Fault("image_auth", "pull access denied", {"image": f"{LOCKED}/llm:1", **here(CALM)}),
    "crash of user code on one rank": Fault("user_code", "KeyError: 'my_column'", nodes=2, code=ON_ONE_RANK),
    "OOMKilled": Fault("host_oom", "OOMKilled", {"memory": "60Mi"}),
    "GPU": Fault("gpu_unavailable", "Insufficient nvidia.com/gpu", TOLERATES, limits={GPU: "64"}),
    "EFA": Fault("efa_unavailable", "vpc.amazonaws.com/efa", limits={"vpc.amazonaws.com/efa": "4"}),
    "taint": Fault("taint", "untolerated taint", limits={GPU: "1"}),  # the only node that has one
    "affinity": Fault("node_affinity", "didn't match Pod's node affinity", {"node_selector": {"disk": "fast"}}),
    "no such registry": Fault("image_rate_limit", "registry.invalid", {"image": "registry.invalid/llm:1"}),
    "unbound claim": Fault("volume_unbound", "unbound", volume={"persistentVolumeClaim": {"claimName": "unbound"}}),
    "quota": Fault("quota", "exceeded quota", REPLACED, shell="sleep 600", after=set_quota),
    "PodSecurity": Fault(
        "admission_denied", "violates PodSecurity", REPLACED, shell="sleep 600", after=label_namespace
    ),
    "exit 143": Fault("unknown", "exit code 143", shell=KILLED.format(15)),
    "DNS": Fault("dns", "nope.default.svc", shell=TORCHRUN.format(
        rank=1, backend="static", more="--master-addr=nope.default.svc --master-port=29400 --rdzv-conf=timeout=5")),
    "rendezvous time-out": Fault("rendezvous", "Rendezvous", shell=TORCHRUN.format(
        rank=0, backend="c10d", more="--rdzv-endpoint=localhost:29400 --rdzv-conf=join_timeout=5,timeout=5")),
    "port taken": Fault("port_in_use", "EADDRINUSE", shell="PYTHON -m http.server 29400 & sleep 3; " + TORCHRUN.format(
        rank=0, backend="static", more="--master-addr=localhost --master-port=29400 --rdzv-conf=timeout=5")),
    "full disk": Fault(
        "disk_full", "No space left", shell="head -c 20M /dev/zero > /windlass/runs/shard",
        volume={"emptyDir": {"medium": "Memory", "sizeLimit": "6Mi"}},
    ),
    "corrupt checkpoint": Fault("checkpoint_damaged", "PytorchStreamReader failed", shell=(
        "printf 'PK\\003\\004' > /tmp/model.pt; head -c 4000 /dev/zero >> /tmp/model.pt; "
        "exec PYTHON -c \"import torch; torch.load('/tmp/model.pt')\"")),
    "preemption": Fault(
        "preempted", "reempt", {"cpu": "1", **here(SICK), **TOLERATES}, shell="sleep 600", after=preempt
    ),
}  # fmt: skip
SHORT = 6
OF_THEIR_OWN = ("quota", "PodSecurity")  # need a namespace of their own


@pytest.fixture(scope="module")
def plant(cluster, tmp_path_factory, request):
    """Plants every fault that is asked for before the first one is looked at: they come true beside each other."""
    cluster.need_box("has faults planted in it")
    mine = [item for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    wanted = {item.callspec.params["what"] for item in mine}
    benches: dict[str, Bench] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("KUBECONFIG", str(cluster.kubeconfig))
        shared = Bench(cluster, stack.enter_context(cluster.namespace("faults")), tmp_path_factory.mktemp("faults"))
        for what in wanted:
            benches[what] = shared
            if what in OF_THEIR_OWN:
                own = stack.enter_context(cluster.namespace("fault"))
                benches[what] = Bench(cluster, own, tmp_path_factory.mktemp("fault"))
        prepare(cluster, benches, stack, tmp_path_factory.mktemp("registries"))
        for what, bench in benches.items():
            submit(bench, what)
        for what, bench in benches.items():
            if FAULTS[what].after:
                bench.wait(lambda what=what, bench=bench: running(bench, run_name(what)), "a pod", seconds=PATIENCE)
                FAULTS[what].after(bench, run_name(what))
        yield benches


def prepare(cluster, benches, stack, folder) -> None:
    """What faults need to be there: registries, a taint, a claim that nobody binds."""
    if {"wrong tag", "denied by the registry"} & set(benches):
        for address, locked in ((OPEN, False), (LOCKED, True)):
            stack.enter_context(registry(CALM, folder / address.rpartition(":")[2], address, locked=locked))
    if {"taint", "GPU", "preemption"} & set(benches):
        cluster.set_capacity(SICK.name, **{GPU: 8})
        stack.callback(cluster.set_capacity, SICK.name, **{GPU: None})
        cluster.kubectl("taint", "node", SICK.name, "windlass.test/sick=yes:NoSchedule", "--overwrite")
        stack.callback(cluster.kubectl, "taint", "node", SICK.name, "windlass.test/sick-", check=False)
    if "unbound claim" in benches:
        metadata = {"name": "unbound", "namespace": benches["unbound claim"].namespace}
        claim = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "nobody",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        cluster.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    if "preemption" in benches:
        stack.callback(cluster.kubectl, "delete", "priorityclass", "urgent", "--ignore-not-found", check=False)


@contextlib.contextmanager
def registry(node: Node, folder, address: str, *, locked: bool):
    """Debian's docker-registry on a node's own loopback, where containerd speaks plain HTTP to it."""
    folder.mkdir()
    auth = ""
    if locked:
        (folder / "htpasswd").write_text("somebody:$2y$05$abcdefghijklmnopqrstuuWJ3l8H0xYx1n5k7b9d1e3f5g7i9k1m3\n")
        auth = f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n{auth}"
    )
    enter = ["nsenter", "-t", str(host.pid_of(f"holder-{node.name}")), "-n"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*enter, "docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def run_name(what: str) -> str:
    return what.lower().replace(" ", "-")


def submit(bench: Bench, what: str) -> None:
    fault = FAULTS[what]
    value = yaml.safe_load(bench.file.read_text())
    options = value["target"]["kubernetes"]
    overlay = options.pop("pod")
    trainer = overlay["containers"][0]
    if "image" in fault.options:
        del trainer["image"]
    if fault.shell:
        trainer["command"] = ["sh", "-c", fault.shell.replace("PYTHON", python())]
    if fault.secret:
        trainer["env"].append({"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": fault.secret, "key": "key"}}})
    if fault.limits:
        trainer["resources"] = {"limits": fault.limits}
    if fault.volume:
        overlay["volumes"].append({"name": "windlass-runs", **fault.volume})
    if fault.code:
        code = bench.folder / f"code-{run_name(what)}"
        code.mkdir()
        (code / "transformers.py").write_text(fault.code)
        options["code"] = str(code)
    value["resources"]["nodes"] = fault.nodes
    value["train"] |= {"global_batch": 2 * fault.nodes, "steps": 4}
    value["target"] |= {"max_restarts": 0}
    value["target"]["kubernetes"] = {**options, "job": "job", "max_pod_failures": 0, **fault.options, "pod": overlay}
    file = bench.folder / f"{run_name(what)}.yaml"
    file.write_text(yaml.safe_dump(value))
    code, _, err = in_process(bench, "run", file, "--detach", "--no-retry", "--quiet")
    assert code == 0, f"{what}: {err}"


def in_process(bench: Bench, *arguments: Any) -> tuple[int, str, str]:
    """A command in this process: starting Python for each of them would take longer than the faults do."""
    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(bench.folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_command([str(one) for one in arguments])
    finally:
        os.chdir(before)
    return int(code), out.getvalue(), err.getvalue()


def running(bench: Bench, name: str) -> bool:
    pods = bench.cluster.get("pods", namespace=bench.namespace, selector=f"windlass.dev/run={name}")["items"]
    return any(pod["status"]["phase"] == "Running" for pod in pods)


# A rank has LOCAL_RANK; operators give RANK to every process of a pod.
OF_RANKS = "for p in /proc/[0-9]*; do grep -qz ^LOCAL_RANK= $p/environ && {what}; done; true"
# Half the time it stands still, in pieces shorter than a step.
SLOWED = (
    "import os, sys, time\n"
    "for _ in range(9000):\n"
    "    os.kill(int(sys.argv[1]), 19); time.sleep(0.1); os.kill(int(sys.argv[1]), 18); time.sleep(0.05)\n"
)


@pytest.mark.campaign_only
def test_a_slow_rank_and_a_stopped_one_are_named(cluster, namespace, tmp_path, monkeypatch):
    cluster.need_box("stops processes")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    bench = Bench(cluster, namespace, tmp_path)
    train(bench, "sick", "parallel.hang_seconds=15", "checkpoint.every=100000")  # a save has half an hour
    pod = pods_of(bench, "sick")[-1]["metadata"]["name"]
    slow = f"{python()} -c '{SLOWED}' ${{p#/proc/}} >/dev/null 2>&1 & echo $! >/tmp/slowing"
    in_pod(bench, pod, OF_RANKS.format(what=f"{{ {slow}; }}"))
    must_be(bench, "sick", "straggler", "slow rank 1 on sick-")
    in_pod(bench, pod, "kill $(cat /tmp/slowing); " + OF_RANKS.format(what="kill -STOP ${p#/proc/}"))
    must_be(bench, "sick", "hang", "rank 1 on sick-1")


@pytest.mark.campaign_only
def test_a_killed_node_is_named(cluster, namespace, tmp_path, monkeypatch):
    cluster.need_box("cuts a node's power")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    bench = Bench(cluster, namespace, tmp_path)
    train(bench, "dark", "target.kubernetes.node_lost_seconds=4")
    _, node = pod_on_expendable_node(bench, "dark")
    cluster.cut_power(node)
    try:
        must_be(bench, "dark", "node_lost", "node")
    finally:
        cluster.restart_node(node)


def train(bench: Bench, name: str, *asked: str) -> None:
    """Two pods that train until they are hurt, and then are not started again."""
    alone = ("resources.nodes=2", "train.steps=100000", "target.max_restarts=0", "target.kubernetes.job=job")
    bench.submit(name, *alone, "target.kubernetes.max_pod_failures=0", *asked)
    there = RunFolder(bench.cluster.storage(bench.namespace) / name)
    bench.wait(lambda: len(steps_of(there)) > 5, "steps", name, 600)


def in_pod(bench: Bench, pod: str, script: str) -> None:
    bench.cluster.kubectl("exec", "-n", bench.namespace, pod, "--", "sh", "-c", script)


def cases() -> list[Any]:
    return [
        pytest.param(what, marks=[pytest.mark.campaign, *([pytest.mark.campaign_only] * (number >= SHORT))])
        for number, what in enumerate(FAULTS)
    ]


@pytest.mark.parametrize("what", cases())
def test_it_is_diagnosed_with_its_evidence(plant, what):
    must_be(plant[what], run_name(what), FAULTS[what].name, FAULTS[what].evidence)


def must_be(bench: Bench, name: str, expected: str, evidence: str) -> None:
    """What `why` says, within a while."""
    deadline = time.monotonic() + PATIENCE
    while True:
        code, out, err = in_process(bench, "why", name, "--json")
        assert code == 0, err
        answer = json.loads(out)
        lines = [one["line"] for one in answer["evidence"]]
        if answer["class"] == expected and any(evidence in line for line in lines):
            print(f"{name}: {expected}: {next(line for line in lines if evidence in line)}")
            return
        if time.monotonic() > deadline:
            raise AssertionError(json.dumps(answer, indent=1) + bench.evidence(name))
        time.sleep(2)
