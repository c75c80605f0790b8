"""The machine that a step runs on: shell, users, programs, files of the context. Offline; no package is resolved."""

from __future__ import annotations

import pytest

from windlass.image.facts.node import node_named
from windlass.image.judge import heal, judge
from windlass.image.read.texts import Texts
from windlass.image.state.archive import _installed
from windlass.image.state.resolver import Answer, Found, Index, _key

NODE = node_named("h100", "580.95", "linux/amd64")
SLIM = "FROM python:3.11-slim-bookworm\n"
JAMMY = "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\n"
UPDATE = "RUN apt-get update && apt-get install -y "


def verdict(text: str, tmp_path, files=None):
    files = files or {}
    return judge(Texts(text, files, names=frozenset(files)), NODE, Index(cache=tmp_path, offline=True))


def found(text: str, tmp_path, files=None) -> set[tuple[str, int]]:
    return {(error.id, error.where.place.line) for error in verdict(text, tmp_path, files).errors}


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{SLIM}RUN source /etc/profile\n", {("not-in-sh", 2)}),
        (f'{SLIM}SHELL ["/bin/bash", "-c"]\nRUN source /etc/profile\n', set()),
        (f'{SLIM}RUN bash -c "source /etc/profile"\n', set()),
        (f"{SLIM}RUN <<EOF\n#!/bin/bash\nsource /etc/profile\nEOF\n", set()),
        (f'{SLIM}RUN if [[ "$A" == 1 ]]; then true; fi\n', {("not-in-sh", 2)}),
        (f"{SLIM}RUN true \\\n && set -euo pipefail\n", {("not-in-sh", 3)}),
        (f"{SLIM}RUN A=(1 2) && true\n", {("not-in-sh", 2)}),
        (f"{SLIM}RUN echo ${{A//./}}\n", {("not-in-sh", 2)}),
        ("FROM rockylinux:9\nRUN source /etc/profile && set -o pipefail\n", set()),
        ("FROM python:3.11-alpine\nRUN source /etc/profile\n", set()),
        ("FROM continuumio/miniconda3:24.5.0-0\nRUN conda activate train\n", {("not-in-sh", 2)}),
    ],
)
def test_what_dash_does_not_know(text, errors, tmp_path):
    assert found(text, tmp_path) == errors


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{SLIM}USER trainer\n", {("no-such-user", 2)}),
        (f"{SLIM}RUN useradd -m trainer\nUSER trainer\n", set()),
        (f"{SLIM}USER 1000:1000\n", set()),
        (f"{SLIM}USER nobody\n", set()),
        ("FROM example.com/base:1\nUSER trainer\n", set()),
        (f"{SLIM}RUN useradd -m a\nUSER a\nRUN apt-get update\n", {("permission", 4)}),
        (f"{SLIM}RUN useradd -m a\nWORKDIR /app\nUSER a\nRUN mkdir out\n", {("permission", 5)}),
        (f"{SLIM}RUN useradd -m a\nWORKDIR /app\nRUN chown a /app\nUSER a\nRUN mkdir out\n", set()),
        (f"{SLIM}RUN useradd -m a\nUSER a\nWORKDIR /home/a/x\nRUN mkdir out\n", set()),
        ("FROM ubuntu:24.04\nRUN useradd -u 1000 a\n", {("permission", 2)}),
        ("FROM ubuntu:24.04\nRUN userdel -r ubuntu && useradd -mu 1000 a\nUSER a\n", set()),
        ("FROM ubuntu:24.04\nRUN groupadd -g 1000 a || true\n", set()),
        ("FROM ubuntu:22.04\nRUN useradd -u 1000 a\nUSER a\n", set()),
    ],
)
def test_users_and_what_they_may(text, errors, tmp_path):
    assert found(text, tmp_path) == errors


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{SLIM}COPY gone.py /\n", {("missing-file", 2)}),
        (f"{SLIM}COPY ../train.py /\n", set()),  # a builder takes it from the root of the context
        (f"{SLIM}COPY wheels/*.whl /tmp/\n", {("missing-file", 2)}),
        (f"{SLIM}COPY *.py /app/\n", set()),
        (f"{SLIM}COPY train.py run.sh /app\n", {("missing-file", 2)}),
        (f"{SLIM}WORKDIR /app\nRUN pip install -r requirements.txt\nCOPY . .\n", {("missing-file", 3)}),
        (f"{SLIM}WORKDIR /app\nCOPY . .\nRUN bash scripts/gone.sh\n", {("missing-file", 4)}),
        (f"{SLIM}WORKDIR /app\nRUN pip install -e .\n", {("missing-file", 3)}),
        (f'{SLIM}WORKDIR /app\nCOPY . .\nENTRYPOINT ["/app/start.sh"]\n', {("missing-file", 4)}),
        (f'{SLIM}WORKDIR /app\nCOPY . .\nENTRYPOINT ["/app/run.sh"]\n', set()),
        (f'{SLIM}WORKDIR /app\nCOPY . .\nENTRYPOINT ["./windows.sh"]\n', {("line-endings", 4)}),
        (f"{SLIM}RUN mkdir /data/models\n", {("missing-file", 2)}),
        (f"{SLIM}RUN mkdir /data && mkdir /data/models\n", set()),
        (f"{SLIM[:-1]} AS build\n{SLIM}COPY --from=builder /x /x\n", {("no-such-stage", 3)}),
        (
            f"{SLIM[:-1]} AS build\nRUN python -m venv /opt/env\n{SLIM}COPY --from=build /opt/venv /v\n",
            {("missing-file", 4)},
        ),
    ],
)
def test_files_that_are_there_and_not(text, errors, tmp_path):
    files = {"train.py": "", "requirements.txt": "", "run.sh": "#!/bin/sh\n", "windows.sh": "#!/bin/sh\r\ntrue\r\n"}
    assert found(text, tmp_path, files) == errors


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{SLIM}RUN unzip data.zip\n", {("missing-program", 2)}),
        (f"{SLIM}RUN if [ -f data.zip ]; then unzip data.zip; fi\n", set()),
        (f"{SLIM}RUN unzip data.zip || true\n", set()),
        (f"{JAMMY}RUN yum install -y git\n", {("missing-program", 2)}),
        ("FROM rockylinux:9\nRUN apt-get update\n", {("missing-program", 2)}),
        (f"{JAMMY}RUN sudo ls\n", {("missing-program", 2)}),
        (f"{JAMMY}RUN nvidia-smi\n", {("no-gpu-in-build", 2)}),
        (f"{JAMMY}RUN apt-get update && apt-get install git\n", {("missing-option", 2)}),
        (f"{JAMMY}RUN apt-get update -qq && apt-get install -qq git\n", set()),
        (f"{SLIM}pip install torch\n", {("syntax", 2)}),
        ("FROM python:3.11 slim\n", {("syntax", 1)}),
        (f"{SLIM}CMD ['python', 'train.py']\n", {("syntax", 2)}),
        (f"{SLIM}RUN useradd -m a\nUSER a\nRUN pip install dvc && dvc pull\n", {("missing-program", 4)}),
    ],
)
def test_programs_and_words(text, errors, tmp_path):
    assert found(text, tmp_path) == errors


