"""uv itself against a real index over HTTP: tiny wheels with real names, served on loopback."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path

import pytest

from tests.image.wheels import Wheel
from windlass.image.facts.node import Node
from windlass.image.judge import heal, judge
from windlass.image.read.texts import Texts
from windlass.image.state.model import SYSTEM
from windlass.image.state.resolver import Index, Question
from windlass.image.state.walk import walk

NODE = Node(gpu="H100", driver="580.95.05")
WHEELS = (
    Wheel("torch", "2.11.0", ["nvidia-nccl-cu13==2.28.9"]),
    Wheel("torch", "2.12.0", ["nvidia-nccl-cu13==2.29.7"]),
    Wheel("nvidia-nccl-cu13", "2.28.9"),
    Wheel("nvidia-nccl-cu13", "2.29.7"),
    Wheel("nvidia-nccl-cu12", "2.27.5"),
    Wheel("torchvision", "0.26.0", ["torch==2.11.0"]),
    Wheel("torchvision", "0.27.0", ["torch==2.12.0"]),
    Wheel("serving", "1.0", ["torch<2.12"]),
    Wheel("transformers", "4.0", ["torch>=2.12,<2.13; extra == 'torch'"]),
    Wheel("transformers", "3.0", ["torch>=1.9,<2.11; extra == 'torch'"]),
    Wheel("fast", "1.0", ["nvidia-nccl-cu12"]),
    Wheel("armed", "1.0", tag="cp312-cp312-manylinux_2_28_aarch64"),
    Wheel("newer", "2.0", requires_python=">=3.13"),
    Wheel("newer", "1.0"),
    Wheel("triton", "3.5.0"),
    *(Wheel(name, "1.0") for name in ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")),
    *(Wheel(name, "1.0") for name in ("numpy", "pillow")),
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A simple index with the wheels above."""
    root = tmp_path_factory.mktemp("index")
    links: dict[Path, list[str]] = {}
    for wheel in WHEELS:
        folder = root / "simple" / wheel.name
        folder.mkdir(parents=True, exist_ok=True)
        name, python = wheel.write(folder).name, wheel.requires_python.replace(">", "&gt;")
        links.setdefault(folder, []).append(f'<a href="{name}" data-requires-python="{python}">{name}</a>')
    for folder, names in links.items():
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{'<br>'.join(names)}</body></html>")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.fixture
def index(address, monkeypatch, tmp_path):
    """The loopback index as the machine's own."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", address)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return Index(cache=tmp_path / "answers", torch_index=False)


def versions(index, *requirements, **question):
    return {one.name: one.version for one in index.resolve(Question(requirements, **question)).packages}


def test_versions_platforms_and_pythons(index):
    expected = {"torch": "2.12.0", "torchvision": "0.27.0", "nvidia-nccl-cu13": "2.29.7"}
    assert versions(index, "torch==2.12.0", "torchvision") == expected
    assert versions(index, "torch", constraints=("torch==2.11.0",))["torch"] == "2.11.0"
    assert versions(index, "torch>=2", held=(("torch", "2.11.0"),))["torch"] == "2.11.0"  # it is there, and it fits
    assert versions(index, "armed", platform="linux/arm64") == {"armed": "1.0"}
    assert versions(index, "armed") == {}
    assert (versions(index, "newer"), versions(index, "newer", python="3.13")) == ({"newer": "1.0"}, {"newer": "2.0"})


def test_what_was_answered_is_kept_and_what_was_not_is_asked_again(index, monkeypatch):
    question = Question(("torch==2.12.0",))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert not index.resolve(question).checked
    monkeypatch.undo()
    answer = Index(cache=index.cache, torch_index=False, offline=True).resolve(question)
    assert not answer.checked, "an index out of reach is no answer"


def test_another_index_of_the_machine_has_a_cache_of_its_own(index, monkeypatch):
    mine = Index().cache
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert Index().cache != mine


def test_a_later_step_that_replaces_torch_and_brings_a_second_nccl(index):
    text = "FROM python:3.12\nRUN pip install torch==2.12.0\nRUN pip install serving fast\n"
    found = {one.id: one for one in judge(Texts(text), NODE, index).errors}
    assert str(found["torch-replaced"].where.place) == "Dockerfile:3"
    assert "torch 2.12.0, which Dockerfile:2 installed, is replaced by 2.11.0" in found["torch-replaced"].sentence
    assert {"nvidia-nccl-cu12 2.27.5", "nvidia-nccl-cu13 2.28.9"} <= set(
        found["two-nccl"].sentence.split(":")[0].split(" and ")
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["", " --index-url https://download.pytorch.org/whl/cu128"])
def test_a_companion_of_another_torch_is_healed_whatever_the_index(index, source):
    """Of torch's own index the version gets a build, 2.9.0+cu128: the pin has not moved."""
    torch, wrong, right = ("2.12.0", "0.26.0", "0.27.0") if not source else ("2.9.0", "0.23.0", "0.24.0")
    text = f"FROM python:3.12\nRUN pip install torch=={torch} torchvision=={wrong}{source}\n"
    healed = heal(Texts(text), NODE, index)
    assert [one.id for one in healed.before.errors] == ["contradiction"]
    assert healed.patched.dockerfile == text.replace(wrong, right)
    assert healed.after.errors == ()


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("", ["Dockerfile:6"]),
        ("ARG VERSION\n", []),
        ("ENV VERSION=2.11.0\n", []),
        ("# ARG VERSION\n", ["Dockerfile:7"]),
    ],
)
def test_an_argument_before_from_is_empty_in_the_stage(index, declared, expected):
    """`torch==` is no requirement; the patch declares it again."""
    dockerfile = (
        "ARG VERSION=2.11.0\nARG PYTHON=3.12\nFROM python:${PYTHON}-slim\n"
        f'{declared}RUN for part in numpy; do echo "$part"; done\nRUN pip install numpy \\\n    torch==${{VERSION}}\n'
    )
    healed = heal(Texts(dockerfile), NODE, index)
    assert [(finding.id, str(finding.where.place)) for finding in healed.before.errors] == [
        ("empty-argument", place) for place in expected
    ]
    assert healed.after.errors == ()


