"""Judge the Dockerfiles of public incidents by recorded answers of the package index: no network, the same every day.

The answers are in cases/index.json.gz; `python -m tests.image.score tests/image/cases --record` writes them anew.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.image.score import CASES, Score, load, recorded_index, score_case
from windlass.image.judge import heal, judge
from windlass.image.read.texts import Texts
from windlass.image.rules.packages import _sentence

NAMES = sorted(one.name for one in CASES.iterdir() if (one / "expect.json").is_file())


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    return recorded_index(tmp_path_factory.mktemp("index"))


def ids(texts: Texts, node, index) -> Counter[tuple[str, str]]:
    return Counter((one.id, one.severity) for one in judge(texts, node, index).findings)


def test_the_scores(index):
    score = Score()
    for name in NAMES:
        score_case(CASES / name, index, score)
    print("\n".join(score.totals()))
    assert score.found == score.conflicts == 28
    assert (score.passed, score.unsure) == (0, 0)
    assert (score.alarms, score.edits) == (0, 0)
    assert score.patches == score.healed >= 8


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_file_passes_and_proposes_nothing_more(name, index):
    texts, node, _ = load(CASES / name)
    healed = heal(texts, node, index)
    if healed.diff:
        again = heal(healed.patched, node, index)
        assert (again.before.errors, again.diff) == ((), "")


@pytest.mark.parametrize("name", NAMES)
def test_a_comment_changes_no_verdict(name, index):
    texts, node, _ = load(CASES / name)
    lines = (texts.dockerfile or "").splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith(("FROM", "ARG")))
    commented = texts.with_dockerfile("".join([*lines[:start], "# a remark\n", *lines[start:]]))
    before, after = judge(texts, node, index), judge(commented, node, index)
    assert [one.id for one in after.findings] == [one.id for one in before.findings]
    assert [one.where.place.line for one in after.errors] == [one.where.place.line + 1 for one in before.errors]


@pytest.mark.parametrize("name", [name for name in NAMES if name[:3] in ("006", "012", "014", "024", "026", "066")])
def test_splitting_a_run_changes_no_verdict(name, index):
    texts, node, _ = load(CASES / name)
    text = re.sub(r"\s+&&\s*(?:\\\n\s*)?(?=pip|apt-get install)", "\nRUN ", texts.dockerfile or "")
    assert ids(texts.with_dockerfile(text), node, index) == ids(texts, node, index)


def test_the_name_of_a_requirements_file_changes_no_verdict(index):
    texts, node, _ = load(CASES / "012-requirements-repin-older-torch")
    other = Texts(
        (texts.dockerfile or "").replace("requirements.txt", "what-we-need.pip"),
        {"what-we-need.pip": texts.files["requirements.txt"]},
    )
    assert ids(other, node, index) == ids(texts, node, index)
    assert sum(ids(texts, node, index).values()) >= 3


def test_where_a_pin_stands_changes_no_verdict(index):
    texts, node, _ = load(CASES / "012-requirements-repin-older-torch")
    moved = Texts(
        (texts.dockerfile or "").replace("-r requirements.txt", "torch==2.6.0 -r requirements.txt"),
        {"requirements.txt": texts.files["requirements.txt"].replace("torch==2.6.0\n", "")},
    )
    assert ids(moved, node, index) == ids(texts, node, index)


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
    assert Path(CASES / "index.json.gz").stat().st_size < 400_000