def test_an_archive_is_followed_to_what_comes_along(tmp_path):
    lists = {
        "packages": {
            "curl": {"versions": ["7.88"], "needs": [["libcurl4", "libcurl5"]], "recommends": []},
            "libcurl4": {"versions": ["7.88"], "needs": [], "recommends": [["ca-certificates"]]},
            "ca-certificates": {"versions": ["2023"], "needs": [], "recommends": []},
        },
        "provided": {"one-of": ["curl"], "several": ["curl", "libcurl4"]},
    }
    index = Index(cache=tmp_path)
    index._keep(_key("archive-lists", ["debian", "bookworm"]), lists)

    def asked(*names: str, recommends: bool = True):
        return _installed(index, "debian", "bookworm", list(names), recommends)

    assert asked("curl") == {"lacking": [], "brings": ["ca-certificates", "curl", "libcurl4"]}
    assert asked("curl", recommends=False)["brings"] == ["curl", "libcurl4"]
    assert asked("curl=7.*", "curl=7.74", "one-of", "several", "gone")["lacking"] == ["curl=7.74", "several", "gone"]


def test_https_without_certificates(tmp_path):
    text = "FROM debian:12\nRUN apt-get update && apt-get install -y --no-install-recommends curl\nRUN curl https://x.org\n"
    answer = {"lacking": [], "brings": ["curl", "libcurl4"]}
    Index(cache=tmp_path)._keep(_key("apt-closure", ["debian12", ["curl"], False]), answer)
    assert found(text, tmp_path) == {("missing-package", 3)}


