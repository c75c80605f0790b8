"""Settings and fixtures for all tests, and a list of every test that passed only when it was tried again."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.outputs import watch_processes, watch_this_process
from tests.store.s3_server import FaultyS3, running_s3
from windlass.cli.main import run_command

# Machines are slow and noisy: time says nothing about a property.
settings.register_profile("windlass", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("windlass")

# Tests share the cores: two threads of one rank that spin for each other made a step of 0.1 s take 2 s.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and commands would break their lines there

HURT_ON_PURPOSE = ("train", "slurm", "cluster", "image")  # what --reruns is for

RERUNS: list[tuple[str, str]] = []  # test, and what it said when it failed


# Begun last, they would run alone: so they are begun first, in this order.
LONGEST = (
    "tests/test_first_hour.py",
    "tests/kubernetes/test_entry.py",
    "tests/ui/test_live_page.py",
    "tests/ui/test_sweep.py",
    "tests/trainer/test_hang_watch.py",
    "tests/trainer/test_hub_model.py",
    "tests/ui/test_page.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in HURT_ON_PURPOSE):
            item.add_marker(pytest.mark.flaky(reruns=0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays to the end: garbage is not looked for meanwhile, nor later among all of that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="session")
def s3_process() -> Iterator[FaultyS3]:
    """An S3 server with an empty bucket called `bucket`."""
    pytest.importorskip("moto")
    with running_s3() as s3:
        s3.make_bucket("bucket")
        yield s3


@pytest.fixture
def s3(s3_process: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The S3 server, named in the environment, without faults and without files."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_process
    s3_process.reset()


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def windlass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run one command in-process; nothing of it leaves tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)

    def run(*arguments: Any) -> Outcome:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(int(code), out, err)

    return run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {preset: llama-tiny}\n"
        "data: {source: 'corpus:austen', sequence_length: 32}\n"
        "train: {steps: 6, global_batch: 4, precision: fp32}\n"
        "resources: {gpus_per_node: 0, processes_per_node: 2}\n"
        "checkpoint: {every: 2}\n"
    )
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system with so many bytes of its own."""
    mounted: list[Path] = []

    def make(size: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system of its own cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
