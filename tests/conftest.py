"""Settings for all tests, and a list of every test that passed only when it was tried again."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.outputs import watch_processes, watch_this_process

# Machines are slow and noisy: time says nothing about a property.
settings.register_profile("windlass", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("windlass")

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and commands would break their lines there

RERUNS: list[tuple[str, str]] = []  # test, and what it said when it failed


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # an outcome of pytest-rerunfailures
        RERUNS.append((report.nodeid, report.longreprtext))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """pytest counts reruns and does not name them. Each is a defect to look at, so its first failure is shown."""
    for test, failure in RERUNS:
        terminalreporter.section(f"tried again: {test}", sep="-", yellow=True)
        terminalreporter.write_line(failure)
    if RERUNS:
        terminalreporter.section("tests that were tried again", sep="=", yellow=True)
        for test, failure in RERUNS:
            said = [line for line in failure.splitlines() if line.startswith("E ")] or failure.splitlines()[-1:]
            terminalreporter.write_line(f"RERUN {test}: {said[0].removeprefix('E').strip() if said else ''}")


# Whatever a command prints with --json in any test is compared with its schema.
watch_this_process()
watch_processes()