def test_a_shell_is_named_where_that_heals(tmp_path):
    texts = Texts(f"{SLIM}RUN source /etc/profile && true\n")
    healed = heal(texts, NODE, Index(cache=tmp_path, offline=True))
    assert '+SHELL ["/bin/bash", "-c"]' in healed.diff
    assert healed.after.errors == ()


def test_a_project_of_the_context_that_needs_torch_to_be_built(tmp_path):
    setup = "import torch\nfrom torch.utils.cpp_extension import CUDAExtension\n"
    setup += "setup(ext_modules=[CUDAExtension('a', [])])\n"
    base = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\nCOPY ops /ops\n"
    files = {"ops/setup.py": setup, "ops/pyproject.toml": ""}
    assert found(f"{base}RUN pip install /ops\n", tmp_path, files) == {("build-isolation", 3)}
    develop = f"{base}RUN cd /ops && python setup.py develop\n"
    assert found(develop, tmp_path, files) == {("architecture-list", 3)}
    named = develop.replace("RUN", "ENV TORCH_CUDA_ARCH_LIST=9.0\nRUN")
    assert found(named, tmp_path, files) == set()


def test_a_wheel_of_another_stage_keeps_the_torch_that_it_was_built_against(tmp_path):
    build = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel AS b\nCOPY ops /ops\nENV TORCH_CUDA_ARCH_LIST=9.0\n"
    build += "RUN cd /ops && python setup.py bdist_wheel\n"
    final = "FROM pytorch/pytorch:{}-cuda12.4-cudnn9-runtime\nCOPY --from=b /ops/dist /w\nRUN pip install /w/*.whl\n"
    setup = "import torch\nfrom torch.utils.cpp_extension import CUDAExtension\n"
    files = {"ops/setup.py": setup}
    assert found(build + final.format("2.5.1"), tmp_path, files) == set()
    assert found(build + final.format("2.4.1"), tmp_path, files) == {("compiled-for-another-torch", 5)}


EFA = "ADD https://efa-installer.amazonaws.com/aws-efa-installer-1.48.0.tar.gz /tmp/\nRUN cd /tmp/aws-efa-installer && "
OFI = "RUN git clone -b v1.19.0 https://github.com/aws/aws-ofi-nccl /o && cd /o && ./configure {} && make"
PREFIX = "--prefix=/opt/ofi --with-libfabric=/opt/amazon/efa"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{EFA}./efa_installer.sh -y -g\n", {("efa-kernel-module", 3)}),
        (f"{EFA}bash ./efa_installer.sh -y\n", {("efa-kernel-module", 3)}),
        (f"{EFA}./efa_installer.sh -y -k\n", set()),
        (f"{EFA}./efa_installer.sh -y --skip-kmod --no-verify\n", set()),
        (f"{OFI.format(PREFIX)} install\n", {("efa-not-found", 2)}),
        (f"{OFI.format(PREFIX)} install\nENV LD_LIBRARY_PATH=/opt/ofi/lib:$LD_LIBRARY_PATH\n", set()),
        (f"{OFI.format(PREFIX)} install\nENV NCCL_NET_PLUGIN=/opt/ofi/lib/libnccl-net.so\n", set()),
        (f"{OFI.format(PREFIX)} install && echo /opt/ofi/lib > /etc/ld.so.conf.d/o.conf && ldconfig\n", set()),
        (f"{OFI.format('--with-libfabric=/opt/amazon/efa')} install\n", set()),
        ("RUN ./configure --prefix=/opt/other && make install\n", set()),
    ],
)
def test_efa_in_a_container(text, errors, tmp_path):
    assert found(JAMMY + text, tmp_path) - {("missing-program", 2)} == errors


