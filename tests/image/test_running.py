"""What fails when an image runs, told from its Dockerfile and the code that it starts. Offline; nothing is resolved."""

from __future__ import annotations

import pytest

from tests.image.test_machine import JAMMY, SLIM, found

TORCH = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-runtime\n"
START = 'WORKDIR /app\nCOPY . .\nCMD ["python", "train.py"]\n'
COMPILES = "import torch\nmodel = torch.compile(torch.nn.Linear(2, 2))\n"
IN_MAIN = "import torch\ndef main():\n    model = torch.compile(net)\nif __name__ == '__main__':\n    main()\n"
BY_FLAG = "import torch\nif args.compile:\n    model = torch.compile(model)\n"


def ids(text: str, tmp_path, files=None) -> set[str]:
    return {error for error, _ in found(text, tmp_path, files)}


@pytest.mark.parametrize(
    ("base", "code", "expected"),
    [
        (SLIM, COMPILES, {"missing-compiler"}),
        (TORCH, IN_MAIN, {"missing-compiler"}),
        (TORCH, "import triton\n@triton.jit\ndef kernel(x): pass\n", {"missing-compiler"}),
        (TORCH, "from unsloth import FastLanguageModel\n", {"missing-compiler"}),
        (TORCH, "from transformers import TrainingArguments as T\nT(torch_compile=True)\n", {"missing-compiler"}),
        (TORCH, "from models.net import Net\nNet()\n", {"missing-compiler"}),  # which compiles itself
        (TORCH, "import models.net\n", set()),
        (TORCH, BY_FLAG, set()),
        (TORCH, "try:\n    import unsloth\nexcept ImportError:\n    pass\n", set()),
        (TORCH, "import torch\nmodel = torch.compile(net, backend='eager')\n", set()),
        (TORCH, "import torch\nmodel = torch.compile(net, disable=not args.fast)\n", set()),
        (TORCH, "import torch\nmodel = torch.compile(net) if fast else net\n", set()),
        (
            TORCH,
            "import torch\ndef fast(net):\n    if cpu:\n        return net\n    return torch.compile(net)\n",
            set(),
        ),
        (f"{TORCH}ENV TORCHDYNAMO_DISABLE=1\n", COMPILES, set()),
        (f"{TORCH}RUN apt-get update && apt-get install -y gcc\n", COMPILES, set()),
        (TORCH.replace("runtime", "devel"), COMPILES, set()),
        (TORCH.replace("2.5.1-cuda12.4", "2.11.0-cuda12.8"), COMPILES, set()),
        ("FROM python:3.11-bookworm\n", COMPILES, set()),
        ("FROM example.com/base:1\n", COMPILES, set()),
        (
            f"{JAMMY}RUN apt-get update && apt-get install -y --no-install-recommends python3\n",
            COMPILES,
            {"missing-header"},
        ),
        (f"{JAMMY}RUN apt-get update && apt-get install -y python3-dev\n", COMPILES, set()),
    ],
)
def test_code_that_compiles_as_it_runs(base, code, expected, tmp_path):
    net = "import torch\nclass Net:\n    def __init__(self):\n        self.f = torch.compile(self.g)\n"
    files = {"train.py": code, "models/net.py": net, "models/__init__.py": "", "tests/test_x.py": COMPILES}
    start = START.replace('"python"', '"python3"')
    assert ids(base + start, tmp_path, files) & {"missing-compiler", "missing-header"} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('RUN pip install vllm==0.9.0\nCMD ["vllm", "serve", "x"]\n', {"missing-compiler"}),
        ('CMD ["python", "-m", "vllm.entrypoints.openai.api_server"]\n', {"missing-compiler"}),
        ('CMD ["vllm", "serve", "x", "--enforce-eager"]\n', set()),
        ("RUN pip install unsloth==2025.2.12\n", {"missing-compiler"}),
        ("RUN pip install vllm==0.9.0\n", set()),
        ('COPY . /app\nCMD ["bash", "/app/run.sh"]\n', {"missing-compiler"}),
    ],
)
def test_what_is_started_by_its_name(text, expected, tmp_path):
    files = {"run.sh": "#!/bin/bash\nexec torchrun /app/train.py\n", "train.py": COMPILES}
    assert ids(SLIM + text, tmp_path, files) & {"missing-compiler"} == expected


