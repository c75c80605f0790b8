"""Real resolvers against a real index over HTTP: tiny wheels with real names, served on loopback."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path

import pytest

from tests.image.wheels import Wheel
from windlass.image.conflicts import find_conflicts
from windlass.image.facts.node import Node
from windlass.image.read.texts import Texts
from windlass.image.recipe import Recipe
from windlass.image.state.resolver import Answer, Question, environment, resolve
from windlass.image.resolving import check_by_resolving, repair

BOTH = ["uv", pytest.param("pip", marks=pytest.mark.slow)]
NODE = Node(gpu="H100", driver="580.95.05")
ARM = "cp312-cp312-manylinux_2_28_aarch64"
WHEELS = (
    Wheel("torch", "2.11.0", ["nvidia-nccl-cu13==2.28.9"]),
    Wheel("torch", "2.12.0", ["nvidia-nccl-cu13==2.29.7"]),
    Wheel("nvidia-nccl-cu13", "2.28.9"),
    Wheel("nvidia-nccl-cu13", "2.29.7"),
    Wheel("nvidia-nccl-cu12", "2.27.5"),
    Wheel("torchvision", "0.26.0", ["torch==2.11.0"]),
    Wheel("torchvision", "0.27.0", ["torch==2.12.0"]),
    Wheel("serving", "1.0", ["torch<2.12"]),
    Wheel("fast", "1.0", ["nvidia-nccl-cu12"]),
    Wheel("boto", "1.0", ["core>=1,<2"]),
    Wheel("core", "1.5"),
    Wheel("core", "0.9"),
    Wheel("armed", "1.0", tag=ARM),
    Wheel("newer", "2.0", requires_python=">=3.13"),
    Wheel("newer", "1.0"),
)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The address of a simple index with the wheels above."""
    root = tmp_path_factory.mktemp("index")
    for wheel in WHEELS:
        folder = root / "simple" / wheel.name
        folder.mkdir(parents=True, exist_ok=True)
        wheel.write(folder)
    for folder in (root / "simple").iterdir():
        python = {w.write(Path(folder)).name: w.requires_python for w in WHEELS if w.name == folder.name}
        links = [f'<a href="{n}" data-requires-python="{p.replace(">", "&gt;")}">{n}</a>' for n, p in python.items()]
        (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "<br>".join(links) + "</body></html>")
    handler = functools.partial(Quiet, directory=str(root))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("uv")


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch, cache):
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_DEFAULT_INDEX", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_CACHE_DIR", str(cache))


@pytest.fixture
def machine_index(index, monkeypatch):
    """The index as the machine's own."""
    monkeypatch.setenv("PIP_INDEX_URL", index)
    return index


@pytest.mark.parametrize("program", BOTH)
def test_versions_are_found(index, program):
    answer = resolve(Question(("torch==2.12.0", "torchvision"), index=index), program=program)
    assert answer == Answer(
        {"torch": "2.12.0", "torchvision": "0.27.0", "nvidia-nccl-cu13": "2.29.7"}, resolver=program
    )


@pytest.mark.parametrize("program", BOTH)
def test_contradictions_come_with_the_resolvers_own_words(index, program):
    answer = resolve(Question(("torch==2.12.0", "torchvision==0.26.0"), index=index), program=program)
    assert (answer.packages, answer.checked) == ({}, True)
    assert "torchvision" in answer.trouble
    assert "torch==2.11.0" in answer.trouble


@pytest.mark.parametrize("program", BOTH)
def test_another_platform_and_another_python(index, program):
    arm = Question(("armed",), index=index, python="3.12", platform="linux/arm64")
    assert resolve(arm, program=program).packages == {"armed": "1.0"}
    assert resolve(Question(("armed",), index=index), program=program).packages == {}
    assert resolve(Question(("newer",), index=index, python="3.12"), program=program).packages == {"newer": "1.0"}


def test_uv_knows_pythons_that_are_not_here(index):
    assert resolve(Question(("newer",), index=index, python="3.13")).packages == {"newer": "2.0"}