CONDA = "FROM continuumio/miniconda3:24.9.2-0\nRUN conda install -y "


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        ("pytorch=2.6.0 pytorch-cuda=12.4 -c pytorch -c nvidia", {("no-version", 2)}),
        ("pytorch=2.5.1 pytorch-cuda=12.4 -c pytorch -c nvidia", set()),
        ("pytorch=2.5.1 pytorch-cuda=12.6 -c pytorch -c nvidia", {("no-version", 2)}),
        ("pytorch==2.1.0 pytorch-cuda=12.4 -c pytorch -c nvidia", {("no-version", 2)}),
        ("pytorch=2.6.0 pytorch-gpu -c conda-forge", set()),
        ("pytorch==1.12.1 cudatoolkit=12.1 -c pytorch", {("no-version", 2)}),
        ("pytorch==1.12.1 cudatoolkit=11.6 -c pytorch -c conda-forge", set()),
    ],
)
def test_versions_that_no_channel_of_conda_has(words, errors, tmp_path):
    assert {error for error in found(f"{CONDA}{words}\n", tmp_path) if error[0] == "no-version"} == errors


@pytest.mark.parametrize(
    ("word", "asked", "version"),
    [
        ("numpy=1.26", "numpy==1.26.*", "1.26.4"),
        ("numpy<2", "numpy<2", "1.26.4"),
        ("numpy==1.26", None, "1.26"),
        ("numpy=1.26.3", None, "1.26.3"),
        ("pytorch=2.5", None, "2.5"),
    ],
)
def test_one_equals_sign_of_conda_is_a_prefix(word, asked, version, tmp_path, monkeypatch):
    def resolve(index, question):
        assert question.requirements == (asked,)
        return Answer((Found("numpy", "1.26.4"),))

    monkeypatch.setattr(Index, "resolve", resolve)
    packages = verdict(f"{CONDA}'{word}'\n", tmp_path).trace.final.packages
    assert next(iter(packages.values())).version == version


OLD = "FROM pytorch/pytorch:1.7.1-cuda11.0-cudnn8-{}\n"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{OLD.format('devel')}RUN apt-get update\n", {("missing-package", 2)}),
        (f"{OLD.format('runtime')}RUN apt-get update\n", set()),
        (f"{OLD.format('devel')}RUN rm /etc/apt/sources.list.d/cuda.list\nRUN apt-get update\n", set()),
        (f"{OLD.format('devel')}RUN apt-key adv --fetch-keys https://x/3bf863cc.pub\nRUN apt-get update\n", set()),
        ("FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\nRUN apt-get update\n", set()),
    ],
)
def test_the_former_key_of_nvidias_archive(text, errors, tmp_path):
    assert found(text, tmp_path) - {("gpu-architecture", 1)} == errors


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (f"{SLIM}RUN pip install\n", {("missing-option", 2)}),
        (f"{SLIM}RUN pip install --no-cache-dir && true\n", {("missing-option", 2)}),
        (f"{SLIM}RUN pip install sklearn\n", {("no-version", 2)}),
        (f"{SLIM}ENV SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True\nRUN pip install sklearn\n", set()),
        (f"{SLIM}RUN pip install scikit-learn\n", set()),
        (f"{SLIM}RUN pip install apex\n", {("no-version", 2)}),
    ],
)
def test_installs_of_nothing_and_of_something_else(text, errors, tmp_path):
    assert found(text, tmp_path) == errors


