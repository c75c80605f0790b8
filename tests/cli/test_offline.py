"""`windlass run --dry-run` renders every example for every kind of job on a machine without network or cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from windlass.targets.kubernetes.manifests.cluster_facts import JobKind

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
ON_KUBERNETES = [
    "--on",
    "kubernetes",
    "target.kubernetes.image=example.org/train:1",
    "target.kubernetes.storage=pvc:runs",
    "target.kubernetes.namespace=team",
    "resources.instance=p5.48xlarge",
    "resources.gpus_per_node=8",
    "resources.processes_per_node=8",
]

MANIFEST_KEYS = {"apiVersion", "kind", "metadata", "spec", "data", "binaryData", "type"}


def rendered(example):
    """What is typed for an example. The data of one is on the cluster's own file system, and others stand in for it."""
    return ["run", example, *(["data.source=corpus:austen"] if example.stem == "slurm-container" else [])]


@pytest.fixture
def nowhere(windlass, tmp_path, monkeypatch):
    """No kubeconfig, no scheduler; the data that examples name lies in the current folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    return windlass


@pytest.mark.parametrize("kind", list(JobKind))
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_renders_offline_for_every_kind(nowhere, example, kind):
    answer = nowhere(*rendered(example), *ON_KUBERNETES, f"target.kubernetes.job={kind}", "--dry-run", "--offline")
    assert answer.code == 0, answer.err
    objects = list(yaml.safe_load_all(answer.out))
    assert all(manifest.keys() <= MANIFEST_KEYS for manifest in objects)  # all of it is a file for kubectl
    assert objects[-1]["spec"]
    assert "&id" not in answer.out
    again = nowhere(*rendered(example), *ON_KUBERNETES, f"target.kubernetes.job={kind}", "--dry-run")
    assert again.out == answer.out  # the same bytes, for Git
    assert "rendered from the run file alone" in again.err
    assert "were not checked" in answer.err


def test_a_retry_loop_is_rendered_beside_its_job(nowhere):
    answer = nowhere(*rendered(EXAMPLES[0]), *ON_KUBERNETES, "--detach", "--dry-run", "--offline")
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(answer.out)]
    assert {"TrainJob", "ServiceAccount", "Job"} <= set(kinds), answer


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_renders_offline_for_slurm(nowhere, example):
    words = ["--on", "slurm", "--dry-run", "--offline", "gpus_per_node=0", "processes_per_node=2"]
    answer = nowhere(*rendered(example), *words)
    assert answer.code == 0, answer.err
    assert "#SBATCH" in answer.out


def test_what_only_a_cluster_could_tell_is_asked_for(nowhere, tmp_path):
    (tmp_path / "my.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    answer = nowhere("run", "my.yaml", "--on", "slurm", "--dry-run", "--offline")
    assert answer.code == 2
    assert "resources.gpus_per_node=8" in answer.err
    answer = nowhere("run", "my.yaml", "--offline")
    assert answer.code == 2
    assert "--dry-run --offline" in answer.err


def test_an_overlay_that_no_cluster_would_take_is_found_offline(nowhere):
    bad = "target.kubernetes.pod={contaners: []}"
    answer = nowhere("run", EXAMPLES[0], *ON_KUBERNETES, bad, "--dry-run", "--offline")
    assert answer.code == 2
    assert "contaners" in answer.err


@pytest.mark.slow
def test_without_a_network_at_all(tmp_path):
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    words = ["run", str(ROOT / "examples" / "llama3.1-8b-kubernetes.yaml"), *ON_KUBERNETES, "--dry-run"]
    environment = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [unshare, "-rn", sys.executable, "-m", "windlass.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "kind: TrainJob" in done.stdout


def test_a_sweep_renders_offline(nowhere, tmp_path):
    (tmp_path / "my.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    cpus = ["resources.gpus_per_node=0", "--sweep", "train.learning_rate=1e-4,3e-4"]
    answer = nowhere("run", "my.yaml", "--on", "slurm", *cpus, "--dry-run", "--offline", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.json["runs"]) == 2
    unasked = nowhere("run", "my.yaml", "--on", "slurm", *cpus, "--dry-run", "--json")
    assert (unasked.code, unasked.out) == (0, answer.out)
    assert "there is no sinfo here: this is rendered from the run file alone" in unasked.err
    open_file = nowhere("run", "my.yaml", "--on", "slurm", *cpus[1:], "--dry-run", "--json")
    assert open_file.code == 2
    assert "how many GPUs a node has is not known" in open_file.json["cause"]


def test_without_a_scheduler_there_is_a_way_out(nowhere, tmp_path):
    (tmp_path / "my.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    for complaint in (None, "sinfo: fatal: Could not establish a configuration source"):
        if complaint:  # Slurm's commands are here, and no cluster
            (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
            (tmp_path / "sinfo").chmod(0o755)
        answer = nowhere("run", "my.yaml", "--on", "slurm", "resources.gpus_per_node=0", "--json")
        assert answer.code == 2
        assert "target.host=" in answer.json["fix"]
        assert "--dry-run --offline" in answer.json["fix"]


def test_a_missing_kubeconfig_is_what_is_missing(nowhere, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    error = nowhere("run", "run.yaml", "--on", "kubernetes", "--dry-run", "--json").json
    assert (error["error"], error["code"]) == ("no Kubernetes cluster is configured here", "no-answer")
    assert "not known how many GPUs" in error["cause"]
    assert "resources.gpus_per_node=8" in error["fix"]


def test_offline_does_not_blame_permissions(nowhere, tmp_path):
    (tmp_path / "run.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    answer = nowhere("run", "run.yaml", "--on", "kubernetes", "--dry-run", "--offline", "image.name=a/b:1")
    assert answer.code == 2
    assert "--offline" in answer.err
    assert "you may not" not in answer.err
