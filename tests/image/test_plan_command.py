"""`windlass image plan` as a user calls it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.image.score import CASES, recorded_index
from windlass.cli.main import run_command

RUN = "model: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\nresources: {instance: p5.48xlarge}\n"


@pytest.fixture
def plan(tmp_path, monkeypatch, capfd):
    """Call the command in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def call(*arguments, resolve=False):
        capfd.readouterr()
        if not resolve:  # else answers that this machine has kept would be used
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    code, _, err = plan("--driver", "580.95", "-o", "made")
    assert code == 0
    made = tmp_path / "made"
    recipe = (made / "Dockerfile").read_text()
    assert recipe.startswith("FROM ubuntu:24.04\n")
    assert (made / ".windlass" / "constraints.txt").read_text() == "torch==2.15.0\n"
    copied = [word for line in recipe.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert ".windlass/windlass" in copied
    assert [name for name in copied if not (made / name).exists()] == []
    program = [sys.executable, "-m", "windlass.cli.main", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(made / ".windlass")}
    said = subprocess.run(program, env=environment, cwd=made, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("windlass ")
    told = [line.removeprefix("wrote ") for line in err.splitlines() if line.startswith("wrote ")]
    assert sorted(told) == [f"made/{name}" for name in sorted({"Dockerfile", *copied})]
    assert "docker build --platform linux/amd64 made    builds it" in err.splitlines()
    assert plan("--driver", "570.86", "-o", "made")[0] == 0  # what is as windlass wrote it is written anew
    assert (made / ".windlass" / "constraints.txt").read_text() == "torch==2.14.1+cu126\n"


@pytest.mark.parametrize("name", ["Dockerfile", ".windlass/constraints.txt", ".windlass/windlass/own.py"])
def test_nothing_of_the_users_is_written_over(plan, tmp_path, name):
    own = tmp_path / name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("mine\n")
    code, _, err = plan("-o", ".")
    assert code == 2
    assert f"did not write, or that were changed since: {name.removesuffix('/own.py')}\n" in err
    assert "--replace" in err
    assert own.read_text() == "mine\n"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 2, "nothing else is written"
    assert plan("-o", ".", "--replace")[0] == 0
    assert not own.exists() or own.read_text() != "mine\n"
    if own.exists():
        own.write_text(own.read_text() + "# changed\n")
        assert plan("-o", ".")[0] == 2, "what was written here before and changed since is the user's"


def test_a_requirements_file_of_the_context_is_not_written_over(case, tmp_path):
    own = tmp_path / REQUIREMENTS[0] / "reqs" / "common.txt"
    code, _, err = case(*REQUIREMENTS, "-o", ".")
    assert code == 2
    assert "changed since: reqs/common.txt\n" in err
    assert own.read_text() == (CASES / REQUIREMENTS[0] / "reqs" / "common.txt").read_text()


@pytest.mark.parametrize(("folder", "said"), [("run.yaml", "is no folder"), ("/proc/x", "cannot be made")])
def test_out_that_can_be_no_folder(plan, folder, said):
    code, _, err = plan("-o", folder)
    assert code == 2
    assert f"error: -o {folder}" in err
    assert said in err
    assert "-o FOLDER" in err


def test_a_driver_that_is_too_old_for_everything(plan):
    code, out, err = plan("--driver", "470.57")
    assert (code, out) == (2, "")
    assert (
        "error: there are no such nodes: driver 470.57 does not run H100: 520 is the first driver that runs it" in err
    )
    code, out, err = plan("--driver", "470.57", "--gpu", "a100")
    assert (code, out) == (2, "")
    assert "error: no torch in the table runs on these nodes" in err
    assert "needs driver 525.60.13, the nodes have 470.57" in err
    code, out, _ = plan("--driver", "new", "--json")
    assert code == 2
    assert json.loads(out)["error"] == "'new' is no version"


@pytest.mark.parametrize("gpu", ["gh200", "GB200", "gb300"])
def test_the_gpu_says_the_platform(plan, gpu, tmp_path, capfd):
    (tmp_path / "run.yaml").write_text(RUN.replace("{instance: p5.48xlarge}", "{}"))
    value = json.loads(plan("--gpu", gpu, "--driver", "580.95", "--json")[1])
    assert value["node"]["platform"] == "linux/arm64"
    assert value["choices"][0]["source"]
    code, _, err = plan("--gpu", gpu, "--driver", "580.95", "--platform", "linux/amd64")
    assert code == 2
    assert f"every node with a {gpu.upper()} is linux/arm64" in err
    (tmp_path / "Dockerfile").write_text("FROM python:3.12-slim\n")
    command = ["image", "plan", "Dockerfile", "--no-resolve", "--driver", "580.95", "--gpu", gpu, "-o", "made"]
    assert run_command(command) == 0
    assert "docker build --platform linux/arm64" in capfd.readouterr().err


def test_the_platform_of_the_command_line_is_the_runs(plan, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN.replace("{instance: p5.48xlarge}", "{}"))
    value = json.loads(plan("--gpu", "h100", "--driver", "580.95", "--platform", "linux/arm64", "--json")[1])
    assert value["node"]["platform"] == "linux/arm64"
    assert (
        "image.platform is linux/arm64 but a p5.48xlarge is linux/amd64"
        in plan("resources.instance=p5.48xlarge", "--platform", "linux/arm64")[2]
    )


def test_nodes_without_a_gpu(plan):
    code, out, _ = plan("--gpu", "none")
    assert code == 0
    assert "CPU only, linux/amd64" in out
    assert "+cpu" in out


def test_an_unknown_gpu_is_answered_with_all_that_are_known(plan):
    code, _, err = plan("--gpu", "mi300x")
    assert code == 2
    assert all(name in err for name in ("H100", "GH200", "RTX 5090", "GB300", "none"))


def test_files_that_are_not_there(plan):
    assert "the Dockerfile nowhere cannot be read" in plan("--dockerfile", "nowhere")[2]
    assert "there is no file gone.txt" in plan("--requirements", "gone.txt")[2]


def test_requirements_that_begin_with_a_byte_order_mark(plan, tmp_path):
    (tmp_path / "more.txt").write_bytes(b"\xef\xbb\xbfeinops==0.8.1\n")
    (tmp_path / "own.txt").write_bytes(b"\xef\xbb\xbf-r more.txt\n")
    value = json.loads(plan("--driver", "580.95", "--requirements", "own.txt", "--json")[1])
    assert value["files"][".windlass/own-requirements.txt"] == "einops==0.8.1\n"


def test_a_branch_of_drivers_is_its_newest_and_that_is_said(plan):
    for driver in ("580", "580.65"):
        code, out, _ = plan("--driver", driver, "--json")
        value = json.loads(out)
        assert code == 0
        assert value["choices"][1]["value"] == "2.15.0"
        assert value["assumed"] == [f"driver {driver} is 580.65.06 or newer (--driver names it whole)"]
        assert f"assumed: {value['assumed'][0]}\n" in plan("--driver", driver)[2]
    for driver in ("580.65.06", "580.95", "570"):
        assert json.loads(plan("--driver", driver, "--json")[1])["assumed"] == []
    assert "2.14.1+cu126" in plan("--driver", "580.64")[1]


def test_a_lock_is_of_planned_images(plan, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python:3.12-slim\n")
    code, _, err = plan("--lock", "--dockerfile", "Dockerfile")
    assert code == 2
    assert "--lock pins the packages of an image that windlass plans, and Dockerfile is your own" in err


def test_a_base_with_an_old_torch_is_refused(plan):
    code, _, err = plan("image.base=nvcr.io/nvidia/pytorch:25.01-py3", "--driver", "580.95")
    assert code == 2
    assert "windlass needs torch 2.11 or newer, and nvcr.io/nvidia/pytorch:25.01-py3 brings torch 2.6.0a0" in err


def test_what_is_no_dockerfile_is_answered_with_the_one_that_is_there(plan, tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    (app / "Dockerfile").write_text("FROM python:3.12-slim AS build\nFROM build\n")
    (app / "photo.png").write_bytes(b"\x89PNG\xff")
    for name in ("app", "app/photo.png"):
        code, _, err = plan("--dockerfile", name)
        assert code == 2
        assert "windlass image plan app/Dockerfile" in err
    code, _, err = plan("--dockerfile", "app/Dockerfile", "--target", "nope")
    assert code == 2
    assert "app/Dockerfile has no stage nope" in err
    assert "its stages: build, 1" in err


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


@pytest.fixture
def case(tmp_path, monkeypatch, capfd):
    """Judge a case of tests/image/cases by the recorded answers of the index, as a user would: code, stdout, stderr."""
    cache = tmp_path / "cache" / "windlass" / "answers"
    cache.mkdir(parents=True)
    recorded_index(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)

    def call(name, *arguments):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(CASES / name, folder, ignore=shutil.ignore_patterns("expect.json"))
        monkeypatch.chdir(folder)
        capfd.readouterr()
        code = run_command(["image", "plan", "Dockerfile", "--no-resolve", "--platform", "linux/amd64", *arguments])
        return int(code), *capfd.readouterr()

    return call


REQUIREMENTS = ("034-index-line-inside-requirements", "--gpu", "a10g", "--driver", "535.183.01")


def test_a_dockerfile_alone_is_judged_and_left_as_it_is(case, tmp_path):
    code, out, _ = case(*REQUIREMENTS)
    assert code == 1
    assert "error: Dockerfile:5 (reqs/common.txt:2): torch 2.3.1+cpu on linux/amd64 is a build for CPUs alone" in out
    assert "+torch==2.3.1+cu121\n" in out
    assert out.endswith("nothing is left after it\n")
    original = CASES / REQUIREMENTS[0] / "reqs" / "common.txt"
    assert (tmp_path / REQUIREMENTS[0] / "reqs" / "common.txt").read_text() == original.read_text()


def test_the_patch_applies_with_git_and_leaves_nothing(case, tmp_path):
    code, diff, _ = case(*REQUIREMENTS, "--diff")
    assert code == 1
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path / REQUIREMENTS[0])
    code, out, _ = case(*REQUIREMENTS)
    assert (code, out) == (0, "Dockerfile: no conflicts found\n")


def test_the_healed_files_go_beside(case, tmp_path):
    _, _, err = case(*REQUIREMENTS, "-o", "healed")
    folder = tmp_path / REQUIREMENTS[0]
    assert "cp -R healed/. . && docker build --platform linux/amd64 -f Dockerfile.windlass .    builds it" in err
    assert (folder / "healed" / "Dockerfile.windlass").read_text() == (folder / "Dockerfile").read_text()
    assert "torch==2.3.1+cu121\n" in (folder / "healed" / "reqs" / "common.txt").read_text()


def test_the_healed_files_go_into_the_context_itself(case):
    _, _, err = case(*REQUIREMENTS, "-o", ".", "--replace")
    assert "\ndocker build --platform linux/amd64 -f Dockerfile.windlass .    builds it" in err


def test_a_file_where_the_folder_should_be_is_no_mistake_of_windlass(case, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    code, _, err = case(*REQUIREMENTS, "-o", "../link")
    assert code == 2
    assert "error: -o ../link is no folder" in err


def test_strict_fails_on_what_could_not_be_checked(case, tmp_path):
    sound = ("066-matched-set", "--gpu", "h100", "--driver", "570.86")
    assert case(*sound, "--strict")[0] == 0
    with open(tmp_path / sound[0] / "Dockerfile", "a") as file:
        file.write("COPY --from=example.com/team/files:1 /r /r\nRUN pip install -r /r/gone.txt\n")
    code, out, err = case(*sound)
    assert (code, out) == (0, "Dockerfile: no conflicts found\n")
    assert "not checked: Dockerfile:7: /r/gone.txt is not in the context" in err
    assert case(*sound, "--strict")[0] == 1
    value = json.loads(case(*sound, "--strict", "--json")[1])
    assert any("gone.txt" in one for one in value["unchecked"])


def test_no_index_is_said_and_is_no_conflict(tmp_path, monkeypatch, capfd):
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM python:3.12-bookworm\nRUN pip install --no-cache-dir torch==2.15.0\n")
    code = run_command(["image", "plan", "Dockerfile", "--gpu", "h100", "--driver", "580.95"])
    out, err = capfd.readouterr()
    assert (int(code), out) == (0, "Dockerfile: no conflicts found\n")
    assert "not checked: Dockerfile:2: the index cannot be reached: http://127.0.0.1:9/simple" in err


CLONE = b"git clone https://h/x"
ODD = {
    "empty": (b"", 2, "error: nothing can be built from Dockerfile: there is no FROM"),
    "no FROM": (b"RUN true\n", 2, "error: nothing can be built from Dockerfile: there is no FROM"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\xff", 2, "error: the Dockerfile Dockerfile cannot be read"),
    "scratch": (b"FROM scratch\nCOPY Dockerfile /a\n", 0, "Dockerfile: no conflicts found"),
    "no such file": (b"FROM scratch\nCOPY a /a\n", 1, "Dockerfile:2: a is not in the context"),
    "CRLF": (b"FROM python:3.12-slim\r\nRUN true && \\\r\n  " + CLONE + b"\r\n", 1, "Dockerfile:3: git "),
    "BOM": (b"\xef\xbb\xbfFROM python:3.12-slim\nRUN " + CLONE, 1, "Dockerfile:2: git "),
    "heredoc": (b"FROM python:3.12-slim\nRUN <<EOF\ntrue\n" + CLONE + b"\nEOF\n", 1, "Dockerfile:4: git "),
    "ARG": (b"# syntax=docker/dockerfile:1\nARG V=3.12\nFROM python:${V}-slim\nRUN " + CLONE, 1, "Dockerfile:4: git "),
    "no value": (b"FROM python:$V\n", 0, "not checked: Dockerfile:1: python:$V: an ARG has no value"),
    "ONBUILD": (b"FROM python:3.12-slim\nONBUILD RUN " + CLONE, 0, "not checked: Dockerfile:2: ONBUILD runs in"),
    "typo": (b"FROM python:3.12-slim\nRUNN " + CLONE, 1, "error: Dockerfile:2: RUNN is no instruction"),
    "huge": (b"FROM python:3.12-slim\n" + b"RUN true && true\n" * 10_000, 0, "Dockerfile: no conflicts found"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("content", "code", "said"), ODD.values(), ids=ODD)
def test_odd_files(tmp_path, monkeypatch, capfd, content, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").write_bytes(content)
    found = run_command(["image", "plan", "Dockerfile", "--gpu", "h100", "--driver", "580.95", "--no-resolve"])
    out, err = capfd.readouterr()
    assert int(found) == code, out + err
    assert said in out + err