def test_a_project_is_built_without_isolation_where_it_stands_alone(tmp_path):
    """The patch adds the option, and leaves no `pip install` without a word behind."""
    setup = "import torch\nfrom torch.utils.cpp_extension import CUDAExtension\nsetup(install_requires=['numpy'])\n"
    text = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\nCOPY ops /ops\nENV TORCH_CUDA_ARCH_LIST=9.0\n"
    texts = Texts(
        f"{text}RUN pip install --no-cache-dir /ops\n", {"ops/setup.py": setup}, names=frozenset({"ops/setup.py"})
    )
    healed = heal(texts, NODE, Index(cache=tmp_path, offline=True))
    assert "+RUN pip install --no-build-isolation --no-cache-dir /ops" in healed.diff
    assert healed.diff.count("pip install") == 2


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("RUN export CUDA=cu124\nRUN pip install torch --index-url https://x.org/$CUDA\n", {("lost-variable", 2)}),
        ("RUN export CUDA=cu124 && echo $CUDA\nRUN echo done\n", set()),
        ("RUN export CUDA=cu124\nRUN CUDA=cu121 && echo $CUDA\n", set()),
        ("RUN export CUDA=cu124\nENV CUDA=cu121\nRUN echo $CUDA\n", set()),
        ("RUN export PATH=/opt/x/bin:$PATH\nRUN echo $PATH\n", set()),
        ("RUN cd /src\nRUN pip install -r requirements.txt\n", {("missing-file", 3)}),
        (
            "WORKDIR /src\nRUN git clone https://x.org/a/repo.git\nRUN pip install -r requirements.txt\n",
            {("missing-file", 4)},
        ),
        ("WORKDIR /src\nRUN git clone https://x.org/a/repo --depth 1 && cd repo && pip install -r req.txt\n", set()),
        ("WORKDIR /src\nRUN git clone https://x.org/a/repo.git .\nRUN pip install -r requirements.txt\n", set()),
        ("WORKDIR /src\nRUN git clone $REPOSITORY\nRUN pip install -r requirements.txt\n", set()),
        ("RUN curl -LsSf https://astral.sh/uv/install.sh | sh\nRUN uv venv\n", {("missing-program", 3)}),
        ("RUN curl -LsSf https://astral.sh/uv/install.sh | sh && uv venv\n", {("missing-program", 2)}),
        ("RUN curl -LsSf https://astral.sh/uv/install.sh | sh\nENV PATH=/root/.local/bin:$PATH\nRUN uv venv\n", set()),
        ("RUN curl https://astral.sh/uv/install.sh | sh && . $HOME/.local/bin/env && uv venv\n", set()),
        ("RUN curl https://astral.sh/uv/install.sh | UV_INSTALL_DIR=/usr/bin sh\nRUN uv venv\n", set()),
        ("RUN curl https://astral.sh/uv/install.sh | sh && mv /root/.local/bin/uv /usr/bin/\nRUN uv venv\n", set()),
        ("RUN curl https://astral.sh/uv/install.sh | sh\nRUN pip install uv\nRUN uv venv\n", set()),
    ],
)
def test_a_run_has_a_shell_of_its_own(text, errors, tmp_path):
    assert found("FROM python:3.11-bookworm\n" + text, tmp_path) == errors


FORCED = """
import os, torch
from torch.utils.cpp_extension import CUDAExtension, CppExtension, CUDA_HOME
force_cuda = os.getenv("FORCE_CUDA", "0") == "1"
extension = CppExtension
if (torch.cuda.is_available() and CUDA_HOME is not None) or force_cuda:
    extension = CUDAExtension
"""
CHOSEN = """
import torch
from torch.utils.cpp_extension import CUDAExtension, CppExtension
has_gpu = torch.cuda.is_available()
extension = CUDAExtension if has_gpu else CppExtension
"""
PLAIN = "from torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[CUDAExtension('a', ['a.cu'])])\n"
FLAGS = PLAIN.replace("])])", "], extra_compile_args={'nvcc': ['-gencode', 'arch=compute_90,code=sm_90']})])")
BUILD = "python setup.py install"


