"""The walk-through of the docs, command by command, and that the page holds these commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from make_first_hour import PAGE, STEPS, perform, shown, write_files  # noqa: E402


def test_the_page_holds_the_commands_that_are_run():
    written = re.findall(r"^\$ (.*)$", PAGE.read_text(), re.MULTILINE)
    assert written == [step.command for step in STEPS], "run python tools/make_first_hour.py"


@pytest.mark.train
def test_every_command_of_the_page_does_what_it_says(tmp_path):
    write_files(tmp_path)
    for step in STEPS:
        output = perform(step, tmp_path)
        assert "Traceback" not in output
        assert str(ROOT) not in shown(output, step.lines, tmp_path)
