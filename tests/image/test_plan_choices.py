"""What `image plan` chooses, by values: the facts are those of releases.json and facts.json."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from windlass.catalog.gpus import gpus
from windlass.errors import UserError
from windlass.image.facts import table
from windlass.image.facts.node import Node, node_from_labels, node_of
from windlass.image.judge import judge
from windlass.image.plan.choose import lock, plan_image, why_not
from windlass.image.read.dockerfile import parse_dockerfile
from windlass.image.read.texts import Texts
from windlass.image.state.resolver import Answer, Found, Index
from windlass.spec import parse_run

INDEX = "https://download.pytorch.org/whl/"


def run_with(image=None, **resources):
    return parse_run(
        {
            "name": "x",
            "model": {"preset": "llama-tiny"},
            "data": {"source": "corpus:austen"},
            "image": image or {},
            "resources": resources,
        }
    )


def planned(image=None, *, driver=None, gpu=None, files=None, **resources):
    run = run_with(image, **resources)
    return plan_image(run, node_of(run, driver=driver, gpu_name=gpu), files)


def shell_of(dockerfile):
    return [one.text.replace("\n", " ") for one in parse_dockerfile(dockerfile).instructions if one.keyword == "RUN"]


def chosen(plan):
    return {one.what: one.value for one in plan.choices}


# --- the table


def test_every_release_has_everything_and_a_source():
    for one in table.releases():
        assert one.python
        assert one.platforms == ("linux/amd64", "linux/arm64")
        assert one.source.startswith("metadata and contents of torch-")
        assert one.released
        assert one.pypi.index is None
        assert one.pypi.cudnn
        assert one.pypi.compiled_for["linux/amd64"][-1].startswith("sm_")
        assert all(build.source for build in one.builds)
        assert all(build.index == f"{INDEX}{build.tag}" for build in one.builds[1:])
        assert len({build.cuda for build in one.builds}) == len(one.builds)
    versions = [Version(one.version) for one in table.releases()]
    assert versions == sorted(versions, reverse=True)
    assert {"2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"} <= {one.version for one in table.releases()}


def test_every_gpu_of_the_catalogue_has_a_compute_capability():
    assert all(table.capability(name) for name in gpus())


def test_every_gpu_of_a_server_has_its_oldest_driver():
    values = table.facts()["compute_capability"]["values"].items()
    told = {one for entry in table.facts()["gpu_drivers"] for one in entry["capability"]}
    assert {name for name, capability in values if capability not in told} == {"JETSON ORIN", "JETSON THOR"}


@pytest.mark.parametrize(
    ("gpu", "too_old", "enough"),
    [
        ("V100", "375.26", "384.81"),
        ("T4", "396.44", "410.48"),
        ("A100", "440.33", "450.80.02"),
        ("A10G", "450.80", "460.73"),
        ("L4", "515.65", "525.60"),
        ("H100", "515.65", "520.61.05"),
        ("B200", "565.57", "570.86"),
        ("RTX 5090", "565.57", "570"),
        ("B300", "575.57", "580.82.07"),
        ("GB300", "570.133.20", "580.82.07"),
    ],
)
def test_a_driver_from_before_a_gpu_does_not_run_it(gpu, too_old, enough):
    assert Node(gpu=gpu, driver=enough).contradiction is None
    told = Node(gpu=gpu, driver=too_old).contradiction
    assert told.startswith(f"driver {too_old} does not run {gpu}: ")
    assert told.endswith("is the first driver that runs it")


def test_old_gpus_are_left_behind_by_new_drivers():
    assert Node(gpu="V100", driver="580.95.05").contradiction is None
    assert Node(gpu="V100", driver="590.44").contradiction == (
        "driver 590.44 does not run V100: 580 is the last driver branch that runs it"
    )
    assert Node(gpu="T4", driver="595.58").contradiction is None
    for node in (Node(driver="535"), Node(gpu="B200"), Node(gpu="RTX 9999", driver="300"), Node(cpu_only=True)):
        assert node.contradiction is None


def test_nothing_is_chosen_for_nodes_that_cannot_be():
    for image in ({}, {"base": "nvcr.io/nvidia/pytorch:24.03-py3"}):
        with pytest.raises(UserError, match=r"there are no such nodes: driver 535\.104 does not run B200") as told:
            plan_image(run_with(image=image), Node(gpu="B200", driver="535.104"))
        assert "nvidia-smi" in told.value.fix


def test_facts_carry_their_sources():
    facts = table.facts()
    for entry in (*facts["cuda_builds"], *facts["architectures"], *facts["drivers"], *facts["gpu_drivers"]):
        assert entry["source"]
    for name in ("torch_index", "compute_capability", "efa", "flash_attention"):
        assert facts[name]["source"]


def test_some_known_facts():
    assert [build.cuda for build in table.release("2.14").builds] == ["13.0", "13.2", "12.6"]
    assert table.release("2.15.0").pypi.nccl == "2.30.7"
    assert table.release("2.7.1").pypi.cuda == "12.6"
    assert table.release("2.14.1+cu126").version == "2.14.1"
    assert table.release("9.9") is None
    assert table.companion("torchvision", "2.11.0") == "0.26.0"
    assert table.companion("torchvision", "2.15.0") == "0.29.2"
    assert table.companion("torchaudio", "2.10.0") == "2.10.0"
    assert table.companion("torchaudio", "2.15.0") == "2.11.0"  # which goes with every later torch
    assert table.companion_needs("torchvision", "0.25.0+cu128") == "==2.10.0"
    assert table.package("hyperpod-elastic-agent")["requires"]["torch"] == "<2.12.0,>=2.4.0"


def test_code_for_one_gpu_runs_on_later_minors_only():
    cu128, cu126 = table.release("2.11").build("12.8"), table.release("2.11").build("12.6")
    assert cu128.runs_on("10.3", "linux/amd64")
    assert cu128.runs_on("8.9", "linux/amd64")
    assert not cu126.runs_on("10.0", "linux/amd64")
    assert not cu128.runs_on("7.0", "linux/amd64")


# --- choices


@pytest.mark.parametrize(
    ("image", "where", "expected"),
    [
        ({}, {"instance": "p5.48xlarge", "driver": "580.95.05"}, {"torch": "2.15.0", "CUDA": "13.2", "NCCL": "2.30.7"}),
        (
            {},
            {"instance": "p5.48xlarge", "driver": "570.86"},
            {"torch": "2.14.1+cu126", "CUDA": "12.6", "NCCL": "2.29.3", "EFA": "1.48.0"},
        ),
        ({}, {"instance": "p6-b200.48xlarge", "driver": "570.172.08"}, {"torch": "2.11.0+cu128", "CUDA": "12.8"}),
        ({}, {"instance": "p6-b300.48xlarge", "driver": "580.95.05"}, {"torch": "2.15.0"}),
        ({"torch": "2.13"}, {"gpu": "h100", "driver": "580.95.05"}, {"torch": "2.13.0", "CUDA": "13.0"}),
        ({"cuda": "12.6"}, {"gpu": "h100", "driver": "580.95.05"}, {"torch": "2.14.1+cu126"}),
        ({"cuda": "13.0"}, {"gpu": "h100", "driver": "580.95.05"}, {"torch": "2.15.0+cu130"}),
        ({"torch": "2.12", "cuda": "13.2"}, {"gpu": "h100"}, {"torch": "2.12.1+cu132"}),
        (
            {"hyperpod_agent": True},
            {"instance": "ml.p5.48xlarge", "driver": "580.95.05"},
            {"torch": "2.11.0", "CUDA": "13.0", "HyperPod agent": "1.1.3"},
        ),
        ({}, {"gpus_per_node": 0}, {"torch": "2.15.0+cpu"}),
        ({"cuda": "cpu"}, {"instance": "p5.48xlarge"}, {"torch": "2.15.0+cpu"}),
        ({"python": "3.13"}, {"gpu": "a100"}, {"base image": "python:3.13-slim-bookworm", "Python": "3.13"}),
        ({}, {"gpu": "a100"}, {"base image": "ubuntu:24.04", "Python": "3.12"}),
        ({"pip": ["flash-attn"]}, {"gpu": "h100"}, {"base image": "nvidia/cuda:13.2.1-devel-ubuntu24.04"}),
        ({}, {"instance": "p6e-gb200.36xlarge", "driver": "580.95.05"}, {"platform": "linux/arm64"}),
        ({"efa": False}, {"instance": "p5.48xlarge"}, {"torch": "2.15.0"}),
        ({"base": "ubuntu:24.04"}, {"gpu": "h100"}, {"base image": "ubuntu:24.04", "torch": "2.15.0"}),
        (
            {"base": "pytorch/pytorch:2.12.1-cuda13.0-cudnn9-runtime"},
            {"gpu": "h100", "driver": "580.95"},
            {"torch": "2.12.1", "base image": "pytorch/pytorch:2.12.1-cuda13.0-cudnn9-runtime"},
        ),
    ],
)
def test_choices(image, where, expected):
    found = chosen(planned(image, **where))
    assert {name: found.get(name) for name in expected} == expected
    if image.get("efa") is False:
        assert "EFA" not in found


def test_every_choice_says_why():
    plan = planned({"hyperpod_agent": True}, instance="p5.48xlarge", driver="570.86")
    assert all(one.why for one in plan.choices)
    why = {one.what: one.why for one in plan.choices}
    assert "torch 2.15.0 with CUDA 13.2" in why["torch"]
    assert "driver 570.86 is enough (needs 525.60.13)" in why["CUDA"]


@pytest.mark.parametrize(
    ("image", "where", "says"),
    [
        ({}, {"gpu": "a100", "driver": "470.57"}, "no torch in the table runs on these nodes"),
        ({}, {"gpu": "h100", "driver": "470.57"}, "there are no such nodes: driver 470.57 does not run H100"),
        ({"torch": "2.15.0"}, {"gpu": "h100", "driver": "570.86"}, "no torch in the table"),
        ({"torch": "2.99"}, {}, "image.torch=2.99 is not in the table"),
        ({"torch": "2.9.1"}, {}, "no torch in the table"),
        ({"python": "3.10"}, {}, "windlass needs Python 3.11 or newer"),
        ({"python": "3.13"}, {"instance": "p5.48xlarge"}, "EFA's NCCL plugin is made for Ubuntu"),
        ({"cuda": "12.6"}, {"instance": "p6-b200.48xlarge", "driver": "570.86"}, "no torch in the table"),
        ({"platform": "linux/arm64"}, {"instance": "p5.48xlarge"}, "image.platform is linux/arm64"),
        ({"base": "pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime"}, {"driver": "570.86"}, "needs driver 580.65.06"),
        ({"base": "debian:12"}, {"instance": "p5.48xlarge"}, "EFA's NCCL plugin is made for ubuntu:22.04"),
        ({"requirements": "gone.txt"}, {}, "there is no file gone.txt"),
        ({"base": "ubuntu:22.04"}, {"gpu": "h100"}, "ubuntu:22.04 has 3.10"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_built(image, where, says):
    with pytest.raises(UserError, match=re.escape(says)) as raised:
        planned(image, **where)
    assert raised.value.exit_code == 2


@given(
    st.sampled_from(sorted(gpus())),
    st.sampled_from(["525.60.13", "550.90", "570.86", "580.65.06", "595.10", None]),
    st.booleans(),
    st.sampled_from(["linux/amd64", "linux/arm64"]),
)
def test_what_is_chosen_can_run_there(gpu, driver, agent, platform):
    run = run_with({"hyperpod_agent": agent, "platform": platform})
    node = Node(gpu=gpu, driver=driver, platform=platform)
    able = [b for one in table.releases() for b in one.builds if why_not(run, node, one, b) is None]
    if node.contradiction or not able:
        with pytest.raises(UserError, match="there are no such nodes" if node.contradiction else "no torch in the tab"):
            plan_image(run, node)
        return
    build = plan_image(run, node).ingredients.build
    assert why_not(run, node, table.release(build.torch), build) is None
    assert driver is None or Version(driver) >= Version(build.minimum_driver)
    assert build.runs_on(node.capability, platform)
    for newer in table.releases():  # nothing newer would have done
        if Version(newer.version) > Version(build.torch):
            assert all(why_not(run, node, newer, one) for one in newer.builds)


# --- the Dockerfile


def test_the_planned_dockerfile_has_no_conflicts_of_its_own():
    for image, where in (
        ({}, {"instance": "p5.48xlarge", "driver": "570.86"}),
        ({"hyperpod_agent": True}, {"instance": "p5.48xlarge", "driver": "580.95"}),
        ({"python": "3.13", "pip": ["wandb"]}, {"gpu": "a100", "driver": "580.95"}),
        ({"pip": ["flash-attn"]}, {"gpu": "h100", "driver": "580.95"}),
        ({"cuda": "cpu"}, {}),
    ):
        plan = planned(image, **where)
        verdict = judge(Texts(plan.dockerfile, plan.files), plan.node, Index(offline=True))
        assert verdict.errors == ()


def test_torch_is_installed_once_from_its_index_and_held():
    plan = planned({"hyperpod_agent": True}, instance="p6-b200.48xlarge", driver="570.172.08")
    torch = judge(Texts(plan.dockerfile, plan.files), plan.node, Index(offline=True)).trace.final.torch
    assert (torch.version, torch.cuda) == ("2.11.0+cu128", "12.8")
    assert plan.files[".windlass/constraints.txt"] == "torch==2.11.0+cu128\n"
    wanted = plan.files[".windlass/requirements.txt"].splitlines()
    assert "hyperpod-elastic-agent==1.1.3" in wanted
    assert not any(line.startswith(("torch=", "torch>")) for line in wanted)
    assert any(line.startswith("transformers") for line in wanted)
    steps = [one for one in parse_dockerfile(plan.dockerfile).instructions if "constraints.txt -r" in one.words]
    assert steps


def test_the_build_checks_what_it_made():
    plan = planned(gpu="h100", driver="580.95")
    program = re.search(r'RUN python -c "(import torch.*)"', plan.dockerfile)[1]
    compile(program, "check", "exec")
    assert "== '2.15.0'" in program
    assert "['nvidia-nccl-cu13']" in program


@pytest.mark.parametrize(
    ("image", "where"),
    [
        ({"hyperpod_agent": True}, {"instance": "p5.48xlarge", "driver": "570.86"}),
        ({"pip": ["flash-attn", "wandb>=0.19"]}, {"gpu": "h100"}),
        ({"base": "nvcr.io/nvidia/pytorch:26.04-py3"}, {"gpu": "h100"}),
    ],
)
def test_every_run_is_shell(image, where):
    runs = shell_of(planned(image, **where).dockerfile)
    assert len(runs) >= 4
    for text in runs:
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_the_windlass_of_the_image_is_a_script(tmp_path):
    (line,) = [text for text in shell_of(planned(gpu="h100").dockerfile) if "windlass.cli.main" in text]
    line = line.split(" && windlass --version")[0].replace("/usr/local/bin/windlass", str(tmp_path / "windlass"))
    subprocess.run(["sh", "-c", line], check=True)
    assert (tmp_path / "windlass").read_text() == '#!/bin/sh\nexec python -m windlass.cli.main "$@"\n'


def test_efa_is_found_by_the_loader_or_the_build_fails():
    plan = planned(instance="p5.48xlarge", driver="580.95")
    assert "aws-efa-installer-1.48.0.tar.gz" in plan.dockerfile
    assert "--skip-kmod" in plan.dockerfile
    assert 'test -n "$plugin"' in plan.dockerfile
    assert "aws-efa-installer" not in planned(gpu="h100", driver="580.95").dockerfile


def test_requirements_of_the_users_own():
    files = {
        "requirements.txt": "-r more.txt\ntorch==2.13.0\ntorchvision\nflash-attn==2.8.3\n",
        "more.txt": "wandb\n-c con.txt\n",
        "con.txt": "numpy<3\n",
    }
    plan = planned({"requirements": "requirements.txt"}, files=files, gpu="h100", driver="580.95")
    assert chosen(plan)["torch"] == "2.13.0"
    assert "requirements.txt:2 asks for it" in {one.why for one in plan.choices}
    assert plan.files[".windlass/own-requirements.txt"] == "wandb\n"
    assert plan.files[".windlass/constraints.txt"] == "torch==2.13.0\ntorchvision==0.28.0\nnumpy<3\n"
    assert (
        "pip install --no-cache-dir -c /opt/windlass/constraints.txt torch==2.13.0 torchvision==0.28.0"
        in plan.dockerfile
    )
    assert "--no-build-isolation -c /opt/windlass/constraints.txt 'flash-attn==2.8.3'" in plan.dockerfile
    assert chosen(plan)["base image"] == "nvidia/cuda:13.0.2-devel-ubuntu24.04"


def test_a_base_with_its_own_torch_keeps_it():
    plan = planned({"base": "nvcr.io/nvidia/pytorch:26.04-py3"}, gpu="h100")
    assert not re.search(r"pip install [^\n]*torch", plan.dockerfile)
    assert "import torch; print('torch==' + torch.__version__)" in plan.dockerfile


def test_every_install_is_held_by_the_constraints():
    plan = planned({"pip": ["flash-attn==2.8.3"]}, gpu="h100", driver="580.95")
    installs = re.findall(r"pip install [^\n]*", plan.dockerfile)
    assert len(installs) == 4
    assert all("-c /opt/windlass/constraints.txt" in one for one in installs)


def test_a_lock_without_torchs_own_index_says_that_it_is_partial(monkeypatch):
    note = "https://download.pytorch.org/whl/cu126 is out of reach: its builds are taken from the table"
    questions = []

    def answered(self, question):
        questions.append(question)
        return Answer((Found("torch", "2.14.1+cu126"), Found("filelock", "3.20.0")), notes=(note,))

    monkeypatch.setattr(Index, "resolve", answered)
    plan = lock(planned({"pip": ["flash-attn==2.8.3"]}, gpu="h100", driver="570.86"), Index())
    assert plan.files[".windlass/constraints.txt"] == "filelock==3.20.0\ntorch==2.14.1+cu126\n"
    assert plan.warnings == (f"the lock is partial: {note}, and what only they name is not pinned",)
    assert {"flash-attn==2.8.3", "ninja"} <= {*questions[0].requirements}


def test_what_is_not_known_is_said():
    assert len(planned().warnings) == 2
    assert planned(gpu="h100", driver="580.95").warnings == ()


# --- the cluster's own labels


def labels(**changes):
    return {
        "kubernetes.io/arch": "amd64",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        **changes,
    }


def test_the_oldest_driver_of_the_cluster_decides():
    older = labels(**{"nvidia.com/cuda.driver-version.full": "570.86.15"})
    node = node_from_labels([labels(), older, {"kubernetes.io/arch": "arm64"}])
    assert (node.gpu, node.driver, node.platform, node.efa) == ("H100", "570.86.15", "linux/amd64", True)


def test_older_discovery_writes_the_driver_in_parts():
    old = labels(**{"nvidia.com/cuda.driver.major": "535", "nvidia.com/cuda.driver.minor": "183"})
    del old["nvidia.com/cuda.driver-version.full"]
    assert node_from_labels([old]).driver == "535.183"


def test_an_instance_picks_its_nodes():
    other = labels(**{"nvidia.com/gpu.product": "NVIDIA-A10G", "node.kubernetes.io/instance-type": "ml.g5.48xlarge"})
    assert node_from_labels([labels(), other], instance="g5.48xlarge").gpu == "A10G"
    with pytest.raises(UserError, match="not alike"):
        node_from_labels([labels(), other])
    with pytest.raises(UserError, match=r"no p4d\.24xlarge node"):
        node_from_labels([labels(), other], instance="p4d.24xlarge")
    with pytest.raises(UserError, match="no node that says it has a GPU"):
        node_from_labels([{"kubernetes.io/arch": "amd64"}])


# --- the run file


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ({"python": 3.1}, "needs quotes"),
        ({"torch": 2.1}, "needs quotes"),
        ({"torch": "latest"}, "is no version"),
        ({"dockerfile": "Dockerfile", "torch": "2.14.1"}, "image.torch belongs into that file"),
        ({"apt": ["git; rm -rf /"]}, "no package name"),
        ({"pip": ["a\nb"]}, "is no package"),
        ({"platform": "linux/riscv64"}, "linux/amd64"),
    ],
)
def test_mistakes_in_the_image_section(image, says):
    with pytest.raises(UserError, match=says):
        run_with(image)


def test_versions_may_be_numbers_where_they_are_plain():
    image = run_with({"torch": 2.14, "python": 3.12, "cuda": 13.0}).image
    assert (image.torch, image.python, image.cuda) == ("2.14", "3.12", "13.0")
