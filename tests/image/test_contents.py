"""What the files of wheels and sources say: wheels made here, read by their addresses."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile

import pytest

from windlass.image.facts.node import node_named
from windlass.image.judge import judge
from windlass.image.read.dockerfile import parse_dockerfile, substitute
from windlass.image.read.shell import run_commands
from windlass.image.read.texts import Texts
from windlass.image.state.contents import broken_import, imports_of, modules_of, source_of
from windlass.image.state.fetch import open_wheel, written_requires
from windlass.image.state.resolver import Found, Index
from windlass.image.state.walk import walk

NODE = node_named("a100", "550.54", "linux/amd64")
GENERATED = "from google.protobuf import descriptor as _descriptor\nX = _descriptor.FieldDescriptor(name='x')\n"


@pytest.fixture
def index(tmp_path):
    (tmp_path / "cache").mkdir()
    return Index(cache=tmp_path / "cache")


@pytest.fixture
def wheel(tmp_path):
    def make(name: str, version: str = "1.0", **files: str) -> Found:
        path = tmp_path / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
            archive.writestr(f"{name}-{version}.dist-info/METADATA", "Name: x\nRequires-Dist: numpy<2\n")
        return Found(name.replace("_", "-"), version, path.name, path.as_uri(), "2024-01-01")

    return make


def test_only_what_an_import_runs_without_condition_counts(index, wheel):
    text = (
        "import numpy as np\nfrom .inner import thing\nKINDS = np.sctypes\ntry:\n    import optional\n"
        "except ImportError:\n    pass\ndef later():\n    import late\n    return np.never\n"
    )
    found = wheel("imgaug", **{"imgaug/__init__.py": text, "imgaug/inner.py": "from torch import nn\nthing = 1\n"})
    taken = {tuple(pair) for pair in imports_of(index, found)}
    assert taken == {("numpy", ""), ("numpy", "sctypes"), ("torch", "nn")}
    assert open_wheel(found.url).requires == ["numpy<2"]


def test_names_of_a_compiled_module_that_a_package_takes_whole_may_be_there(index, wheel):
    user = wheel("user", **{"user/__init__.py": "from rpds import HashTrieMap\n"})
    files = {"rpds/__init__.py": "from .rpds import *\n", "rpds/rpds.cpython-311-x86_64-linux-gnu.so": ""}
    assert broken_import(index, user, wheel("rpds_py", **files), ["rpds"]) is None


def test_names_that_a_release_no_longer_has_are_found(index, wheel):
    old = wheel("old_user", **{"old_user/__init__.py": "from lib.tools import gone\nfrom lib import kept\n"})
    lib = wheel(
        "lib", "2.0", **{"lib/__init__.py": "from .tools import *\n", "lib/tools.py": "kept = named('lib.gone')\n"}
    )
    assert broken_import(index, old, lib, ["lib"]) == "gone of lib.tools"
    fits = wheel("lib", "1.0", **{"lib/__init__.py": "kept = 1\n", "lib/tools.py": "gone = kept = 1\n"})
    assert broken_import(index, old, fits, ["lib"]) is None
    user = wheel("np_user", **{"np_user/__init__.py": "import numpy as np\nX = np.float_\n"})
    expired = {"numpy/__init__.py": "def __getattr__(name): ...\n", "numpy/_expired_attrs_2_0.py": '{"float_": "…"}'}
    assert broken_import(index, user, wheel("numpy", "2.1", **expired), ["numpy"]) == "float_ of numpy"


def test_names_that_a_module_makes_as_it_runs_are_looked_for_in_the_whole_package(index, wheel):
    user = wheel("user", **{"user/__init__.py": '__import__("lib.gone")\nfrom lib import lazy, dropped\n'})
    lazy = "def __getattr__(name):\n    ...\n"
    lib = wheel("lib", "2.0", **{"lib/__init__.py": lazy, "lib/tools.py": "class lazy: ...\ndropped = 1\n"})
    assert ["lib.gone", ""] in imports_of(index, user)
    assert broken_import(index, user, lib, ["lib"]) == "lib.gone"
    fits = wheel("lib", "3.0", **{"lib/__init__.py": lazy, "lib/gone.py": "", "lib/tools.py": "class lazy: ...\n"})
    assert broken_import(index, user, fits, ["lib"]) == "dropped of lib"
    assert modules_of(index, wheel("ns", **{"google/protobuf/__init__.py": "", "six.py": ""})) == [
        "google.protobuf",
        "six",
    ]


def test_pkg_resources_and_generated_code_are_of_their_time(index, wheel):
    user = wheel("metrics", **{"metrics/__init__.py": "from pkg_resources import parse_version\n"})
    assert broken_import(index, user, None, ["pkg_resources"]) == "pkg_resources"
    assert broken_import(index, user, wheel("setuptools", "82.0"), ["pkg_resources"]) == "pkg_resources"
    board = wheel("board", **{"board/__init__.py": "", "board/a_pb2.py": GENERATED})
    assert "protoc before 3.19" in str(broken_import(index, board, wheel("protobuf", "4.25"), ["google.protobuf"]))
    assert broken_import(index, board, wheel("protobuf", "3.20"), ["google.protobuf"]) is None


def archive(**files: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"x-1.0/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return data.getvalue()


@pytest.mark.parametrize(
    ("files", "needs"),
    [
        ({"setup.py": "import torch\nfrom packaging import version\nCUDAExtension\n"}, "nvcc"),
        ({"setup.py": "from setuptools import setup, Extension\nExtension('a')\n", "a.c": ""}, "compiler"),
        ({"pyproject.toml": "[build-system]\nrequires = ['maturin>=1']\nbuild-backend = 'maturin'\n"}, "rust"),
        ({"setup.py": "try:\n    import torch\nexcept ImportError:\n    pass\n"}, ""),
    ],
)
def test_a_source_says_what_its_build_takes(files, needs, index, tmp_path, monkeypatch):
    path = tmp_path / "x-1.0.tar.gz"
    path.write_bytes(archive(**files))
    monkeypatch.setattr(Index, "files", lambda *_: [(path.as_uri(), "2024-01-01")])  # the index is no matter here
    source = source_of(index, "x", "1.0")
    assert source.needs == needs
    assert ("packaging" in source.imports) == ("packaging" in files.get("setup.py", ""))


def test_values_that_a_shell_computes():
    values = {"V": "12.4.1"}
    assert [
        substitute(text, values) for text in ("${V%.*}", "${V%%.*}", "${V#12.}", "${V//./}", "${V:-x}", "${W:-y}")
    ] == [*("12.4", "12", "4.1", "1241", "12.4.1", "y")]
    run = parse_dockerfile(
        "FROM a\nRUN pip install -i u/cu$(echo $V | cut -d. -f1,2 | tr -d .) x>=1 'y<2'\n"
    ).instructions[1]
    (command,) = run_commands(run, "Dockerfile", values)
    assert (str(command), command.reads) == ("pip install -i u/cu124 x y<2", "")


def test_a_source_says_what_it_requires():
    assert written_requires(archive(**{"PKG-INFO": "Requires-Dist: torch\nRequires-Dist: einops>=1\n"})) == [
        *("torch", "einops>=1")
    ]
    old = archive(**{"PKG-INFO": "Name: x\n", "x.egg-info/requires.txt": "torch\nninja\n\n[dev]\npytest\n"})
    assert written_requires(old) == ["torch", "ninja"]
    assert written_requires(b"") == []


def verdicts(dockerfile: str, tmp_path, **files: str) -> set[tuple[str, int]]:
    offline = Index(cache=tmp_path, offline=True)
    verdict = judge(Texts(dockerfile, files), NODE, offline)
    return {(error.id, error.where.place.line) for error in verdict.errors}


def test_a_secret_argument_inside_a_value_stays_in_the_image(tmp_path):
    text = "FROM python:3.12\nARG INDEX_TOKEN\nENV PIP_INDEX_URL=https://u:${INDEX_TOKEN}@pypi.example/simple\n"
    assert verdicts(text, tmp_path) == {("secret-in-arg", 2), ("secret-in-env", 3)}


def test_conda_environments_are_activated_by_source_too(tmp_path):
    steps = "conda create -n ia python=3.8 -y && source activate ia && pip install torch==2.1.2"
    trace = walk(Texts(f"FROM continuumio/miniconda3\nRUN {steps}\n"), NODE, Index(cache=tmp_path, offline=True))
    assert trace.final.environments["ia"].packages["torch"].version == "2.1.2"


def test_uv_reads_the_project_that_it_is_given(tmp_path):
    project = '[project]\nname = "p"\nversion = "0"\ndependencies = ["torch==2.4.0"]\n'
    text = "FROM python:3.12\nCOPY m /app/m\nRUN uv sync --project /app/m\n"
    trace = walk(Texts(text, {"m/pyproject.toml": project}), NODE, Index(cache=tmp_path, offline=True))
    assert trace.final.environments["/app/m/.venv"].packages["torch"].version == "2.4.0"


def test_deadsnakes_serves_systems_that_ubuntu_supports(tmp_path):
    text = "FROM ubuntu:{}\nRUN apt-get update && apt-get install -y software-properties-common && "
    text += "add-apt-repository ppa:deadsnakes/ppa && apt-get install -y python3.13\n"
    assert verdicts(text.format("22.04"), tmp_path) == set()
    assert verdicts(text.format("20.04"), tmp_path) == {("no-such-python", 2)}


START = "FROM ubuntu:22.04\nRUN apt-get update && apt-get install -y python3 python3-pip python3-venv\n"
VENV = "RUN python3 -m venv /v && /v/bin/pip install torch==2.5.1\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{START}{VENV}CMD ['python3', 't.py']\n".replace("'", '"'), {("another-python", 4)}),
        (f"{START}{VENV}ENV PATH=/v/bin:$PATH\nCMD python3 t.py\n", set()),
        (f"{START}{VENV}CMD /v/bin/python t.py\n", set()),
        (f"{START}RUN pip install torch==2.5.1\nCMD python t.py\n", {("missing-program", 4)}),
        (f"{START}RUN ln -s /usr/bin/python3 /usr/bin/python && pip install torch==2.5.1\nCMD python t.py\n", set()),
        ("FROM ubuntu:22.04\nRUN apt-get install -y git\n", {("missing-package", 2)}),
        ("FROM ubuntu:22.04\nRUN apt-get update && rm -rf /var/lib/apt/lists/*\nRUN apt-get install -y git\n",
         {("missing-package", 3)}),
        ("FROM ubuntu:22.04\nRUN --mount=type=cache,target=/var/lib/apt --mount=type=cache,target=/x apt install -y\n",
         set()),
        ("FROM ubuntu:22.04\nRUN apt-get update && apt-get install -y python3\nRUN python3 -m venv /v\n",
         {("missing-program", 3)}),
        ("FROM nvidia/cuda:12.4.1-cudnn8-devel-ubuntu22.04\n", {("no-such-image", 1)}),
        ("FROM pytorch/pytorch:2.5.1-cuda12.6-cudnn9-devel\n", {("no-such-image", 1)}),
        ("FROM python:3.11\nENV NVIDIA_DRIVER_CAPABILITIES=video,utility\n", {("environment", 2)}),
        ("FROM python:3.11\nENV PATH=/opt/v/bin CUDA_VISIBLE_DEVICES=-1\n", {("environment", 2)}),
        ("FROM python:3.11\nENV PYTHONPATH=/usr/local/lib/python3.10/site-packages:/app\n", {("environment", 2)}),
        ("FROM python:3.11\nENV PATH=/opt/v/bin:$PATH PYTHONPATH=/a NVIDIA_DRIVER_CAPABILITIES=compute\n", set()),
        ("FROM python:3.11\nRUN pip install numpy<2 pandas==2.2.3\n", {("shell-redirect", 2)}),
        ("FROM python:3.11\nRUN pip install 'numpy<2' \"pandas>=2\" > /log 2>&1\n", set()),
        ("FROM python:3.11\nRUN git clone https://$(cat /secret)@github.com/a/b.git /b\n", {("secret-in-run", 2)}),
        ("FROM python:3.11\nRUN git clone https://$(cat /t)@github.com/a/b.git /b && rm -rf /b/.git\n", set()),
    ],
)  # fmt: skip
def test_the_system_around_python(text, found, tmp_path):
    assert verdicts(text, tmp_path) == found


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("https://download.openmmlab.example/mmcv/dist/cu118/torch2.0.0/index.html", {("mmcv-abi", 2)}),
        ("https://download.openmmlab.example/mmcv/dist/cu121/torch2.1.0/index.html", set()),
        ("https://data.pyg.example/whl/torch-2.0.0+cu118.html", {("mmcv-abi", 2)}),
    ],
)
def test_a_page_of_wheels_names_the_torch_that_they_are_made_for(page, found, tmp_path):
    text = f"FROM pytorch/pytorch:2.1.2-cuda12.1-cudnn8-devel\nRUN pip install mmcv==2.1.0 -f {page}\n"
    assert verdicts(text, tmp_path) == found


def test_an_archive_that_is_cut_off_says_nothing():
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        text = random.Random(0).randbytes(9000)
        entry = tarfile.TarInfo("x-1/PKG-INFO")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    assert written_requires(whole.getvalue()[:4000]) == []
