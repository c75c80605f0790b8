"""tools/run_tiers: targets side by side, each with its own output, and nothing that fails is lost."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "run_tiers"
MAKEFILE = """\
wait:
\t@echo begin >>order; sleep 0.5; echo end >>order; echo waited
fail:
\t@echo begin >>order; sleep 0.5; echo end >>order; echo failed; exit 1
next:
\t@echo next >>order
priority:
\t@nice
forever:
\t@trap 'echo told >>order; exit 1' INT; touch there; while :; do sleep 0.1; done
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    return tmp_path


def test_chains_go_side_by_side_and_to_their_end_though_one_fails(folder):
    done = subprocess.run([sys.executable, TOOL, "fail+next", "wait"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done  # make's own
    order = (folder / "order").read_text().split()
    assert order[:2] == ["begin", "begin"]
    assert order.count("next") == 1
    assert "── fail\nfailed\n" in done.stdout
    assert "── wait\nwaited\n" in done.stdout
    assert "── fail: failed (2) after " in done.stdout


def test_a_chain_that_takes_what_others_leave(folder):
    done = subprocess.run(
        [sys.executable, TOOL, "priority", "nice:priority"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    here, there = sorted(int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdigit())
    assert there == min(here + 15, 19)


def test_a_signal_is_passed_on(folder):
    process = subprocess.Popen([sys.executable, TOOL, "forever+next"], cwd=folder, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (folder / "there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (folder / "order").read_text().split() == ["told"]