UV = "COPY --from=ghcr.io/astral-sh/uv:0.8 /uv /bin/\nRUN uv venv --python 3.12 /v\nENV PATH=/v/bin:$PATH\n"
USER = 'RUN useradd -m a\nUSER a\nCMD ["python", "x.py"]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UV + USER, {("permission", 6)}),
        (UV.replace("RUN uv", "RUN uv python install 3.12 && uv") + USER, {("permission", 6)}),
        (UV + USER.replace("CMD", "ENTRYPOINT"), {("permission", 6)}),
        (UV + USER.replace("USER a\n", ""), set()),
        (UV.replace("RUN uv", "ENV UV_PYTHON_INSTALL_DIR=/python\nRUN uv") + USER, set()),
        (UV + "RUN chmod 755 /root\n" + USER, set()),
        (
            UV.replace("--python 3.12", "--python 3.10").replace("RUN uv", "RUN apt install -y python3\nRUN uv") + USER,
            set(),
        ),
        ("RUN useradd -m a\nUSER a\n" + UV + 'CMD ["python", "x.py"]\n', set()),
        (UV + USER.replace('"python", "x.py"', '"sleep", "1"'), set()),
        ("ENV PATH=/root/miniconda3/bin:$PATH\n" + USER, {("permission", 4)}),
        ("ENV PATH=/opt/miniconda3/bin:/root/.local/bin:$PATH\n" + USER, set()),
    ],
)
def test_a_python_that_only_root_may_enter(text, expected, tmp_path):
    assert {one for one in found(JAMMY + text, tmp_path) if one[0] == "permission"} == expected


BUILT = f"{SLIM[:-1]} AS b\nRUN python -m venv /app/venv && /app/venv/bin/pip install torch==2.7.1\n"
MOVED = "COPY --from=b /app/venv /opt/venv\nENV PATH=/opt/venv/bin:$PATH\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{MOVED}CMD ["torchrun", "x.py"]\n', {("copied-environment", 4)}),
        (f'{MOVED}ENTRYPOINT ["tini", "--"]\nCMD ["torchrun", "x.py"]\n', {("copied-environment", 4)}),
        (f'{MOVED}CMD ["/opt/venv/bin/torchrun", "x.py"]\n', {("copied-environment", 4)}),
        (f"{MOVED}CMD torchrun x.py\n", {("copied-environment", 4)}),
        (f'{MOVED}CMD ["python", "-m", "torch.distributed.run", "x.py"]\n', set()),
        (f'{MOVED}CMD ["/opt/venv/bin/python", "x.py"]\n', set()),
        (f'{MOVED.replace("/opt/venv", "/app/venv")}CMD ["torchrun", "x.py"]\n', set()),
        (f'{MOVED}CMD ["bash"]\n', set()),
        (f"{MOVED}RUN pip install numpy\n", {("copied-environment", 6)}),
        (f"{MOVED}RUN python -m pip install numpy\n", set()),
    ],
)
def test_an_environment_that_moved(text, expected, tmp_path):
    assert {one for one in found(BUILT + SLIM + text, tmp_path) if one[0] == "copied-environment"} == expected


def test_an_environment_that_mv_moved(tmp_path):
    text = f'{BUILT}RUN mv /app/venv /opt/venv\nENV PATH=/opt/venv/bin:$PATH\nCMD ["torchrun", "x.py"]\n'
    assert ("copied-environment", 3) in found(text, tmp_path)
    assert "copied-environment" not in ids(text.replace("torchrun", "python"), tmp_path)


ADAM = '{"optimizer": {"type": "AdamW", "params": {%s}}, "zero_optimization": {"stage": 2}}'


@pytest.mark.parametrize(
    ("base", "version", "config", "expected"),
    [
        (TORCH, "0.15.1", "{}", {"no-nvcc"}),
        (TORCH, "0.18.8", "{}", {"no-nvcc"}),
        (TORCH, "0.13.5", "{}", set()),
        (TORCH, "0.19.5", "{}", set()),
        (TORCH, "0.13.5", ADAM % "", {"no-nvcc"}),
        (TORCH, "0.13.5", ADAM % '"torch_adam": true', set()),
        (TORCH.replace("runtime", "devel"), "0.15.1", ADAM % "", set()),
        (f"{TORCH}ENV DS_ACCELERATOR=cpu\n", "0.15.1", "{}", set()),
    ],
)
def test_deepspeed_without_nvcc(base, version, config, expected, tmp_path):
    text = f"{base}RUN pip install deepspeed=={version}\nCOPY . .\n"
    assert ids(text, tmp_path, {"ds.json": config}) & {"no-nvcc"} == expected