@pytest.mark.parametrize(
    ("setup", "run", "errors"),
    [
        (FORCED, BUILD, {("no-gpu-in-build", 3)}),
        (FORCED, f"FORCE_CUDA=1 && {BUILD}", {("no-gpu-in-build", 3)}),
        (FORCED, f"FORCE_CUDA=1 {BUILD}", {("architecture-list", 3)}),
        (FORCED, f"export FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 && {BUILD}", set()),
        (FORCED, f"FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 {BUILD}", set()),
        (FORCED, f"set -a && FORCE_CUDA=1 && TORCH_CUDA_ARCH_LIST=9.0 && {BUILD}", set()),
        (
            FORCED,
            f"FORCE_CUDA=1 && TORCH_CUDA_ARCH_LIST=9.0 && export FORCE_CUDA TORCH_CUDA_ARCH_LIST && {BUILD}",
            set(),
        ),
        (CHOSEN, BUILD, {("no-gpu-in-build", 3)}),
        (PLAIN, BUILD, {("architecture-list", 3)}),
        (PLAIN, f"TORCH_CUDA_ARCH_LIST=9.0 && {BUILD}", {("architecture-list", 3)}),
        (PLAIN, f"TORCH_CUDA_ARCH_LIST=9.0 {BUILD}", set()),
        (FLAGS, BUILD, set()),
        (PLAIN, f"{BUILD}\nARG TORCH_CUDA_ARCH_LIST", set()),  # --build-arg may give it
    ],
)
def test_what_is_compiled_where_no_gpu_is_seen(setup, run, errors, tmp_path):
    base = "FROM pytorch/pytorch:2.7.1-cuda12.6-cudnn9-devel\nCOPY ops /ops\n"
    assert found(f"{base}RUN cd /ops && {run}\n", tmp_path, {"ops/setup.py": setup}) == errors


@pytest.mark.parametrize(
    ("run", "errors"),
    [
        ("pip install torch --index-url {}cu$(echo $CUDA_VERSION | cut -d. -f1,2 | tr -d .)", set()),
        ("V=$(echo $CUDA_VERSION | cut -d. -f1) && pip install torch --index-url {}cu${{V}}7", {("no-version", 2)}),
        ("pip install torch --index-url {}cu$(echo ${{CUDA_VERSION%.*}} | sed 's/\\.//g')", set()),
        ("uv pip install --system torch --extra-index-url {}cu122", {("no-version", 2)}),
        ("pip install torch --index-url {}cu$(nvcc --version | cut -c1)", set()),
        ("pip install torch --extra-index-url {}cu122", set()),  # pip goes on to PyPI
        ("pip install numpy --index-url {}cu122", set()),
    ],
)
def test_builds_of_torch_by_their_address(run, errors, tmp_path):
    text = f"FROM nvidia/cuda:12.6.3-devel-ubuntu22.04\nRUN {run.format('https://download.pytorch.org/whl/')}\n"
    assert {one for one in found(text, tmp_path) if one[0] == "no-version"} == errors


@pytest.mark.parametrize(
    "text",
    [
        "python3 -m venv venv && . venv/bin/activate && pip install --help",
        "python3 -m venv --prompt x /opt/venv && /opt/venv/bin/pip install --help",
        "virtualenv -p python3 virtualenv && . virtualenv/bin/activate && pip install --help",
    ],
)
def test_an_environment_may_be_called_venv(text, tmp_path):
    apt = "RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv virtualenv\n"
    assert found(f"{JAMMY}{apt}RUN {text}\n", tmp_path) == set()


UV = "COPY --from=ghcr.io/astral-sh/uv:0.9.18 /uv /bin/\nENV UV_PYTHON_INSTALL_DIR=/python\n"
LAST = "FROM nvidia/cuda:12.8.1-base-ubuntu24.04\nCOPY --from=b /app/.venv /app/.venv\n"


@pytest.mark.parametrize(
    ("sync", "more", "errors"),
    [
        ("--managed-python --python 3.12", "", {("copied-environment", 7)}),
        ("--managed-python --python 3.12", "COPY --from=b /python /python\n", set()),
        ("--python 3.12", "", {("copied-environment", 7)}),  # ubuntu has no Python of its own
    ],
)
def test_uv_brings_a_python_where_there_is_none(sync, more, errors, tmp_path):
    build = f"FROM ubuntu:24.04 AS b\n{UV}WORKDIR /app\nRUN uv venv {sync}\n"
    assert found(f"{build}{LAST}{more}", tmp_path) == errors


PIP = "pip install sklearn"  # a name that PyPI refuses: an error wherever it runs


