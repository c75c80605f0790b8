"""Judge the Dockerfiles of public incidents by recorded answers of the package index: no network, the same every day.

The answers are in cases/index.json.xz; `python -m tests.image.score tests/image/cases --record` writes them anew.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.image.score import CASES, Score, load, recorded_index, score_case
from windlass.image.facts.node import node_named
from windlass.image.judge import heal, judge
from windlass.image.read.texts import Texts
from windlass.image.rules.packages import _sentence

NAMES = sorted(one.name for one in CASES.iterdir() if (one / "expect.json").is_file())


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    return recorded_index(tmp_path_factory.mktemp("index"))


def ids(texts: Texts, node, index) -> Counter[tuple[str, str]]:
    return Counter((one.id, one.severity) for one in judge(texts, node, index).findings)


@pytest.mark.slow
def test_the_scores(index):
    """And a patched file passes the plan, and gets no second patch."""
    score = Score()
    for name in NAMES:
        healed = score_case(CASES / name, index, score)
        if healed.diff:
            again = heal(healed.patched, load(CASES / name)[1], index)
            assert (again.before.errors, again.diff) == ((), ""), name
    print("\n".join(score.totals()))
    assert score.found == score.conflicts == 129
    assert (score.passed, score.unsure) == (0, 0)
    assert (score.alarms, score.edits) == (0, 0)
    assert score.patches == score.healed >= 40


@pytest.mark.parametrize("name", NAMES)
def test_a_comment_changes_no_verdict(name, index):
    texts, node, _ = load(CASES / name)
    lines = (texts.dockerfile or "").splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith(("FROM", "ARG")))
    commented = texts.with_dockerfile("".join([*lines[:start], "# a remark\n", *lines[start:]]))
    before, after = judge(texts, node, index), judge(commented, node, index)
    assert [one.id for one in after.findings] == [one.id for one in before.findings]
    assert [one.where.place.line for one in after.errors] == [one.where.place.line + 1 for one in before.errors]


def split_runs(texts: Texts) -> Texts:
    """Every `&& pip` and `&& apt-get install` begins a RUN of its own, where the shell carries nothing over."""
    parts = re.split(r"(?m)^(?=[A-Z]+ )", texts.dockerfile or "")
    carries = re.compile(r"\b(cd|source|export|if|for|conda|activate|poetry)\b|\w=\S+;")
    join = re.compile(r"\s*(?:\\\n)?\s*&&\s*(?:\\\n\s*)?(?=(?:/\S+/)?pip|apt-get install)")
    split = [join.sub("\nRUN ", one) if one.startswith("RUN ") and not carries.search(one) else one for one in parts]
    return texts.with_dockerfile("".join(split))


def renamed(texts: Texts) -> Texts:
    """Every file that a `-r` names gets another name."""
    dockerfile, files = texts.dockerfile or "", dict(texts.files)
    for name in [one for one in files if re.search(rf"-r \S*{re.escape(Path(one).name)}", dockerfile)]:
        new = f"what-{Path(name).stem}-needs.pip"
        dockerfile = re.sub(rf"(?<![\w-]){re.escape(Path(name).name)}\b", new, dockerfile)
        files[str(Path(name).with_name(new))] = files.pop(name)
    return Texts(dockerfile, files)


def pin_moved(texts: Texts) -> Texts:
    """The first exact pin of a requirement file goes into the command that names the file."""
    for name, text in texts.files.items():
        pin = re.search(r"(?m)^[\w.-]+==[\w.]+$", text)
        used = re.search(rf"-r \S*{re.escape(Path(name).name)}", texts.dockerfile or "")
        if pin and used:
            line = (texts.dockerfile or "").replace(used[0], f"{pin[0]} {used[0]}")
            return Texts(line, {**texts.files, name: text.replace(f"{pin[0]}\n", "", 1)})
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("change", [split_runs, renamed, pin_moved])
def test_the_same_written_otherwise_changes_no_verdict(change, index):
    tried = 0
    for name in NAMES:
        texts, node, _ = load(CASES / name)
        other = change(texts)
        if other.diff(texts):
            tried += 1
            assert ids(other, node, index) == ids(texts, node, index), name
    assert tried >= 8


def test_what_is_not_understood_is_said(index):
    texts = Texts("FROM example.com/team/base:3\nRUN pip install -r gone.txt\nRUN ./setup.sh\n")
    _, node, _ = load(CASES / "066-matched-set")
    unknown = "\n".join(judge(texts, node, index).unknown)
    assert "Dockerfile:1: the base image example.com/team/base:3 is not known" in unknown
    assert "gone.txt is not in the context" in unknown
    assert "setup.sh is not in the context" in unknown


def test_what_the_table_does_not_have_is_said(index):
    texts, node, _ = load(CASES / "066-matched-set")
    assert judge(texts, node, index).unknown == ()
    assert judge(texts, replace(node, gpu="RTX 9999"), index).unknown == (
        "the GPU RTX 9999 is not in the table: whether torch has code for it",
    )
    newer = Texts("FROM nvidia/cuda:13.9.0-devel-ubuntu24.04\n")
    (drivers,) = judge(newer, replace(node, driver="580.95"), index).unknown
    assert drivers.startswith("Dockerfile:1: which drivers nvidia/cuda:13.9.0-devel-ubuntu24.04 accepts is not in the")
    old = Texts("FROM nvidia/cuda:13.2.1-devel-ubuntu24.04\n")
    assert judge(old, replace(node, driver="580.95"), index).findings == ()
    (refused,) = judge(old, replace(node, driver="575.51"), index).errors
    assert refused.id == "base-needs-driver"


@pytest.mark.parametrize("base", ["nvidia/cuda:12.2.2-devel-ubuntu22.04", "ubuntu:22.04", "python:3.12-slim"])
def test_a_gpu_that_the_driver_does_not_run_is_said_whatever_is_in_the_image(index, base):
    found = judge(Texts(f"FROM {base}\n"), node_named("b200", "535.104.05"), index).errors
    assert [one.id for one in found] == ["driver-without-gpu"]
    assert found[0].sentence == (
        "driver 535.104.05 does not run B200: 570 is the first driver that runs it; no image changes that"
    )
    assert str(found[0].where.place) == "Dockerfile:1"
    assert judge(Texts(f"FROM {base}\n"), node_named("h100", "535.104.05"), index).errors == ()


def test_a_contradiction_is_told_in_one_sentence():
    told = (
        "error: No solution found when resolving dependencies\n"
        "  cause: Because torchaudio==2.7.0 depends on torch==2.7.0 and you require torch==2.8.0, we can conclude\n"
        "    that your requirements and torchaudio==2.7.0 are incompatible.\n"
        "    And because you require torchaudio==2.7.0, we can conclude that your requirements are unsatisfiable."
    )
    assert _sentence(told) == "torchaudio==2.7.0 depends on torch==2.7.0 and you require torch==2.8.0"


def test_a_gpu_decides(index):
    texts, node, _ = load(CASES / "020-cu124-on-rtx5090")
    assert "gpu-architecture" in {one.id for one in judge(texts, node, index).errors}
    assert judge(texts, replace(node, gpu="H100"), index).errors == ()


def test_the_cases_are_here():
    assert Path(CASES / "index.json.xz").stat().st_size < 400_000
