"""Dockerfiles, shell lines and requirement files are read as builders, shells and pip read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.image.facts.bases import base_of
from windlass.image.read.dockerfile import parse_dockerfile, substitute, variables
from windlass.image.read.texts import Texts, remove_word
from windlass.image.recipe import Recipe
from windlass.image.read.requirements import parse_requirements, wheel_of
from windlass.image.read.shell import apt_installs, pip_installs

WHOLE = """\
# syntax=docker/dockerfile:1
ARG CUDA=12.4.1
ARG BASE=nvidia/cuda:${CUDA}-devel-ubuntu22.04
FROM --platform=linux/amd64 ${BASE} AS build
ARG TORCH=2.7.1
ENV A=1 B="x y"
RUN --mount=type=cache,target=/root/.cache pip install \\
    # a comment between
    torch==${TORCH} \\

    -r requirements.txt --extra-index-url=https://x/whl && \\
    apt-get update && apt-get install -y --no-install-recommends git curl
RUN <<EOF
pip install 'transformers>=5' numpy
python -m pip install -U wandb
EOF
FROM build
COPY . .
RUN ["pip3", "install", "a"]
RUN ["/bin/sh", "-c", "uv pip install --system b"]
"""


def test_stages_arguments_and_lines():
    whole = parse_dockerfile(WHOLE)
    first, last = whole.stages
    assert (first.name, first.image, first.platform, first.parent) == (
        "build",
        "nvidia/cuda:12.4.1-devel-ubuntu22.04",
        "linux/amd64",
        None,
    )
    assert (last.name, last.parent) == (None, 0)
    assert whole.chain() == (first, last)
    spans = {(one.keyword, one.first, one.last) for one in whole.instructions}
    assert {("RUN", 7, 12), ("RUN", 13, 16), ("FROM", 17, 17)} <= spans
    run = next(one for one in whole.instructions if one.first == 7)
    assert run.flags == {"mount": "type=cache,target=/root/.cache"}
    assert variables(whole, run) == {"TORCH": "2.7.1", "A": "1", "B": "x y"}


def test_what_the_runs_install():
    recipe = Recipe(Texts(WHOLE, {"requirements.txt": "rich\n"}))
    installs = [step.install for step in recipe.steps]
    assert [one.requirements for one in installs] == [
        ("torch==2.7.1",),
        ("transformers>=5", "numpy"),
        ("wandb",),
        ("a",),
        ("b",),
    ]
    assert [one.by_uv for one in installs] == [False, False, False, False, True]
    assert installs[0].files == ("requirements.txt",)
    assert installs[0].indexes == ("https://x/whl",)
    assert [one.name for one in recipe.steps[0].wanted] == ["torch", "rich"]
    assert recipe.apt_packages == {"git", "curl"}
    assert str(recipe.steps[0].wanted[0].place) == "Dockerfile:9"


@pytest.mark.parametrize(
    ("line", "requirements", "options"),
    [
        ("pip install -q --no-cache-dir torch==2.1", ("torch==2.1",), {"-q", "--no-cache-dir"}),
        ("python3 -m pip install --upgrade pip", ("pip",), {"--upgrade"}),
        ("/opt/venv/bin/pip3.12 install 'a[b]>=1,<2' c", ("a[b]>=1,<2", "c"), set()),
        ("PIP_RETRIES=3 sudo pip install a > /dev/null 2>&1", ("a",), set()),
        ("pip --no-cache-dir install -rreq.txt -c con.txt x", ("x",), {"-r", "-c"}),
        ("pip install -i https://i/simple -f https://f a", ("a",), {"-i", "-f"}),
        ("if true; then pip install a; fi", ("a",), set()),
    ],
)
def test_pip_lines(line, requirements, options):
    instruction = parse_dockerfile(f"FROM x\nRUN {line}\n").instructions[-1]
    (found,) = pip_installs(instruction)
    assert found.requirements == requirements
    assert set(found.options) == options


def test_lines_that_install_nothing():
    for line in ("pip --version", "pip download a", "echo pip install a", "apt-get update", "npm install x"):
        instruction = parse_dockerfile(f"FROM x\nRUN {line}\n").instructions[-1]
        assert not list(pip_installs(instruction))
        assert not list(apt_installs(instruction))


def test_another_escape_character_and_old_env():
    whole = parse_dockerfile("# escape=`\nFROM x\nENV HOME_DIR C:\\a b\nRUN pip install `\n  a\n")
    assert [one.keyword for one in whole.instructions] == ["FROM", "ENV", "RUN"]
    assert variables(whole, whole.instructions[-1]) == {"HOME_DIR": "C:\\a b"}
    assert whole.instructions[-1].words == "pip install a"


def test_values():
    values = {"A": "1", "EMPTY": ""}
    assert substitute("$A ${A} ${B:-x$A} ${A:+y} ${EMPTY:-z} \\$A $UNKNOWN", values) == "1 1 x1 y z $A $UNKNOWN"


def test_requirement_files_with_what_they_name():
    files = {
        "requirements.txt": "-r base/req.txt\n-c con.txt\n--extra-index-url https://x/whl/cu128\n"
        "torch==2.11.0 \\\n  --hash=sha256:aa\nfoo @ https://h/foo-1.0-py3-none-any.whl\n-e ./mine\n# no\n",
        "base/req.txt": "numpy>=2  # arrays\n-r ../requirements.txt\n-r gone.txt\n",
        "con.txt": "scipy<2\n",
    }
    parsed = parse_requirements("requirements.txt", files)
    assert [(one.name, one.constraint, str(one.place)) for one in parsed.wanted] == [
        ("numpy", False, "base/req.txt:1"),
        ("scipy", True, "con.txt:1"),
        ("torch", False, "requirements.txt:4"),
        ("foo", False, "requirements.txt:6"),
        ("mine", False, "requirements.txt:7"),
    ]
    assert [one.pin for one in parsed.wanted] == [None, None, "2.11.0", "1.0", None]
    assert parsed.missing[0][0] == "base/gone.txt"
    assert parsed.options[0][:2] == ("--extra-index-url", "https://x/whl/cu128")


def test_the_last_torch_that_pip_keeps():
    two = "FROM python:3.12\nRUN pip install torch==2.11.0\nRUN pip install {}\n"
    assert Recipe(Texts(two.format("'torch>=2.4'"))).torch == "2.11.0"
    assert Recipe(Texts(two.format("torch==2.12.0"))).torch == "2.12.0"
    assert Recipe(Texts(two.format("-U torch"))).torch == "2.15.0"
    base = "FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime\nRUN pip install {}\n"
    assert (Recipe(Texts(base.format("torch"))).torch, Recipe(Texts(base.format("torch"))).cuda) == ("2.9.1", "12.8")
    assert Recipe(Texts(base.format("torch==2.11.0"))).cuda == "13.0"


@pytest.mark.parametrize(
    ("command", "cuda"),
    [
        ("torch==2.11.0", "13.0"),
        ("torch==2.11.0+cu128", "12.8"),
        ("--index-url https://download.pytorch.org/whl/cu126 torch==2.11.0", "12.6"),
        ("--index-url https://download.pytorch.org/whl/cpu torch", "cpu"),
        ("torch==2.8.0", "12.8"),
    ],
)
def test_the_cuda_of_torch(command, cuda):
    assert Recipe(Texts(f"FROM python:3.12\nRUN pip install {command}\n")).cuda == cuda


@pytest.mark.parametrize(
    ("image", "known"),
    [
        ("nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04", {"cuda": "12.4", "python": "3.10", "has_nvcc": True}),
        ("pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime", {"torch": "2.9.1", "cuda": "12.8", "has_nvcc": False}),
        ("nvcr.io/nvidia/pytorch:25.03-py3", {"family": "nvidia-torch"}),
        ("docker.io/library/python:3.11-slim", {"python": "3.11", "has_compiler": False, "repository": "python"}),
        ("ubuntu:24.04", {"system": "ubuntu24.04", "python": "3.12"}),
        ("debian:bookworm-slim", {"system": "debian12", "python": "3.11"}),
        ("localhost:5000/a/b", {"repository": "localhost:5000/a/b", "tag": None}),
        (
            "x.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-ec2",
            {"torch": "2.8.0", "python": "3.12", "cuda": "12.9"},
        ),
        (
            "public.ecr.aws/hpc-cloud/nccl-tests:cuda13.0.2-efa1.48.0-ofi1.19.0-nccl2.30.4",
            {"cuda": "13.0", "efa": "1.48.0", "nccl": "2.30.4"},
        ),
    ],
)
def test_what_the_name_of_a_base_says(image, known):
    base = base_of(image)
    assert {name: getattr(base, name) for name in known} == known


def test_pinned_bases():
    pinned = {"a:1": True, "a": False, "a:latest": False, "r:5000/a": False, "a@sha256:00": True}
    assert {name: base_of(name).pinned for name in pinned} == pinned


def test_wheels_in_addresses():
    name, version, tags = wheel_of("https://h/flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    assert (name, str(version), tags) == ("flash-attn", "2.8.3+cu12torch2.8cxx11abitrue", {"cp312-cp312-linux_x86_64"})
    assert wheel_of("https://h/x.tar.gz") is None


def test_the_last_line_of_a_command_goes_with_its_backslash():
    text = "FROM x\nRUN pip install a \\\n    b\nCOPY c d\n"
    assert remove_word(text, 2, 3, "b") == "FROM x\nRUN pip install a\nCOPY c d\n"
    assert remove_word(text, 2, 3, "a") == "FROM x\nRUN pip install \\\n    b\nCOPY c d\n"


words = st.sampled_from(
    ["RUN", "FROM x", "pip install", "torch==2", "\\", "<<EOF", "EOF", "#", "'", '"', "&&", "$A", ""]
)


@given(st.lists(st.lists(words, max_size=4).map(" ".join), max_size=8).map("\n".join))
def test_any_text_can_be_read(text):
    whole = parse_dockerfile(text)
    assert all(1 <= one.first <= one.last <= len(text.splitlines()) for one in whole.instructions)
    recipe = Recipe(Texts(text))
    assert all(step.install.instruction.keyword == "RUN" for step in recipe.steps)