@pytest.mark.parametrize(
    ("run", "errors"),
    [
        (f'if [ "$A" = "x" ]; then {PIP}; fi', {("no-version", 3)}),
        (f'if [ "$A" = "y" ]; then {PIP}; fi', set()),
        (f'if [ "$A" != "x" ]; then true; else {PIP}; fi', {("no-version", 3)}),
        (f'if [ "$A" = "y" ]; then true; elif [ -n "$A" ]; then {PIP}; else true; fi', {("no-version", 3)}),
        (f'if [ -z "$A" ] || [ "$B" = "1" ]; then {PIP}; fi', set()),
        (f'if [ -n "$A" ] && test "$A" = x; then {PIP}; fi', {("no-version", 3)}),
        (f'if [ "$UNKNOWN" = "1" ]; then {PIP}; fi', set()),
        (f'if [ "$UNKNOWN" = "1" ]; then true; fi; {PIP}', {("no-version", 3)}),
        (f"if [ -f /x ]; then {PIP}; else {PIP}; fi", set()),
        (f"bash -c 'if [[ \"$A\" == x* ]]; then {PIP}; fi'", {("no-version", 3)}),
        (f'[ "$A" = "y" ] && {PIP} || true', set()),
        (f'[ "$A" = "x" ] || {PIP}', set()),
        (f"{PIP} || echo optional", set()),
        (f"(true && {PIP}) || echo optional", set()),
        (f"{{ true; {PIP}; }} || echo optional", set()),
        (f"{{ {PIP} || echo optional; true; }}", set()),
        (f"{PIP} || exit 1", {("no-version", 3)}),
        (f"{PIP} || {{ echo no; exit 1; }}", {("no-version", 3)}),
        (f'case "$A" in x|z) {PIP};; *) true;; esac', {("no-version", 3)}),
        (f'case "$A" in y) {PIP};; *) true;; esac', set()),
        (f'case "$A" in y) true;; *) {PIP};; esac; true', {("no-version", 3)}),
        (f'if [ "$A" = "x" ]; then exit 0; fi; {PIP}', set()),
        (f"for p in a b; do true; done && {PIP}", {("no-version", 3)}),
        (f"which python && {PIP}", {("no-version", 3)}),
    ],
)
def test_what_a_condition_guards(run, errors, tmp_path):
    assert found(f"{SLIM}ARG A=x B=\nRUN {run}\n", tmp_path) == errors
    script = run.replace("; then ", "\nthen ").replace("; fi", "\nfi").replace("&& ", "&&\n")
    heredoc = found(f"{SLIM}ARG A=x B=\nRUN <<EOF\n{script}\nEOF\n", tmp_path)
    assert {id for id, _ in heredoc} == {id for id, _ in errors}


def test_what_may_be_installed_is_said_once_and_satisfies_what_comes_later(tmp_path):
    may = "RUN if [ -f /x ]; then apt-get update && apt-get install -y unzip; pip install torch; fi\n"
    assert found(f"{SLIM}RUN unzip a.zip\n", tmp_path) == {("missing-program", 2)}
    told = verdict(f"{SLIM}{may}RUN unzip a.zip\n", tmp_path)
    assert told.errors == ()
    assert (
        len([one for one in told.unknown if one == "Dockerfile:2: a condition or || decides what this step installs"])
        == 1
    )


WHEEL = "torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl"


@pytest.mark.parametrize(
    ("base", "links", "version", "errors"),
    [
        (SLIM, "/wheels", "2.8.0", set()),
        (SLIM, "/elsewhere", None, set()),
        (SLIM.replace("3.11", "3.12"), "/wheels", "2.8.0", {("wheel-python", 3)}),
    ],
)
def test_no_index_is_asked_where_pip_is_told_so(base, links, version, errors, tmp_path):
    text = f"{base}COPY wheels/ /wheels/\nRUN pip install --no-index --find-links={links} torch\n"
    told = verdict(text, tmp_path, {f"wheels/{WHEEL}": ""})
    assert {(error.id, error.where.place.line) for error in told.errors} == errors
    assert told.trace.final.packages["torch"].version == version
    assert any("no index is asked" in one for one in told.unknown) == (version is None)
    assert not any("resolve" in one for one in told.unknown)


