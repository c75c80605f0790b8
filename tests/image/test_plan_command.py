"""`windlass image plan` as a user calls it."""

from __future__ import annotations

import json

import pytest

from windlass.cli.main import run_command

RUN = "model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\nresources: {instance: p5.48xlarge}\n"


@pytest.fixture
def plan(tmp_path, monkeypatch, capfd):
    """Call the command in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def call(*arguments, resolve=False):
        capfd.readouterr()
        extra = () if resolve else ("--no-resolve",)
        code = run_command(["image", "plan", "run.yaml", *arguments, *extra])
        out, err = capfd.readouterr()
        return int(code), out, err

    return call


def test_choices_reasons_and_the_dockerfile(plan):
    code, out, err = plan("--driver", "570.86")
    assert code == 0
    assert "not checked: " in err, "--no-resolve asks no index, and says so"
    assert "2.14.1+cu126 · the newest that fits; torch 2.15.0 with CUDA 13.2" in out
    assert "FROM ubuntu:24.04" in out
    assert "aws-ofi-nccl 1.19.0" in out
    assert "# .windlass/constraints.txt\ntorch==2.14.1+cu126" in out


def test_json_has_the_same(plan):
    code, out, _ = plan("--driver", "580.95.05", "--json")
    value = json.loads(out)
    assert code == 0
    assert {one["what"]: one["value"] for one in value["choices"]}["torch"] == "2.15.0"
    assert value["dockerfile"].startswith("FROM ubuntu:24.04\n")
    assert value["node"]["gpu"] == "H100"
    assert (value["conflicts"], value["patch"], value["warnings"]) == ([], "", [])


def test_what_is_unknown_is_warned_of(plan):
    code, _, err = plan()
    assert code == 0
    assert "the driver of the nodes is not known: this image needs 580.65.06" in err


def test_out_writes_what_a_build_needs(plan, tmp_path):
    assert plan("--driver", "580.95", "-o", "made")[0] == 0
    assert (tmp_path / "made" / "Dockerfile").read_text().startswith("FROM ubuntu:24.04\n")
    assert (tmp_path / "made" / ".windlass" / "constraints.txt").read_text() == "torch==2.15.0\n"


def test_a_driver_that_is_too_old_for_everything(plan):
    code, out, err = plan("--driver", "470.57")
    assert (code, out) == (2, "")
    assert "error: no torch in the table runs on these nodes" in err
    assert "needs driver 525.60.13, the nodes have 470.57" in err
    code, out, _ = plan("--driver", "new", "--json")
    assert code == 2
    assert json.loads(out)["error"] == "'new' is no version"


def test_files_that_are_not_there(plan):
    assert "the Dockerfile nowhere cannot be read" in plan("--dockerfile", "nowhere")[2]
    assert "there is no file gone.txt" in plan("--requirements", "gone.txt")[2]


def test_from_cluster_alone(plan):
    code, _, err = plan("--from-cluster", "--driver", "580.95")
    assert code == 2
    assert "--from-cluster reads GPU and driver itself" in err


def test_from_cluster_reads_the_labels_of_the_nodes(plan, monkeypatch):
    from windlass.targets.kubernetes.client import KubernetesTarget
    from windlass.targets.kubernetes.manifests.cluster_facts import ClusterFacts, NodeFacts, Served

    old = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/cuda.driver-version.full": "570.86.15"}
    nodes = [NodeFacts("a", {**old, "node.kubernetes.io/instance-type": "p5.48xlarge"}), NodeFacts("b", {})]
    monkeypatch.setattr(KubernetesTarget, "facts", lambda *_: ClusterFacts(Served({}), "default", nodes))
    code, out, _ = plan("--from-cluster", "--json")
    value = json.loads(out)
    assert code == 0
    assert (value["node"]["driver"], value["node"]["origin"]) == ("570.86.15", "1 node of the cluster")
    assert value["choices"][1]["value"] == "2.14.1+cu126"
