"""What pods run, without a cluster: every pod is a process group here, and is killed as a pod would be."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.trainer.harness import train
from windlass.common.files import read_json_lines
from windlass.plan import resolve
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import dump_run, load_run, parse_run
from windlass.targets.kubernetes.manifests.job_kinds import log_rules
from windlass.targets.kubernetes.pod.verdict import LEFT
from windlass.targets.launch import processes

pytestmark = pytest.mark.train
PATIENCE = 600.0


TINY = {
    "name": "tiny",
    "model": {"preset": "llama-tiny"},
    "data": {"source": "corpus:austen", "sequence_length": 32},
    "train": {"steps": 16, "global_batch": 6, "precision": "fp32", "warmup_steps": 0},
    "checkpoint": {"every": 2, "grace_seconds": 300},
}


class Pods:
    """The pods of one run, which share a folder; two, as each attempt costs the start of every one of them."""

    def __init__(self, root, port, *, steps=16, nodes=2, faults=None, checkpoint=None, storage="pvc:claim"):
        self.root, self.port, self.nodes, self.faults = root, port, nodes, faults
        root.mkdir()
        self.folder = RunFolder(root / "runs" / "tiny")
        run = parse_run(
            {
                **TINY,
                "train": {**TINY["train"], "steps": steps},
                "checkpoint": {**TINY["checkpoint"], **(checkpoint or {})},
                "resources": {
                    "nodes": nodes,
                    "gpus_per_node": 0,
                    "processes_per_node": 1,
                    "threads_per_process": 1,
                },
                "target": {"kind": "kubernetes", "kubernetes": {"storage": storage}},
            }
        )
        (root / "run.yaml").write_text(dump_run(resolve(run)))
        self.running = {}
        self.made = 0

    def start(self, node, **more):
        self.made += 1
        name = f"pod-{node}-{self.made}"
        environment = {
            **os.environ,
            "WINDLASS_RUN_FILE": str(self.root / "run.yaml"),
            "WINDLASS_SCRATCH": str(self.root / name),
            "WINDLASS_CARRIED": str(self.root / "nothing"),
            "WINDLASS_RUNS": str(self.root / "runs"),
            "WINDLASS_SHARED": "1",
            "WINDLASS_MEETING_HOST": "localhost",
            "WINDLASS_MEETING_PORT": str(self.port),
            "WINDLASS_NODES": str(self.nodes),
            "WINDLASS_NODE_INDEX": str(node),
            "WINDLASS_SUBMISSION": "a",
            "WINDLASS_TOKEN": "secret of the submission",
            "WINDLASS_POD": name,
            "WINDLASS_POD_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PET_NNODES": "7",  # an operator's, to be ignored
            **({"WINDLASS_FAULTS": self.faults} if self.faults else {}),
            **more,
        }
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "windlass.targets.kubernetes.entry"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.running[node] = (process, name)

    def kill(self, node):
        """As a node that loses its power: everything of the pod at once."""
        process, name = self.running.pop(node)
        process.kill()
        mark = str(self.root / name)
        for pid in processes.all_pids():
            if processes.environment(pid).get("WINDLASS_SCRATCH") == mark:
                processes.send(pid, signal.SIGKILL)
        process.wait()

    def tell(self, node):
        self.running[node][0].send_signal(signal.SIGTERM)

    def ended(self, node):
        return self.running[node][0].wait(PATIENCE)

    def words(self, node):
        return (self.root / f"{self.running[node][1]}.log").read_text()

    def wait_for(self, event, **facts):
        self.wait_until(
            lambda: any(
                record.get("event") == event and facts.items() <= record.items()
                for record in read_json_lines(self.folder.history)
            ),
            f"{event} {facts}",
        )

    def wait_until(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.05)

    def close(self):
        for node in list(self.running):
            self.kill(node)

    @property
    def losses(self):
        return {step: metrics["loss"] for step, metrics in steps_of(self.folder).items()}


@pytest.fixture
def pods(tmp_path):
    opened = []

    def make(name, **more):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Pods(tmp_path / name, port, **more)
        opened.append(made)
        return made

    yield make
    for file in opened:
        file.close()


def test_killed_ranks_killed_pods_and_a_drained_pod_change_nothing(pods, tmp_path, monkeypatch):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    whole = train(tmp_path / "whole", TINY, ranks=2)
    assert whole.codes == [0, 0], whole.output

    # sleeping a moment at each step keeps the run from ending before it is disturbed
    slow = ";".join(f"sleep:rank=0,step={step},seconds=1" for step in range(1, 16))
    hurt = pods("hurt", faults=f"kill:rank=1,step=3;{slow}")
    for node in range(2):
        hurt.start(node)
    hurt.wait_for("restart", attempt=2)
    hurt.wait_for("checkpoint", step=4)
    hurt.kill(1)
    hurt.wait_for("node-lost", node=1)
    hurt.start(1)
    hurt.wait_for("checkpoint", step=8)
    hurt.kill(0)
    hurt.start(0)
    hurt.wait_for("checkpoint", step=12)
    hurt.tell(1)
    assert hurt.ended(1) == LEFT
    hurt.start(1)
    assert [hurt.ended(node) for node in range(2)] == [0, 0]

    assert hurt.losses == whole.losses
    history = list(read_json_lines(hurt.folder.history))
    assert [record["attempt"] for record in history if record["event"] == "launched"] == [1, 2, 3, 4, 5]
    reasons = [record["why"] for record in history if record["event"] == "restart"]
    assert reasons[0] == "rank 1 was killed by SIGKILL"
    assert reasons[1].startswith("node 1 was lost")
    assert reasons[-1] == "node 1 was told to leave; saved first"
    assert next(record["rank"] for record in history if record["event"] == "rank-died" and record["first"]) == 1


def test_what_a_pod_says_is_what_is_in_the_run_folder(pods):
    run = pods("one", nodes=1, steps=4)
    run.start(0)
    assert run.ended(0) == 0
    lines = run.words(0).splitlines()
    for kind, path in (("metrics", run.folder.metrics), ("history", run.folder.history)):
        said = [line.split(maxsplit=3) for line in lines if line.startswith(f"windlass-record {kind} ")]
        assert "".join(f"{record[3]}\n" for record in said) == path.read_text()
        offsets = [int(record[2].partition("@")[2]) for record in said]
        assert offsets == sorted(set(offsets))
    assert any(line.startswith("[rank 0] ") and "finished after step 4" in line for line in lines)
    assert sum(line.startswith("windlass-record node - ") for line in lines) == 1


def test_an_error_that_would_come_again_ends_all_pods_with_its_words(pods):
    run = pods("nan", nodes=2, faults="nan:rank=1,step=3")
    for node in range(2):
        run.start(node)
    assert [run.ended(node) for node in range(2)] == [1, 1]
    last = list(read_json_lines(run.folder.history))[-1]
    assert (last["event"], last["state"], last["job"]) == ("exit", "failed", "a")
    assert "loss nan" in last["reason"]
    assert "windlass-record error - " in run.words(0) + run.words(1)
    run.start(0)  # the job makes a new pod; it has nothing to do
    assert run.ended(0) == 1
    assert "this job is over already: failed" in run.words(0)
    assert len([record for record in read_json_lines(run.folder.history) if record["event"] == "launched"]) == 1


def test_pods_with_disks_of_their_own_share_checkpoints_through_a_store(pods, tmp_path, monkeypatch):
    """The pod that is lost takes its disk along: the store alone has what it saved, in files of both."""
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    whole, store = train(tmp_path / "whole", TINY, ranks=2), tmp_path / "store"
    slow = ";".join(f"sleep:rank=0,step={step},seconds=1" for step in range(9, 16))
    run = pods("apart", nodes=2, checkpoint={"store": str(store), "keep": 1}, storage="none", faults=slow)

    def start(node, life):
        run.start(node, WINDLASS_RUNS=str(run.root / f"disk-{node}-{life}"), WINDLASS_SHARED="0")

    run.folder = RunFolder(run.root / "disk-0-first" / "tiny")  # rank 0's
    for node in range(2):
        start(node, "first")
    run.wait_for("checkpoint", step=8)
    run.kill(1)
    shutil.rmtree(run.root / "disk-1-first")
    start(1, "second")
    assert [run.ended(node) for node in range(2)] == [0, 0], run.words(0)
    assert run.losses == whole.losses
    resumed = [record for record in read_json_lines(run.folder.history) if record["event"] == "resumed"]
    assert resumed[-1]["tier"] == "store"
    assert resumed[-1]["step"] >= 8
    (stored,) = store.glob("tiny/*/step-00000016")
    names = {path.name for path in stored.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "manifest.json"} <= names
    assert list(run.root.glob("disk-*/tiny/checkpoints/step-*")) == [], "they go straight to the store"
    assert [path.name for path in store.glob("tiny/*/step-*")] == ["step-00000016"]


AGENT = """\
#!{python}
# stands in for HyperPod's agent: starts the ranks it is given as torchrun would, passes SIGTERM on
import os, signal, subprocess, sys
command = sys.argv[sys.argv.index("-m") :]
ranks = {{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}}
rank = subprocess.Popen([sys.executable, *command], env={{**os.environ, **ranks}})
signal.signal(signal.SIGTERM, lambda *_: rank.send_signal(signal.SIGTERM))
sys.exit(rank.wait())
"""


def test_a_hyperpod_pod_runs_the_agent_and_says_its_records(pods, tmp_path):
    run = pods("hyperpod", nodes=1, steps=40, faults=";".join(f"sleep:step={n},seconds=1" for n in range(5, 40)))
    agent = tmp_path / "bin" / "hyperpodrun"
    agent.parent.mkdir()
    agent.write_text(AGENT.format(python=sys.executable, port=run.port))
    agent.chmod(0o755)
    path = f"{agent.parent}{os.pathsep}{os.environ['PATH']}"
    run.start(0, WINDLASS_LAUNCHER="hyperpodrun", PATH=path)
    run.wait_for("checkpoint", step=4)
    run.tell(0)
    assert run.ended(0) == 75  # its operator decides what that means
    said = [line for line in run.words(0).splitlines() if line.startswith("windlass-record history ")]
    assert [line.split(maxsplit=3)[3] for line in said] == run.folder.history.read_text().splitlines()
    assert '"preempted"' in said[-1]
    ready, steps = log_rules(load_run(run.root / "run.yaml", saved=True))
    lines = run.words(0).splitlines()
    assert [line for line in lines if re.match(ready["logPattern"], line)], lines
    (first, *_) = [line for line in lines if re.match(steps["logPattern"], line)]
    assert "step 1/40" in first
    assert not [line for line in lines if re.match(steps["stopPattern"], line)]  # it was told to leave


def test_a_hyperpod_image_without_the_agent_says_what_to_do(pods):
    run = pods("agentless", nodes=1)
    run.start(0, WINDLASS_LAUNCHER="hyperpodrun")
    assert run.ended(0) == 2
    assert "the image has no hyperpodrun" in run.words(0)
    assert "image.hyperpod_agent=true" in run.words(0)
