"""The seeds' quick start as it is written there, on a real cluster: deploy, look, read the worker's log, delete."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.bench import STEPS, Bench

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parents[2] / "claude-commands"


@pytest.fixture(scope="module")
def bench(cluster, tmp_path_factory):
    with cluster.namespace("seeds") as namespace:
        yield Bench(cluster, namespace, tmp_path_factory.mktemp("seeds"))


def script(bench, name, *arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=900, cwd=bench.folder, env=bench.environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def test_the_quick_start_trains(bench):
    """The run file stands for what the box lacks: GPUs, a hub and a registry."""
    context = bench.cluster.kubectl("config", "current-context").strip()
    bench.write(bench.folder / "llama32-1b-training.yaml")
    checked = script(bench, "manage_eks_cluster", "--cluster_name", context, "--validate_components")
    assert checked["check"]["status"] in ("pass", "warn", "fail")
    deployed = script(
        bench, "deploy_training_job", "--cluster_name", context, "--num_nodes", "2",
        "--job_name", "llama32-1b-training", "--use_pytorchjob", "--monitor",
    )  # fmt: skip
    assert (deployed["run"]["state"], deployed["run"]["step"]) == ("finished", STEPS)
    jobs = script(
        bench, "manage_pytorchjob", "--action", "status", "--name", "llama32-1b-training",
        "--namespace", bench.namespace, "--cluster_name", context,
    )  # fmt: skip
    assert jobs["jobs"][0]["state"] == "Succeeded"
    said = bench.cluster.kubectl("logs", "llama32-1b-training-worker-0", "-n", bench.namespace)
    assert said.strip()
    health = script(bench, "monitor_training", "--job-name", "llama32-1b-training", "--action", "checkpoints")
    assert max(row["step"] for row in health["checkpoints"]) == STEPS
