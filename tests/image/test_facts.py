"""Facts that were read wrong once: each case is what a published wheel, Dockerfile or archive of packages says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windlass.image.facts.bases import base_of
from windlass.image.facts.node import node_named
from windlass.image.facts.table import companion, companion_needs, runs
from windlass.image.judge import judge
from windlass.image.read.texts import Texts
from windlass.image.rules.system import cuda_wanted
from windlass.image.state.resolver import Index, _key

A100 = node_named("a100", "580.95", "linux/amd64")


def verdict(dockerfile: str, tmp_path, node=A100):
    return judge(Texts(dockerfile), node, Index(cache=tmp_path, offline=True))


def errors(dockerfile: str, tmp_path, node=A100) -> set[str]:
    return {error.id for error in verdict(dockerfile, tmp_path, node).errors}


def test_torchcodec_goes_with_what_its_own_table_says():
    assert companion_needs("torchcodec", "0.11.1") == "==2.11.*"
    assert companion_needs("torchcodec", "0.13.0") == ">=2.11"
    assert companion_needs("torchcodec", "0.17.0") is None  # no published table names it
    assert companion("torchcodec", "2.7.1") == "0.5"  # the newest of three


@pytest.mark.parametrize(
    ("name", "version", "requires", "wants"),
    [
        ("onnxruntime-gpu", "1.18.1", (), ("11", "8")),
        ("onnxruntime-gpu", "1.20.2", (), ("12", "9")),
        ("onnxruntime-gpu", "1.31.1", (), None),
        ("onnxruntime-gpu", "1.31.1", ("nvidia-cuda-runtime~=13.0", "nvidia-cudnn-cu13~=9.0"), ("13", "9")),
        ("onnxruntime-gpu", "1.26.0", ("nvidia-cuda-runtime-cu12~=12.0", "nvidia-cudnn-cu12~=9.0"), ("12", "9")),
        ("ctranslate2", "2.24.0", (), ("11", None)),
        ("ctranslate2", "4.4.0", (), ("12", "8")),
        ("ctranslate2", "4.6.2", (), ("12", "9")),
        ("ctranslate2", "4.8.4", (), ("12", None)),
        ("cupy-cuda13x", "14.2.0", (), ("13", None)),
    ],
)  # fmt: skip
def test_the_cuda_that_a_wheel_loads(name, version, requires, wants):
    assert cuda_wanted(name, version, requires) == wants


def planted(tmp_path, system: str, asked: list[str], brings: list[str], *, recommends: bool = True) -> None:
    """An answer of the archive of a system."""
    answer = {"lacking": [], "brings": [*asked, *brings]}
    Index(cache=tmp_path)._keep(_key("apt-closure", [system, sorted(asked), recommends]), answer)


def test_a_library_that_another_package_of_apt_brings_is_there(tmp_path):
    slim = "FROM python:3.11-slim-bookworm\n"
    lightgbm = "RUN pip install lightgbm==4.6.0\n"
    assert errors(slim + lightgbm, tmp_path) == {"missing-library"}
    apt = "RUN apt-get update && apt-get install -y {}\n"
    planted(tmp_path, "debian12", ["cmake"], ["libgomp1"])
    assert errors(slim + apt.format("cmake") + lightgbm, tmp_path) == set()
    planted(tmp_path, "debian12", ["jq"], ["libjq1"])
    assert errors(slim + apt.format("jq") + lightgbm, tmp_path) == {"missing-library"}
    cuda = "FROM nvidia/cuda:12.4.1-{}-ubuntu22.04\n" + apt.format("python3-venv")
    cuda += "RUN python3 -m venv /v\nRUN /v/bin/pip install lightgbm==4.6.0\n"
    planted(tmp_path, "ubuntu22.04", ["python3-venv"], ["python3"])
    assert errors(cuda.format("runtime"), tmp_path) == {"missing-library"}
    assert errors(cuda.format("devel"), tmp_path) == set()
    unread = verdict(slim + apt.format("libfoo") + lightgbm, tmp_path)
    assert unread.errors == ()
    assert "whether the image has libgomp.so.1, which lightgbm loads" in "\n".join(unread.unknown)


def test_torchcodec_is_imported_without_ffmpeg_from_0_16_on(tmp_path):
    text = "FROM python:3.11-slim-bookworm\nRUN pip install torchcodec=={}\n"
    assert errors(text.format("0.15.0"), tmp_path) == {"missing-library"}
    assert errors(text.format("0.16.0"), tmp_path) == set()


def test_a_soundfile_without_a_library_inside(tmp_path):
    text = "FROM python:3.11-slim-bookworm\nRUN pip install soundfile=={}\n"
    assert errors(text.format("0.11.0"), tmp_path) == {"missing-library"}
    assert errors(text.format("0.12.1"), tmp_path) == set()


def test_apex_asks_for_the_same_cuda_where_it_compiles_with_it(tmp_path):
    text = "FROM pytorch/pytorch:2.6.0-cuda12.4-cudnn9-devel\n"
    text += "RUN apt-get update && apt-get install -y cuda-toolkit-12-6 git\n{}\n"
    source = "git+https://github.com/NVIDIA/apex"
    plain = f"RUN pip install --no-build-isolation {source}"
    assert errors(text.format(plain), tmp_path) == set()
    assert errors(text.format(f"ENV APEX_CUDA_EXT=1\n{plain}"), tmp_path) == {"nvcc-of-torch"}
    option = f'RUN pip install --no-build-isolation --config-settings "--build-option=--cuda_ext" {source}'
    assert errors(text.format(option), tmp_path) == {"nvcc-of-torch"}


def test_the_python_of_vllms_image_is_known_where_its_dockerfile_was_read():
    assert base_of("vllm/vllm-openai:v0.9.2").python == "3.12"
    assert base_of("vllm/vllm-openai:v0.4.1").python is None
    assert base_of("vllm/vllm-openai:v0.9.2").system is None  # 20.04, 22.04 and 24.04, by release and tag


def test_geforce_is_refused_where_the_image_names_no_branch_for_it(tmp_path):
    card = node_named("rtx4090", "535.161", "linux/amd64")
    assert errors("FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04\n", tmp_path, card) == set()
    assert errors("FROM nvidia/cuda:12.6.3-runtime-ubuntu24.04\n", tmp_path, card) == {"base-needs-driver"}
    data_centre = replace(A100, driver="565.57")
    assert errors("FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04\n", tmp_path, data_centre) == set()


def test_a_driver_is_judged_as_far_as_it_is_told():
    assert runs("580.65", "580.65.06")
    assert runs("580.65.06", "580.65.06")
    assert not runs("580.64", "580.65.06")
    assert not runs("580.65.05", "580.65.06")


def test_a_torch_outside_the_table_is_judged_by_its_cuda(tmp_path):
    nvidia = "FROM nvcr.io/nvidia/pytorch:{}-py3\n"
    volta, ampere = (node_named(name, "580.95", "linux/amd64") for name in ("v100", "a10g"))
    assert errors(nvidia.format("25.10"), tmp_path, volta) == {"gpu-architecture"}
    assert errors(nvidia.format("24.10"), tmp_path, volta) == set()
    old = (
        "FROM python:3.8\nRUN pip install torch==1.9.0+{0} -f https://download.pytorch.org/whl/{0}/torch_stable.html\n"
    )
    assert errors(old.format("cu102"), tmp_path, ampere) == {"gpu-architecture"}
    newer = verdict(old.format("cu111"), tmp_path, ampere)
    assert newer.errors == ()  # the table does not reach back so far, and that is said
    assert "torch==1.9.0+cu111 is older than the table" in "\n".join(newer.unknown)


def test_conda_forge_without_a_gpu_gives_the_build_for_cpus(tmp_path):
    text = "FROM {}\nRUN conda install -y pytorch {}\n"
    assert errors(text.format("condaforge/miniforge3:24.11.3-0", ""), tmp_path) == {"cpu-only-torch"}
    assert errors(text.format("condaforge/miniforge3:24.11.3-0", "-c pytorch"), tmp_path) == set()
    assert errors(text.format("continuumio/miniconda3:24.5.0-0", ""), tmp_path) == set()
