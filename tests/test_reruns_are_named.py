"""`make test` tries training tests twice; each one that needed it is named with what it said the first time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_test_that_is_tried_again_is_named_with_its_first_failure(tmp_path, workers):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_flaky.py").write_text(
        "from pathlib import Path\n"
        "import pytest\n"
        "@pytest.mark.train\n"
        "def test_second_time_lucky():\n"
        f"    marker = Path({str(tmp_path)!r}) / 'been-here'\n"
        "    before = marker.exists()\n"
        "    marker.touch()\n"
        "    assert before, 'the port was taken'\n"
        "def test_that_starts_no_training():\n"
        "    assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--reruns", "1", *workers, "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the copied conftest imports from here
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert out.returncode == 1, out.stdout
    assert "1 failed, 1 passed, " in out.stdout
    assert " 1 rerun" in out.stdout
    summary = out.stdout[out.stdout.index("tests that were tried again") :]
    assert "test_flaky.py::test_second_time_lucky: AssertionError: the port was taken" in summary
