"""`windlass image plan` as a user calls it."""

from __future__ import annotations

import json
import subprocess

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
    assert (code, err) == (0, "")
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


DOCKERFILE = """\
FROM python:3.12-bookworm
COPY deps/requirements.txt /tmp/requirements.txt
RUN pip install torch==2.15.0 torchvision==0.24.0
RUN pip install -r /tmp/requirements.txt
"""


@pytest.fixture
def mine(tmp_path):
    """A Dockerfile of the user's own with a few things wrong."""
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps" / "requirements.txt").write_text("nvidia-nccl-cu12\ntransformers\n")
    (tmp_path / "notes.txt").write_text("torch==0.1\n")
    return tmp_path


def test_a_users_own_dockerfile_is_checked_and_patched(plan, mine):
    code, out, _ = plan("--driver", "580.95", "--dockerfile", "Dockerfile", "image.efa=false")
    assert code == 1
    assert "error: Dockerfile:3: torchvision 0.24.0 requires torch==2.9.0" in out
    assert "error: deps/requirements.txt:1: nvidia-nccl-cu12 beside torch" in out
    assert "+RUN pip install --no-cache-dir torch==2.15.0 torchvision==0.29.2" in out
    assert out.rstrip().endswith("4 changes in this patch; nothing is left after it")
    assert (mine / "Dockerfile").read_text() == DOCKERFILE, "nothing of the user's is touched"


def test_the_patch_applies_and_leaves_nothing(plan, mine):
    _, diff, _ = plan("--driver", "580.95", "--dockerfile", "Dockerfile", "image.efa=false", "--diff")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=mine)
    code, out, _ = plan("--driver", "580.95", "--dockerfile", "Dockerfile", "image.efa=false")
    assert (code, out) == (0, "Dockerfile: no conflicts found\n")


def test_the_repaired_dockerfile_goes_beside(plan, mine):
    plan("--driver", "580.95", "--dockerfile", "Dockerfile", "-o", "fixed")
    assert "torchvision==0.29.2" in (mine / "fixed" / "Dockerfile.windlass").read_text()
    assert (mine / "fixed" / "deps" / "requirements.txt").read_text() == "transformers\n"


def test_requirements_are_checked_then_planned_with(plan, tmp_path):
    (tmp_path / "requirements.txt").write_text("torch==2.15.0\nwandb\n")
    code, out, _ = plan("--driver", "570.86", "--requirements", "requirements.txt")
    assert code == 1
    assert "+torch==2.14.1+cu126" in out
    assert "The plan with this patch:" in out
    assert "--extra-index-url https://download.pytorch.org/whl/cu126 torch==2.14.1+cu126\n" in out
    code, out, _ = plan("--driver", "570.86", "--requirements", "requirements.txt", "--json")
    assert [one["id"] for one in json.loads(out)["conflicts"]] == ["driver-too-old"]


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


@pytest.mark.slow
def test_no_index_is_said_and_is_no_conflict(plan, mine, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    (mine / "Dockerfile").write_text("FROM python:3.12-bookworm\nRUN pip install --no-cache-dir torch==2.15.0\n")
    code, out, err = plan("--driver", "580.95", "--dockerfile", "Dockerfile", "image.efa=false", resolve=True)
    assert (code, out) == (0, "Dockerfile: no conflicts found\n")
    assert err.startswith("not checked: pip install --no-cache-dir torch==2.15.0")
