"""What runs inside an image: a crash has a name, versions are those loaded, and the sources carry themselves in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.image.build.job import Proof, Surroundings
from windlass.image.build.process import Outcome
from windlass.image.build.testing import command_inside, prove_image, script
from windlass.image.inside import proof
from windlass.image.inside.proof import DEFAULTS, groups, run_group, same_version


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder whose modules the checks can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)

    return write


def order(**values):
    return {**DEFAULTS, "seconds": 60, **values}


def test_a_crash_is_a_failed_check_with_a_name(modules):
    modules(good="__version__ = '1'", crashes="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    names = ["good", "crashes", "never"]
    results, _ = run_group(order(imports=names), [f"import {name}" for name in names])
    assert [(one["name"], one["status"]) for one in results] == [
        ("import good", "passed"),
        ("import crashes", "failed"),
    ]
    assert results[1]["detail"] == "the process ended with signal SIGSEGV"


def test_a_broken_import_brings_its_traceback_and_an_absent_module_is_skipped_unless_it_must_be_there(modules):
    modules(broken="raise ImportError('undefined symbol: ncclX')")
    results, _ = run_group(order(imports=["broken"]), ["import broken", "import not_there_at_all"])
    assert results[0]["detail"] == "ImportError: undefined symbol: ncclX"
    assert "broken.py" in results[0]["evidence"]
    assert results[1]["status"] == "skipped"
    required, _ = run_group(order(imports=["not_there_at_all"]), ["import not_there_at_all"])
    assert required[0]["status"] == "failed"


@pytest.mark.slow
def test_what_hangs_is_ended_and_said(modules):
    modules(hangs="import time\ntime.sleep(600)\n")
    results, _ = run_group(order(imports=["hangs"], seconds=3), ["import hangs"])
    assert results[0]["detail"] == "the process ended with no answer in time"


def test_versions_are_those_that_are_loaded(modules):
    modules(torch="__version__ = '2.14.1+cu130'\nclass version:\n    cuda = '13.0'\n")
    results, loaded = run_group(order(expect={"torch": "2.14", "cuda": "12.8"}), ["versions"])
    assert loaded["torch"] == "2.14.1+cu130"
    assert results[0]["detail"] == "cuda 13.0 is loaded, 12.8 was asked for"


@pytest.mark.parametrize(
    ("found", "asked", "same"),
    [
        ("2.15.0+cu132", "2.15", True),
        ("2.15.0+cu132", "2.15.0", True),
        ("2.15.1", "2.15.0", False),
        ("2.1", "2.15", False),
        ("2.30.7", "2.3", False),
        (None, "13.0", False),
        (None, "cpu", True),
    ],
)
def test_a_version_meets_what_was_asked_for(found, asked, same):
    assert same_version(found, asked) is same


def test_levels_add_up():
    quick, standard, full = (
        [name for group in groups(order(level=level)) for name in group] for level in ("quick", "standard", "full")
    )
    assert set(quick) < set(standard) < set(full)
    assert {"model", "all-reduce"} <= set(standard)
    assert "smoke" in full
    assert "ofi" in [name for group in groups(order(efa=True)) for name in group]


def test_the_proof_is_carried_into_any_python():
    """As a container gets them: on stdin, with nothing of windlass on the path."""
    command = command_inside(json.dumps({"checks": ["requirements"], "level": "quick"}), sys.executable)
    answer = subprocess.run(
        [command[0], "-I", *command[1:]], input=script(), capture_output=True, text=True, check=True
    )
    assert '"begin": "requirements"' in answer.stdout
    assert '"name": "requirements"' in answer.stdout


def test_the_proof_can_be_run_alone(modules):
    modules(torch="__version__ = '2.14.1'")
    command = [sys.executable, proof.__file__, '{"level": "quick", "expect": {"torch": "2.14"}}']
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(answer.stdout.splitlines()[-1])
    assert report["loaded"]["torch"] == "2.14.1"
    assert answer.returncode == (0 if report["passed"] else 1)


def test_modules_in_the_working_folder_of_an_image_are_found(tmp_path):
    (tmp_path / "owncode.py").write_text("__version__ = '1.2'")
    command = command_inside(json.dumps({"checks": ["import owncode"], "imports": ["owncode"]}), sys.executable)
    answer = subprocess.run(command, input=script(), capture_output=True, text=True, check=True, cwd=tmp_path)
    assert '"detail": "owncode 1.2"' in answer.stdout


NO_CUDA = "class cuda:\n    is_available = staticmethod(lambda: False)\nclass version:\n    cuda = '13.0'\n"
NO_KERNELS = (
    "class cuda:\n    is_available = staticmethod(lambda: True)\ndef manual_seed(seed):\n    raise RuntimeError('{}')\n"
)


def test_gpus_that_do_not_work_fail_the_proof(modules):
    assert "cuda" in [name for group in groups(order(level="quick", gpus=True)) for name in group]
    modules(torch="__version__ = '2.14.1'\n" + NO_CUDA)
    results, _ = run_group(order(gpus=True), ["cuda"])
    assert results[0]["status"] == "failed"
    assert results[0]["detail"] == "torch 2.14.1 sees no GPU (built with CUDA 13.0)"
    modules(torch="__version__ = '2.14.1'\n" + NO_KERNELS.format("no kernel image is available"))
    results, _ = run_group(order(gpus=True), ["cuda"])
    assert (results[0]["status"], results[0]["detail"]) == ("failed", "RuntimeError: no kernel image is available")


def test_an_image_without_python_is_said_to_be_so():
    class Empty:
        name = "buildah"

        def run(self, image, command, around, text_in):
            return Outcome(127, "", "sh: python3: not found")

    with pytest.raises(UserError, match="nothing could be run inside") as refused:
        prove_image(Empty(), "scratch:1", Proof("quick"), Surroundings())
    assert "python3: not found" in refused.value.evidence
