"""From real failures to different fixes: the logs are of real pip, apt, uv and buildah, recorded in logs/."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.image.build.logs import BuildLog, why_failed
from windlass.image.build.remedies import proposals, propose
from windlass.image.read.dockerfile import parse_dockerfile

LOGS = Path(__file__).parent / "logs"
SLIM = "FROM python:3.11-slim\n"
DEBIAN = "FROM debian:12\n"
APT = "RUN apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*\n"


def log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


# log, Dockerfile, the ids in their order, the Dockerfile after the first fix
CASES = {
    "flash": (
        SLIM + "RUN pip install torch==2.11.0 flash-attn==2.8.3\n",
        ["no-build-isolation"],
        SLIM + "RUN pip install --no-build-isolation torch==2.11.0 flash-attn==2.8.3\n",
    ),
    "build-module": (
        SLIM + "RUN pip install --no-build-isolation needsnumpy\n",
        ["build-needs:numpy"],
        SLIM + "RUN pip install --no-cache-dir 'numpy'\nRUN pip install --no-build-isolation needsnumpy\n",
    ),
    "gcc": (
        SLIM + "RUN pip install fastthing\n",
        ["apt-add:gcc+libc6-dev"],
        SLIM + APT.format("gcc libc6-dev") + "RUN pip install fastthing\n",
    ),
    "header": (
        SLIM + "RUN pip install usesffi\n",
        ["apt-add:libpq-dev"],
        SLIM + APT.format("libpq-dev") + "RUN pip install usesffi\n",
    ),
    "linker": (
        SLIM + "RUN pip install linksnuma\n",
        ["apt-add:libaio-dev"],
        SLIM + APT.format("libaio-dev") + "RUN pip install linksnuma\n",
    ),
    "git": (
        SLIM + "RUN pip install git+https://github.com/x/y\n",
        ["apt-add:git+ca-certificates"],
        SLIM + APT.format("git ca-certificates") + "RUN pip install git+https://github.com/x/y\n",
    ),
    "curl": (
        DEBIAN + "RUN curl -O https://example.org/x\n",
        ["apt-add:curl+ca-certificates"],
        DEBIAN + APT.format("curl ca-certificates") + "RUN curl -O https://example.org/x\n",
    ),
    "run": (
        DEBIAN + "RUN pip install torch==9 && echo done\n",
        ["apt-add:python3-pip"],
        DEBIAN + APT.format("python3-pip") + "RUN pip install torch==9 && echo done\n",
    ),
    "managed": (
        DEBIAN + "RUN python3 -m pip install x\n",
        ["break-system-packages"],
        DEBIAN + "ENV PIP_BREAK_SYSTEM_PACKAGES=1\nRUN python3 -m pip install x\n",
    ),
    "apt-locate": (
        DEBIAN + "RUN apt-get install -y no-such-package-xyz\n",
        ["apt-update:2"],
        DEBIAN + "RUN apt-get update && apt-get install -y no-such-package-xyz\n",
    ),
    "apt-candidate": (
        DEBIAN + "RUN apt-get update && apt-get install -y python-pip git\n",
        ["apt-rename:python-pip"],
        DEBIAN + "RUN apt-get update && apt-get install -y python3-pip git\n",
    ),
    "apt-asks": (
        DEBIAN + "RUN apt-get update && apt-get install zsh\n",
        ["apt-yes"],
        DEBIAN + "RUN apt-get update && apt-get install -y zsh\n",
    ),
    "not-root": (
        DEBIAN + "USER trainer\nRUN apt-get update && apt-get install -y zsh\n",
        ["user-root"],
        DEBIAN + "USER trainer\nUSER root\nRUN apt-get update && apt-get install -y zsh\nUSER trainer\n",
    ),
    "apt-resolve": (
        DEBIAN + "RUN apt-get update && apt-get install -y git\n",
        ["apt-retries", "retry-network-1"],
        DEBIAN + "RUN apt-get -o Acquire::Retries=5 update && apt-get -o Acquire::Retries=5 install -y git\n",
    ),
    "timeout": (
        SLIM + "RUN pip install requests\n",
        ["pip-retries", "retry-network-1"],
        SLIM + "RUN pip install --retries 10 --timeout 120 requests\n",
    ),
    "space": (
        DEBIAN + "RUN apt-get update && apt-get install -y python3-pip\nRUN pip install numpy\n",
        ["no-cache"],
        DEBIAN + "RUN apt-get update && apt-get install -y python3-pip\nRUN pip install --no-cache-dir numpy\n",
    ),
    "copy": (DEBIAN + "COPY requirements.txt /r\nCOPY train.py /t\n", [], None),
    "apt-empty": (DEBIAN + "RUN apt-get update && apt-get install -y zsh\n", [], None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_failure_gets_its_fixes_in_order(name):
    dockerfile, ids, after = CASES[name]
    found = list(proposals(dockerfile, log(name)))
    assert [one.id for one in found] == ids
    if after is not None:
        assert found[0].dockerfile == after
        assert found[0].evidence
        assert all(line in log(name) for line in found[0].evidence)


@pytest.mark.parametrize("name", CASES)
def test_tried_fixes_are_never_proposed_again_and_it_ends(name):
    dockerfile, ids, _ = CASES[name]
    tried: list[str] = []
    while (one := propose(dockerfile, log(name), tried)) is not None:
        assert one.id not in tried
        assert one.dockerfile != dockerfile or one.id == "retry-network-1"
        parse_dockerfile(one.dockerfile)
        tried.append(one.id)
    assert tried == ids


def test_the_step_that_failed_is_the_one_that_is_changed():
    dockerfile = DEBIAN + "RUN echo one\nRUN pip install torch==9 && echo done\nRUN echo three\n"
    fix = propose(dockerfile, log("run"), ())
    lines = fix.dockerfile.splitlines()
    assert lines[2].startswith("RUN apt-get update")
    assert lines[3] == "RUN pip install torch==9 && echo done"


WHY = {
    "resolution": "resolution",
    "uv": "resolution",
    "nomatch": "no-version",
    "python": "python-version",
    "flash": "torch-at-build",
    "gcc": "compiler",
    "header": "header",
    "linker": "linker",
    "library": "shared-library",
    "git": "git",
    "curl": "program",
    "managed": "externally-managed",
    "apt-locate": "apt-locate",
    "apt-candidate": "apt-candidate",
    "apt-asks": "apt-asks",
    "not-root": "not-root",
    "apt-unreach": "apt-network",
    "timeout": "pip-network",
    "dns": "pip-network",
    "space": "no-space",
    "copy": "copy-missing",
    "from": "base-unreachable",
}


@pytest.mark.parametrize("name", WHY)
def test_why_a_build_failed(name):
    failure = why_failed(log(name))
    assert failure.id == WHY[name]
    assert failure.lines
    assert all(line in log(name) for line in failure.lines)


def test_a_missing_file_is_named_with_its_step():
    failure = why_failed(log("copy"))
    assert failure.sentence == "the build copies train.py, which is not in the context"
    assert any('building at STEP "COPY train.py /t"' in line for line in failure.lines)


def test_pips_list_of_causes_is_what_matters():
    assert why_failed(log("resolution2")).lines[-2:] == (
        "The user requested torch==2.12.0",
        "hyperpod-elastic-agent 1.1.3 depends on torch<2.12.0 and >=2.4.0",
    )


def test_an_unknown_failure_shows_the_lines_of_trouble_and_no_fix():
    text = "STEP 1/2: FROM debian:12\nSTEP 2/2: RUN ./train\nloading\nerror: the moon is full\nbye\n"
    failure = why_failed(text)
    assert (failure.id, failure.lines) == ("unknown", ("error: the moon is full",))
    assert propose("FROM debian:12\nRUN ./train\n", text, ()) is None


def test_what_an_earlier_step_said_does_not_count():
    text = (
        "STEP 1/3: FROM debian:12\nSTEP 2/3: RUN a || true\n/bin/sh: 1: curl: not found\n"
        "STEP 3/3: RUN pip install git+https://x/y\nERROR: Cannot find command 'git' - do you have 'git' installed?\n"
        'Error: building at STEP "RUN pip install git+https://x/y": exit status 1\n'
    )
    dockerfile = "FROM debian:12\nRUN a || true\nRUN pip install git+https://x/y\n"
    assert why_failed(text).id == "git"
    assert [one.id for one in proposals(dockerfile, text)] == ["apt-add:git+ca-certificates"]


def test_buildkit_writes_the_same_things_its_own_way():
    body = "".join(f"#7 1.234 {line}\n" for line in log("resolution").splitlines())
    text = (
        "#6 [2/3] RUN echo one\n#7 [3/3] RUN pip install torch==2.12.0 torchvision==0.26.0\n"
        f"{body}------\n > [3/3] RUN pip install torch==2.12.0 torchvision==0.26.0:\n"
        'ERROR: failed to solve: process "/bin/sh -c pip install torch==2.12.0 torchvision==0.26.0" did not complete '
        "successfully: exit code: 1\n"
    )
    dockerfile = SLIM + "RUN echo one\nRUN pip install torch==2.12.0 torchvision==0.26.0\n"
    assert why_failed(text).id == "resolution"
    assert propose(dockerfile, text, ()) is None, "what the versions are, the resolver says"


def test_docker_before_23_names_the_failed_step_in_its_own_words():
    text = (
        "#7 [b 2/2] RUN pip install x[y]\n#8 [a 2/2] RUN sleep 9\n"
        "#7 1.234 ERROR: No matching distribution found for x[y]\n"
        "executor failed running [/bin/sh -c pip install x[y]]: exit code: 1\n"
    )
    assert BuildLog(text).step == "pip install x[y]"


@given(st.sampled_from(sorted(CASES)), st.sampled_from(sorted(CASES)))
def test_any_log_with_any_dockerfile_gives_dockerfiles(of_log, of_dockerfile):
    dockerfile, _, _ = CASES[of_dockerfile]
    for one in proposals(dockerfile, log(of_log)):
        assert one.sentence
        assert one.evidence
        assert len(parse_dockerfile(one.dockerfile).stages) == 1