@pytest.mark.parametrize(
    ("base", "name"),
    [("python:${X}-slim", "PYTHON_VERSION"), ("nvidia/cuda:${X}-devel-ubuntu22.04", "CUDA_VERSION"),
     ("example.com/team/base:${X}", "TOOL_VERSION")],
)  # fmt: skip
def test_an_argument_that_the_base_image_sets_itself_is_not_empty(index, base, name):
    value = "12.4.1" if "cuda" in base else "3.12"
    text = f"ARG {name}={value}\nFROM {base.replace('X', name)}\nRUN pip install numpy && echo ${{{name}}}\n"
    assert "empty-argument" not in [finding.id for finding in judge(Texts(text), NODE, index).errors]


def test_a_pip_conf_names_the_index(address, index):
    files = {
        "docker/pip.conf": f"[global]\nno-cache-dir = true\n[install]\nindex-url =\n  {address}\nconstraint = /c.txt"
    }
    dockerfile = "FROM python:3.12-slim\nCOPY docker/pip.conf /etc/\nCOPY c.txt /c.txt\nRUN pip install torch\n"
    for texts in (
        Texts(dockerfile, {**files, "c.txt": "torch<2.12"}),
        Texts(dockerfile.replace("docker/pip.conf /etc/", "docker/pip.conf /root/.config/pip/pip.conf"),
              {**files, "c.txt": "torch<2.12"}),
    ):  # fmt: skip
        trace = walk(texts, NODE, index)
        assert trace.final.environments[SYSTEM].packages["torch"].version == "2.11.0"


@pytest.mark.parametrize(("transformers", "is_error"), [("4.0", True), ("3.0", False)])
def test_of_an_extra_that_nobody_asked_for_only_the_oldest_torch_counts(index, transformers, is_error):
    """transformers refuses an older torch at import, and takes a newer one than its extra allows."""
    text = f"FROM python:3.12-slim\nRUN pip install torch==2.11.0 transformers=={transformers}\n"
    verdict = judge(Texts(text, {}), NODE, index)
    assert [finding.id for finding in verdict.errors] == ["torch-of-transformers"] * is_error


@pytest.mark.parametrize(
    ("step", "is_error"),
    [
        ("torch==1.12.0 --index-url https://download.pytorch.org/whl/cu115", True),
        ("torch==1.9.0+cu101 -f https://download.pytorch.org/whl/torch_stable.html", True),
        ("torch==1.12.0 --index-url https://download.pytorch.org/whl/cu113", False),
        ("torch==1.9.0+cu111 -f https://download.pytorch.org/whl/torch_stable.html", False),
        ("torch==1.9.0 --extra-index-url https://download.pytorch.org/whl/cu101", False),  # PyPI has it
        ("torch==1.4.0+cu100 -f https://download.pytorch.org/whl/torch_stable.html", False),  # not known
    ],
)
def test_a_torch_older_than_the_table_has_the_builds_that_it_had(index, step, is_error):
    verdict = judge(Texts(f"FROM python:3.8-slim\nRUN pip install {step}\n", {}), NODE, index)
    assert ("no-version" in {finding.id for finding in verdict.errors}) == is_error
    assert is_error or verdict.unknown