EFA = "FROM nvidia/cuda:12.8.1-devel-ubuntu22.04 AS e\nADD https://x.org/aws-efa-installer-1.43.2.tar.gz /tmp/\n"
EFA += "RUN curl -O https://x.org/aws-efa-installer-1.43.2.tar.gz && ./efa_installer.sh -y --skip-kmod\n"
COPIED = "FROM pytorch/pytorch:2.7.1-cuda12.8-cudnn9-devel\nRUN apt-get install -y libhwloc15\n"
COPIED += "COPY --from=e /opt/amazon /opt/amazon\n"
PATHS = "ENV LD_LIBRARY_PATH=/opt/amazon/{}:/opt/amazon/efa/lib:$LD_LIBRARY_PATH\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COPIED + PATHS.format("aws-ofi-nccl/lib"), {("efa-not-found", 7)}),
        (COPIED + PATHS.format("ofi-nccl/lib"), set()),
        (COPIED + PATHS.format("ofi-nccl/lib/x86_64-linux-gnu"), set()),
        (COPIED + "COPY --from=e /etc/ld.so.conf.d /etc/ld.so.conf.d\n" + PATHS.format("efa/lib64"), set()),
    ],
)
def test_where_efa_is_looked_for(text, expected, tmp_path):
    assert {one for one in found(EFA + text, tmp_path) if one[0] == "efa-not-found"} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN apt-get update && apt-get install -y nvidia-driver-550\n", {"driver-in-image"}),
        ("RUN apt-get update && apt-get install -y git nvidia-utils-535\n", {"driver-in-image"}),
        ("RUN apt-get update && apt-get install -y cuda-12-4\n", {"driver-in-image"}),
        ("RUN apt-get update && apt-get install -y cuda-toolkit-12-4 cuda-nvcc-12-4\n", set()),
        ("RUN python3 -c 'import torch; assert torch.cuda.is_available()'\n", {"no-gpu-in-build"}),
        ("RUN python3 -c 'import torch; torch.ones(1).cuda()'\n", {"no-gpu-in-build"}),
        ("RUN python3 -c 'import torch; print(torch.cuda.get_device_name(0))'\n", {"no-gpu-in-build"}),
        ("RUN python3 -c 'import torch; print(torch.cuda.is_available())'\n", set()),
        ("RUN python3 -c 'import torch; torch.ones(1).cuda()' || true\n", set()),
        ("RUN python3 -c 'import torch; assert torch.cuda.is_available() or True'\n", set()),
        ("RUN python3 -c 'x = y.cuda() if torch.cuda.is_available() else y'\n", set()),
    ],
)
def test_drivers_and_gpus_in_a_build(text, expected, tmp_path):
    assert ids(JAMMY + text, tmp_path) & {"driver-in-image", "no-gpu-in-build"} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM gcr.io/distroless/python3-debian12\nRUN pip install x\n", {("missing-program", 2)}),
        ("FROM gcr.io/distroless/python3-debian12:debug\nRUN echo x\n", set()),
        ('FROM gcr.io/distroless/python3-debian12\nRUN ["python3", "-c", "1"]\n', set()),
        ("FROM gcr.io/distroless/python3-debian12\nCOPY --from=busybox /bin/sh /bin/sh\nRUN echo x\n", set()),
    ],
)
def test_an_image_without_a_shell(text, expected, tmp_path):
    assert {one for one in found(text, tmp_path) if one[0] == "missing-program"} == expected


def test_a_toolkit_that_is_not_there(tmp_path):
    setup = "from torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[CUDAExtension('a', ['a.cu'])])\n"
    text = (
        "FROM pytorch/pytorch:2.7.1-cuda12.6-cudnn9-devel\nENV TORCH_CUDA_ARCH_LIST=9.0 CUDA_HOME=/usr/local/cuda-{}\n"
    )
    text += "COPY . /ops\nRUN cd /ops && python setup.py install\n"
    assert found(text.format("12.1"), tmp_path, {"setup.py": setup}) == {("nvcc-of-cuda-home", 2)}
    assert found(text.format("12.6"), tmp_path, {"setup.py": setup}) == set()
