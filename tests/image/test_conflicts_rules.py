"""Planted conflicts are found by reading, and one patch removes those that a change can remove."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.image.conflicts import find_conflicts, patch
from windlass.image.facts.node import Node
from windlass.image.read.texts import Texts

H100 = Node(gpu="H100", driver="580.95.05")
OLD = Node(gpu="H100", driver="570.86")
B200 = Node(gpu="B200", driver="570.172.08")
PY = "FROM python:3.12-bookworm\n"
DEVEL = "FROM nvidia/cuda:13.0.2-devel-ubuntu22.04\n"
FLASH = "https://h/flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
INDEX = "https://download.pytorch.org/whl/"

# id: Dockerfile, requirement files, node, and the line that the patch must have; None: no change can help
PLANTED = {
    "torch-cuda": (
        PY + f"RUN pip install --no-cache-dir torch==2.12.0 --index-url {INDEX}cu128\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.12.0 --index-url https://pypi.org/simple",
    ),
    "torchvision-of-torch": (
        PY + "RUN pip install --no-cache-dir torch==2.11.0 torchvision==0.24.0\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.11.0 torchvision==0.26.0",
    ),
    "torchaudio-of-torch": (
        PY + "COPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\n",
        {"requirements.txt": "torch==2.10.0\ntorchaudio==2.9.1\n"},
        H100,
        "+torchaudio==2.10.0",
    ),
    "two-nccl": (
        PY + "RUN pip install --no-cache-dir torch==2.15.0 nvidia-nccl-cu12==2.27.5\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.15.0",
    ),
    "flash-attn-abi": (
        "FROM nvidia/cuda:13.0.2-devel-ubuntu24.04\nENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        f"RUN pip install --no-cache-dir torch==2.14.1\nRUN pip install --no-cache-dir {FLASH}\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir --no-build-isolation flash-attn==2.8.3",
    ),
    "build-isolation": (
        "FROM nvidia/cuda:13.0.2-devel-ubuntu24.04\nENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN pip install --no-cache-dir torch==2.14.1 flash-attn==2.8.3.post2\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir --no-build-isolation flash-attn==2.8.3.post2",
    ),
    "no-nvcc": (
        "FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04\nENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN apt-get update && apt-get install -y gcc python3-dev python3-pip && rm -rf /var/lib/apt/lists/*\n"
        "RUN pip install --no-cache-dir torch==2.14.1\n"
        "RUN pip install --no-cache-dir --no-build-isolation flash-attn\n",
        {},
        H100,
        "+FROM nvidia/cuda:13.0.2-devel-ubuntu24.04",
    ),
    "driver-too-old": (
        PY + "RUN pip install --no-cache-dir torch==2.14.1 torchvision==0.29.2\n",
        {},
        OLD,
        f"+RUN pip install --no-cache-dir torch==2.14.1+cu126 --extra-index-url {INDEX}cu126 torchvision==0.29.2",
    ),
    "gpu-architecture": (
        PY + f"RUN pip install --no-cache-dir torch==2.11.0 --extra-index-url {INDEX}cu126\n",
        {},
        B200,
        f"+RUN pip install --no-cache-dir torch==2.11.0 --extra-index-url {INDEX}cu128",
    ),
    "agent-torch": (
        PY + "RUN pip install --no-cache-dir torch==2.15.0\nRUN pip install --no-cache-dir hyperpod-elastic-agent\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.11.0",
    ),
    "agent-reinstalls-torch": (
        PY + "RUN pip install --no-cache-dir torch==2.11.0\n"
        "RUN pip install --no-cache-dir hyperpod-elastic-agent==1.1.3\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir hyperpod-elastic-agent==1.1.3 torch==2.11.0",
    ),
    "base-torch": (
        "FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel\nCOPY requirements.txt .\n"
        "RUN pip install --no-cache-dir -r requirements.txt\n",
        {"requirements.txt": "torch==2.11.0\ntransformers\n"},
        H100,
        "-torch==2.11.0",
    ),
    "base-cuda": (
        "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nRUN pip install --no-cache-dir torch==2.14.1\n",
        {},
        H100,
        "+FROM nvidia/cuda:13.0.2-devel-ubuntu24.04",
    ),
    "python-of-torch": (
        "FROM python:3.9-bookworm\nRUN pip install --no-cache-dir torch==2.11.0\n",
        {},
        H100,
        "+FROM python:3.11-bookworm",
    ),
    "unpinned-torch": (
        PY + "RUN pip install --no-cache-dir torch\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.15.0",
    ),
    "platform": (
        "FROM --platform=linux/arm64 python:3.12-bookworm\nRUN pip install --no-cache-dir torch==2.15.0\n",
        {},
        H100,
        "+FROM --platform=linux/amd64 python:3.12-bookworm",
    ),
    "wheel-platform": (
        PY + "RUN pip install --no-cache-dir https://h/foo-1.0-cp312-cp312-manylinux_2_28_aarch64.whl\n",
        {},
        H100,
        None,
    ),
    "pip-cache": (
        PY + "RUN pip install torch==2.15.0\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.15.0",
    ),
    "latest": ("FROM ubuntu:latest\nRUN true\n", {}, H100, "+FROM ubuntu:24.04"),
    "apt-asks": (
        "FROM debian:12\nRUN apt-get update && apt-get install git && rm -rf /var/lib/apt/lists/*\n",
        {},
        H100,
        "+RUN apt-get update && apt-get install -y git && rm -rf /var/lib/apt/lists/*",
    ),
    "apt-lists": (
        "FROM debian:12\nRUN apt-get update && apt-get install -y git\n",
        {},
        H100,
        "+    && rm -rf /var/lib/apt/lists/*",
    ),
    "apt-update-alone": (
        "FROM debian:12\nRUN apt-get update\nRUN apt-get install -y git && rm -rf /var/lib/apt/lists/*\n",
        {},
        H100,
        "+RUN apt-get update && apt-get install -y git && rm -rf /var/lib/apt/lists/*",
    ),
    "no-compiler": (
        "FROM python:3.12-slim-bookworm\nRUN pip install --no-cache-dir torch==2.15.0\n",
        {},
        H100,
        "+RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \\",
    ),
    "externally-managed": (
        "FROM debian:12\nRUN apt-get update && apt-get install -y python3-pip && rm -rf /var/lib/apt/lists/*\n"
        "RUN pip install --no-cache-dir rich\n",
        {},
        H100,
        "+ENV PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1",
    ),
    "cuda-compat": (
        PY + "ENV LD_LIBRARY_PATH=/usr/local/cuda/compat:/opt/lib\nRUN pip install --no-cache-dir torch==2.15.0\n",
        {},
        H100,
        "+ENV LD_LIBRARY_PATH=/opt/lib",
    ),
    "nccl-preloaded": (
        PY + "ENV LD_PRELOAD=/opt/nccl/lib/libnccl.so\nRUN pip install --no-cache-dir torch==2.15.0\n",
        {},
        H100,
        "-ENV LD_PRELOAD=/opt/nccl/lib/libnccl.so",
    ),
    "efa-latest": (
        PY + "RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz\n",
        {},
        H100,
        "+RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-1.48.0.tar.gz",
    ),
    "efa-too-old": (
        PY + "RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-1.26.1.tar.gz\n",
        {},
        H100,
        "+RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-1.48.0.tar.gz",
    ),
    "efa-without-plugin": (
        PY + "RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-1.36.0.tar.gz\n",
        {},
        H100,
        "+RUN curl -O https://efa-installer.amazonaws.com/aws-efa-installer-1.48.0.tar.gz",
    ),
    "triton-of-torch": (
        PY + "RUN pip install --no-cache-dir torch==2.11.0 triton==3.5.0\n",
        {},
        H100,
        "+RUN pip install --no-cache-dir torch==2.11.0",
    ),
    "nvidia-cudnn-cu13-of-torch": (
        PY + "RUN pip install --no-cache-dir -r requirements.txt\n",
        {"requirements.txt": "torch==2.15.0\nnvidia-cudnn-cu13==9.10.0.1\n"},
        H100,
        "-nvidia-cudnn-cu13==9.10.0.1",
    ),
    "no-efa": (
        PY + "RUN pip install --no-cache-dir torch==2.15.0\n",
        {},
        Node(gpu="H100", driver="580.95", efa=True),
        None,
    ),
    "secret": (PY + "ENV HF_TOKEN=hf_123\nRUN true\n", {}, H100, None),
    "conda-and-pip": (PY + "RUN conda install -y numpy\nRUN pip install --no-cache-dir rich\n", {}, H100, None),
}


@pytest.mark.parametrize("id", PLANTED)
def test_a_planted_conflict_is_found_and_removed(id):
    dockerfile, files, node, line = PLANTED[id]
    found = {one.id: one for one in find_conflicts(dockerfile, files, node)}
    assert set(found) == {id}, "nothing else is wrong with it"
    assert found[id].place is not None
    made = patch(Texts(dockerfile, files), node)
    if line is None:
        assert found[id].fix is None
        assert made.diff == ""
        return
    assert line in made.diff.splitlines()
    assert id not in {one.id for one in find_conflicts(made.after.dockerfile, made.after.files, node)}
    assert found[id].fix.sentence


def test_a_good_dockerfile_has_no_conflicts():
    text = (
        "FROM python:3.12-slim-bookworm AS base\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \\\n"
        "    && rm -rf /var/lib/apt/lists/*\n"
        "RUN pip install --no-cache-dir torch==2.15.0 torchvision==0.29.2 nvidia-nccl-cu13==2.30.7\n"
        "FROM base\n"
        "RUN --mount=type=cache,target=/root/.cache/pip pip install transformers==5.22.2\n"
    )
    assert find_conflicts(text, {}, H100) == []
    assert patch(Texts(text), H100).diff == ""


def test_requirements_alone():
    files = {"requirements.txt": "-r more.txt\ntorch==2.15.0\ntorchvision==0.24.0\n", "more.txt": "nvidia-nccl-cu12\n"}
    found = find_conflicts(None, files, OLD)
    assert {one.id for one in found} == {"driver-too-old", "torchvision-of-torch", "two-nccl"}
    made = patch(Texts(None, files), OLD)
    assert made.after.files["requirements.txt"].splitlines() == [
        "-r more.txt",
        f"--extra-index-url {INDEX}cu126",
        "torch==2.14.1+cu126",
        "torchvision==0.29.2",
    ]
    assert made.left == ()


def test_ten_at_once_and_one_patch():
    text = (
        "FROM nvidia/cuda:12.1.1-runtime-ubuntu22.04\n"
        "ARG TORCH_VERSION=2.15.0\n"
        "ENV LD_LIBRARY_PATH=/usr/local/cuda/compat:/opt/lib\n"
        "RUN apt-get update\n"
        "RUN apt-get install python3-pip libnccl2 git\n"
        "RUN pip install torch==${TORCH_VERSION} torchvision==0.20.1 \\\n"
        "    nvidia-nccl-cu12==2.21.5 flash-attn\n"
        "COPY requirements.txt /tmp/\n"
        "RUN pip install -r /tmp/requirements.txt\n"
    )
    files = {"requirements.txt": "hyperpod-elastic-agent\ntransformers>=5\n"}
    ids = {one.id for one in find_conflicts(text, files, OLD)}
    assert ids >= {
        "agent-torch",
        "driver-too-old",
        "python-of-torch",
        "torchvision-of-torch",
        "two-nccl",
        "build-isolation",
        "no-nvcc",
        "cuda-compat",
        "apt-asks",
        "base-cuda",
        "pip-cache",
        "apt-update-alone",
    }
    made = patch(Texts(text, files), OLD)
    assert made.left == ()
    assert made.after.dockerfile == (
        "FROM nvidia/cuda:12.8.1-devel-ubuntu24.04\n"
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1 UV_BREAK_SYSTEM_PACKAGES=1\n"
        "ARG TORCH_VERSION=2.11.0\n"
        "ENV LD_LIBRARY_PATH=/opt/lib\n"
        "RUN apt-get update && apt-get install -y python3-pip git \\\n"
        "    && rm -rf /var/lib/apt/lists/*\n"
        f"RUN pip install --no-cache-dir --extra-index-url {INDEX}cu128 torch==${{TORCH_VERSION}} torchvision==0.26.0\n"
        "RUN pip install --no-cache-dir --no-build-isolation flash-attn\n"
        "COPY requirements.txt /tmp/\n"
        "RUN pip install --no-cache-dir -r /tmp/requirements.txt\n"
    )
    assert made.after.files["requirements.txt"] == "hyperpod-elastic-agent\ntorch==2.11.0\ntransformers>=5\n"


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("FROM nvcr.io/nvidia/pytorch:25.03-py3\nRUN pip install --no-cache-dir -r r.txt\n", {"r.txt": "torch>=2.0\n"}),
        (PY + "RUN uv pip install --system torch==2.14.1 --torch-backend=cu126\n", {}),
        ("FROM x.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04\nRUN true\n", {}),
        ("FROM public.ecr.aws/hpc-cloud/nccl-tests:cuda12.8.1-efa1.43.2-ofi1.16.3-nccl2.27.7\nRUN true\n", {}),
    ],
)
def test_what_is_right_is_left_alone(dockerfile, files):
    assert find_conflicts(dockerfile, files, Node(gpu="H100", driver="550.90.07", efa="uv" not in dockerfile)) == []


def test_uv_names_torchs_cuda_its_own_way():
    made = patch(Texts(PY + "RUN uv pip install --system torch==2.14.1 --torch-backend=cu130\n"), OLD)
    assert made.after.dockerfile == PY + "RUN uv pip install --system torch==2.14.1 --torch-backend=cu126\n"


def test_nvcc_is_in_the_devel_image_of_the_same_torch():
    text = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime\n"
    made = patch(Texts(text + "RUN pip install --no-cache-dir --no-build-isolation flash-attn\n"), H100)
    assert made.after.dockerfile.startswith("FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\n")


def test_only_the_stages_of_the_final_image_count():
    text = "FROM python:3.12-bookworm AS tools\nRUN pip install torch==2.15.0 torchvision==0.1.0\n" + PY + "RUN true\n"
    assert find_conflicts(text, {}, H100) == []


def test_secrets_are_not_repeated():
    (found,) = find_conflicts(PLANTED["secret"][0], {}, H100)
    assert "hf_123" not in f"{found.sentence}{found.evidence}"


@settings(max_examples=20)
@given(st.lists(st.sampled_from(sorted(PLANTED)), min_size=1, max_size=4, unique=True))
def test_patching_ends_and_is_final(ids):
    """Any mixture: after the patch, patching again changes nothing."""
    bodies = "".join(PLANTED[id][0].split("\n", 1)[1] for id in ids)
    files: dict[str, str] = {}
    for id in ids:
        files |= PLANTED[id][1]
    texts = Texts(PLANTED[ids[0]][0].split("\n", 1)[0] + "\n" + bodies, files)
    made = patch(texts, PLANTED[ids[0]][2])
    again = patch(made.after, PLANTED[ids[0]][2])
    assert again.diff == ""