def test_constraints_hold(index):
    held = Question(("torch",), constraints=("torch==2.11.0",), index=index)
    assert resolve(held).packages["torch"] == "2.11.0"


def test_an_index_out_of_reach_is_no_conflict():
    answer = resolve(Question(("torch",), index="http://127.0.0.1:9/simple"))
    assert (answer.packages, answer.checked) == ({}, False)
    assert answer.trouble


def test_what_is_set_for_pip_holds_for_uv():
    own = environment({"PIP_INDEX_URL": "https://i", "PIP_CERT": "/c.pem", "SSL_CERT_FILE": "/own.pem"})
    assert own["UV_DEFAULT_INDEX"] == "https://i"
    assert own["SSL_CERT_FILE"] == "/own.pem"


def test_a_contradiction_that_only_a_resolver_sees(machine_index):
    text = "FROM python:3.12\nCOPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\n"
    texts = Texts(text, {"requirements.txt": "boto==1.0\ncore==0.9\n"})
    assert find_conflicts(text, texts.files, NODE) == []
    (found,) = check_by_resolving(Recipe(texts), NODE).conflicts
    assert (found.id, found.severity, str(found.place)) == ("resolver", "error", "requirements.txt:1")
    made, after = repair(texts, NODE)
    assert made.after.files == {"requirements.txt": "boto==1.0\ncore<2,>=1\n"}
    assert after.conflicts == ()
    assert after.packages == {"boto": "1.0", "core": "1.5"}


def test_a_later_command_that_would_replace_torch(machine_index):
    text = "FROM python:3.12\nRUN pip install --no-cache-dir torch==2.12.0\nRUN pip install --no-cache-dir serving\n"
    (torch, nccl) = check_by_resolving(Recipe(Texts(text)), NODE).conflicts
    assert torch.id == "reinstalls-torch"
    assert torch.sentence == "this command replaces torch 2.12.0, which an earlier one installed, with 2.11.0"
    assert str(torch.place) == "Dockerfile:3"
    assert nccl.id == "reinstalls-nvidia-nccl-cu13"


def test_a_second_nccl_that_comes_along(machine_index):
    text = "FROM python:3.12\nRUN pip install --no-cache-dir torch==2.12.0 fast\n"
    assert find_conflicts(text, {}, NODE) == []
    resolved = check_by_resolving(Recipe(Texts(text)), NODE)
    (found,) = resolved.conflicts
    assert found.id == "two-nccl"
    assert found.evidence == ("nvidia-nccl-cu12==2.27.5", "nvidia-nccl-cu13==2.29.7")


def test_reading_and_resolving_together(machine_index):
    text = (
        "FROM python:3.12\nCOPY requirements.txt .\n"
        "RUN pip install --no-cache-dir torch==2.12.0 torchvision==0.26.0\n"
        "RUN pip install --no-cache-dir -r requirements.txt\n"
    )
    made, after = repair(Texts(text, {"requirements.txt": "boto\ncore<1\n"}), NODE)
    assert [one.id for one in made.fixed] == ["torchvision-of-torch", "resolver"]
    assert after.conflicts == ()
    assert after.packages["torchvision"] == "0.27.0"


def test_torchs_own_index_out_of_reach_falls_back_to_the_machines(machine_index):
    text = (
        "FROM python:3.12\n"
        "RUN pip install --no-cache-dir torch==2.11.0+cu128 --extra-index-url http://127.0.0.1:9/whl/cu128\n"
        "RUN pip install --no-cache-dir torchvision==0.27.0\n"
    )
    resolved = check_by_resolving(Recipe(Texts(text)), NODE)
    assert any("out of reach" in one for one in resolved.unchecked)
    assert resolved.conflicts[0].id == "reinstalls-torch"


def test_files_and_addresses_are_said_to_be_unchecked(machine_index):
    text = "FROM python:3.12\nRUN pip install --no-cache-dir https://h/a-1.0-py3-none-any.whl ./mine core==1.5\n"
    resolved = check_by_resolving(Recipe(Texts(text)), NODE)
    assert resolved.packages == {"core": "1.5"}
    assert len(resolved.unchecked) == 2