PIP_OF_JAMMY = f"{JAMMY}{UPDATE}python3-pip\n"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("RUN pip3 install --break-system-packages numpy\n", {("missing-option", 3)}),
        ("RUN pip3 install --config-settings a=b numpy\n", {("missing-option", 3)}),
        ("RUN pip3 install -U pip\nRUN pip3 install --break-system-packages numpy\n", set()),
        ("RUN pip3 install uv && uv pip install --system --break-system-packages numpy\n", set()),
        ("RUN pip3 install --break-system-packages numpy || pip3 install numpy\n", set()),
    ],
)
def test_options_that_the_pip_of_the_system_lacks(text, errors, tmp_path):
    assert found(f"{PIP_OF_JAMMY}{text}", tmp_path) == errors
    assert found(f"{PIP_OF_JAMMY}{text}".replace("22.04", "24.04"), tmp_path) <= {("externally-managed", 3)}


def test_torchaudio_refuses_another_minor_of_cuda(tmp_path):
    wheel = "https://download.pytorch.org/whl/{1}/{0}%2B{1}-cp311-cp311-linux_x86_64.whl"
    torch = wheel.format("torch-2.8.0", "cu128")
    for other, errors in (
        (wheel.format("torchaudio-2.8.0", "cu126"), {"torchaudio-build"}),
        (wheel.format("torchaudio-2.8.0", "cu128"), set()),
        (wheel.format("torchvision-0.23.0", "cu126"), set()),
    ):
        ids = {id for id, _ in found(f"{SLIM}RUN pip install {torch} {other}\n", tmp_path)}
        assert ids & {"torchaudio-build", "torchvision-build"} == errors


def test_a_setup_that_gives_gencode_itself_reads_no_list_of_torch(tmp_path):
    setup = (
        "import torch\nfrom torch.utils.cpp_extension import CUDAExtension\nsetup(ext_modules=[CUDAExtension('a')])\n"
    )
    text = "FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel\nCOPY ops /ops\nENV TORCH_CUDA_ARCH_LIST=8.0\n"
    text += "RUN pip install --no-build-isolation /ops\n"
    assert found(text, tmp_path, {"ops/setup.py": setup}) == {("architecture-list", 3)}
    flags = f"flags = ['-gencode', 'arch=compute_90,code=sm_90']\n{setup}"
    assert found(text, tmp_path, {"ops/setup.py": flags}) == set()


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("RUN pip install transformers>=4.50\n", {("shell-redirect", 2)}),
        ('RUN pip install "transformers>=4.50"\n', set()),
        ("RUN pip install transformers >=log && pip install numpy>log\n", set()),
        ("RUN <<EOF\npip install numpy\nEOF\n", set()),
        ("RUN <<EOF\npip install numpy\n", {("syntax", 2)}),
        ('RUN echo "1 <<TWO"\n', set()),
    ],
)
def test_redirections_and_heredocs(text, errors, tmp_path):
    assert found(f"{SLIM}{text}", tmp_path) == errors


def test_a_copy_from_a_name_that_nobody_knows_is_said(tmp_path):
    told = verdict(f"{SLIM}COPY --from=buildr /x /x\n", tmp_path)
    assert (told.errors, [one for one in told.unknown if "buildr" in one] != []) == ((), True)
    assert verdict(f"{SLIM}COPY --from=ghcr.io/a/b:1 /x /x\n", tmp_path).unknown == ()


def test_a_patch_does_not_mix_the_builds_of_one_step(tmp_path, monkeypatch):
    def resolve(index, question):
        if "torchvision==0.23.0+cu126" in question.requirements:
            return Answer(trouble="there is no version of torchvision==0.23.0+cu126")
        return Answer((Found("torch", "2.8.0+cu128", ""), Found("torchvision", "0.23.0+cu128", "")))

    monkeypatch.setattr(Index, "resolve", resolve)
    run = "RUN pip install torch==2.8.0 torchvision==0.23.0+{} --index-url https://download.pytorch.org/whl/cu128"
    healed = heal(Texts(f"{SLIM}{run.format('cu126')}\n"), NODE, Index(cache=tmp_path, offline=True))
    assert f"+{run.format('cu128')}" in healed.diff.splitlines()
