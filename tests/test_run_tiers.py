"""tools/run_tiers: targets side by side, each with its own output, and nothing that fails is lost."""

import runpy
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
where:
\t@nice; grep -hE ':cpu[:,]|,cpu:|^0::' /proc/self/cgroup | head -1 | sed 's/.*://' >>places
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
    """It has a control group of its own, where that can be made, and is nice elsewhere."""
    done = subprocess.run([sys.executable, TOOL, "where", "idle:where"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done
    groups = sorted((folder / "places").read_text().split(), key=len)
    if "windlass-tests-" in groups[1]:
        assert "windlass-tests-" not in groups[0]
        assert not list(Path("/sys/fs/cgroup").glob(f"**{groups[1]}"))  # nothing is left behind
    else:
        here, there = sorted(int(line) for line in done.stdout.splitlines() if line.lstrip("-").isdigit())
        assert there == min(here + 10, 19)


def test_where_there_are_no_control_groups(monkeypatch):
    def missing(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    assert runpy.run_path(str(TOOL))["make_idle_group"]() is None


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
