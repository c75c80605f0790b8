"""Dockerfiles, shell lines and requirement files are read as builders, shells and pip read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.image.facts.bases import base_of
from windlass.image.facts.node import Node
from windlass.image.judge import judge
from windlass.image.read.dockerfile import parse_dockerfile, substitute
from windlass.image.read.installs import apt_packages, conda_install, pip_install
from windlass.image.read.requirements import parse_requirements, wheel_of
from windlass.image.read.shell import run_commands
from windlass.image.read.texts import Texts, remove_word
from windlass.image.state.resolver import Index

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


def commands(text: str, **values: str):
    """The commands of every RUN of a Dockerfile."""
    instructions = parse_dockerfile(text).instructions
    return [found for one in instructions if one.keyword == "RUN" for found in run_commands(one, "Dockerfile", values)]


def test_stages_arguments_and_lines():
    whole = parse_dockerfile(WHOLE)
    first, last = whole.stages
    assert (first.name, first.platform, first.parent) == ("build", "linux/amd64", None)
    assert first.image == "nvidia/cuda:12.4.1-devel-ubuntu22.04"
    assert (last.name, last.parent) == (None, 0)
    assert whole.chain() == (first, last)
    spans = {(one.keyword, one.first, one.last) for one in whole.instructions}
    assert {("RUN", 7, 12), ("RUN", 13, 16), ("FROM", 17, 17)} <= spans
    run = next(one for one in whole.instructions if one.first == 7)
    assert run.flags == {"mount": "type=cache,target=/root/.cache"}


def test_what_the_runs_install_with_the_line_of_every_word():
    found = commands(WHOLE, TORCH="2.7.1")
    installs = [one for command in found if (one := pip_install(command))]
    assert [[(str(word), word.line) for word in one.arguments.words] for one in installs] == [
        [("torch==2.7.1", 9)],
        [("transformers>=5", 14), ("numpy", 14)],
        [("wandb", 15)],
        [("a", 19)],
        [("b", 20)],
    ]
    assert [one.by_uv for one in installs] == [False, False, False, False, True]
    assert [(str(word), word.line) for word in installs[0].arguments.values("--requirement")] == [
        ("requirements.txt", 11)
    ]
    assert installs[0].arguments.values("--extra-index-url") == ("https://x/whl",)
    assert [packages for packages in map(apt_packages, found) if packages] == [("git", "curl")]


@pytest.mark.parametrize(
    ("line", "words", "options"),
    [
        ("pip install -q --no-cache-dir torch==2.1", ("torch==2.1",), {"-q", "--no-cache-dir"}),
        ("python3 -m pip install --upgrade pip", ("pip",), {"--upgrade"}),
        ("/opt/venv/bin/pip3.12 install 'a[b]>=1,<2' c", ("a[b]>=1,<2", "c"), set()),
        ("PIP_RETRIES=3 sudo pip install a > /dev/null 2>&1", ("a",), set()),
        ("pip --no-cache-dir install -rreq.txt -c con.txt x", ("x",), {"--requirement", "--constraint"}),
        ("pip install -i https://i/simple -f https://f a", ("a",), {"--index-url", "--find-links"}),
        ("if true; then pip install a; fi", ("a",), set()),
        ("for one in 1 2; do pip install a; done", ("a",), set()),
        ("set -eux; pip install a", ("a",), set()),
        ("(cd /src && pip install a)", ("a",), set()),
        ("bash -lc 'pip install \"a>=1\" b'", ("a>=1", "b"), set()),
        ("pip install $PACKAGES", ("x", "y==2"), set()),
        ("pip install \"$PIN\"", ("y==2",), set()),
        ("V=3 && pip install a==$V", ("a==3",), set()),
        ("export V=3; pip install a==${V:-4}", ("a==3",), set()),
        ("uv pip install --system -U a", ("a",), {"--system", "--upgrade"}),
        ("python -m uv pip install a", ("a",), set()),
    ],
)  # fmt: skip
def test_pip_lines(line, words, options):
    found = commands(f"FROM x\nRUN {line}\n", PACKAGES="x y==2", PIN="y==2")
    (install,) = [one for command in found if (one := pip_install(command))]
    assert install.arguments.words == words
    assert set(install.arguments.options) == options


def test_lines_that_install_nothing():
    for line in (
        *("pip --version", "pip download a", "echo pip install a", "apt-get update", "npm install x"),
        *("echo 'pip install a'", "# pip install a", "printf '%s' \"pip install a\" > note", "echo 'unended"),
    ):
        for command in commands(f"FROM x\nRUN {line}\n"):
            assert (pip_install(command), apt_packages(command), conda_install(command)) == (None, None, None)


def test_another_escape_character_and_old_env():
    whole = parse_dockerfile("# escape=`\nFROM x\nENV HOME_DIR C:\\a b\nRUN pip install `\n  a\n")
    assert [one.keyword for one in whole.instructions] == ["FROM", "ENV", "RUN"]
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


@pytest.mark.parametrize(
    ("image", "known"),
    [
        ("nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04", {"cuda": "12.4", "system": "ubuntu22.04", "has_nvcc": True}),
        ("pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime", {"torch": "2.9.1", "cuda": "12.8", "has_nvcc": False}),
        ("nvcr.io/nvidia/pytorch:25.03-py3", {"family": "nvidia-torch"}),
        ("docker.io/library/python:3.11-slim", {"python": "3.11", "repository": "python"}),
        ("ubuntu:24.04", {"system": "ubuntu24.04"}),
        ("debian:bookworm-slim", {"system": "debian12"}),
        ("localhost:5000/a/b", {"repository": "localhost:5000/a/b", "tag": None}),
    ],
)
def test_what_the_name_of_a_base_says(image, known):
    base = base_of(image)
    assert {name: getattr(base, name) for name in known} == known


def test_wheels_in_addresses():
    name, version, tags = wheel_of("https://h/flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    assert (name, str(version), tags) == ("flash-attn", "2.8.3+cu12torch2.8cxx11abitrue", {"cp312-cp312-linux_x86_64"})
    assert wheel_of("https://h/x.tar.gz") is None


def test_the_last_line_of_a_command_goes_with_its_backslash():
    text = "FROM x\nRUN pip install a \\\n    b\nCOPY c d\n"
    assert remove_word(text, 2, 3, "b") == "FROM x\nRUN pip install a\nCOPY c d\n"
    assert remove_word(text, 2, 3, "a") == "FROM x\nRUN pip install \\\n    b\nCOPY c d\n"


words = st.sampled_from(
    [
        *("RUN", "FROM x", "FROM python:3.12", "pip install", "torch==2.11.0", "-r", "-e", ".", "\\", "<<EOF", "EOF"),
        *("#", "'", '"', "&&", "$A", "", "COPY --from=0", "COPY", "ENV", "ARG", "A=1", "ONBUILD RUN", "conda install"),
        *("uv sync", "uv venv", "git clone", "bash", "-c", "[", '["a", 1]', "poetry install", "USER", "WORKDIR", "cd"),
        *("apt-get install", "python -m venv", "source", "ln -s", "pip uninstall", "pip config set", "\r", "\x00", "é"),
    ]
)


@given(st.lists(st.lists(words, max_size=5).map(" ".join), max_size=8).map("\n".join))
def test_any_text_can_be_read_and_judged(tmp_path_factory, text):
    whole = parse_dockerfile(text)
    assert all(1 <= one.first <= one.last <= len(text.splitlines()) for one in whole.instructions)
    verdict = judge(Texts(text), Node(gpu="H100"), Index(cache=tmp_path_factory.getbasetemp(), offline=True))
    assert verdict.trace.states or verdict.unknown
