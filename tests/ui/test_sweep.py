"""`windlass sweep`: every combination once, so many at a time, and on again after a kill."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.ui.conftest import windlass
from windlass.cli.runs.sweep import combinations, is_swept
from windlass.common.files import read_json_lines

RUN_FILE = """\
name: rates
model: {preset: llama-tiny}
data: {source: 'corpus:austen', sequence_length: 32}
train: {steps: 3, global_batch: 2, precision: fp32}
resources: {gpus_per_node: 0, processes_per_node: 1}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rates.yaml").write_text(RUN_FILE)
    return tmp_path


def sweep(start, folder, *arguments, **options):
    environment = {**os.environ, "WINDLASS_RUNS": str(folder / "runs")}
    command = windlass("sweep", folder / "rates.yaml", *arguments)
    return start(command, env=environment, cwd=folder, text=True, stderr=subprocess.PIPE, **options)


def test_values_with_commas_are_swept_and_lists_are_not():
    assert is_swept("train.learning_rate=1e-4,3e-4")
    assert not is_swept("train.learning_rate=1e-4")
    assert not is_swept("data.files=[a.jsonl, b.jsonl]")
    assert combinations(["a=1,2", "b=x,y"]) == [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]


def test_a_mistake_in_one_run_starts_none(folder):
    answer = sweep(subprocess.run, folder, "train.global_batch=2,0", timeout=120, check=False)
    assert answer.returncode == 2
    assert "train.global_batch" in answer.stderr
    assert not (folder / "runs").exists()


def spans(folder, names):
    """From the launch of each run to its end, by its own history."""
    histories = [list(read_json_lines(folder / "runs" / name / "history.jsonl")) for name in names]
    for history in histories:
        assert [record["event"] for record in history].count("launched") == 1  # each was trained once
    return [(history[0]["time"], history[-1]["time"]) for history in histories]


@pytest.mark.train
@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_keeps_to_its_bound(folder):
    """One at a time where nothing is said; with a bound of two what an earlier sweep left under way counts too."""
    settings = ("train.learning_rate=1e-4,2e-4,3e-4", "train.steps=20")
    first = sweep(subprocess.Popen, folder, *settings)
    assert first.stderr.readline().split() == ["rates-0", "train.learning_rate=1e-4", "started"]
    time.sleep(2)  # it looks every second whether another one may start
    first.send_signal(signal.SIGKILL)  # the sweep alone: the run goes on
    first.communicate()
    assert [path.name for path in (folder / "runs").glob("rates-*")] == ["rates-0"]

    options = ("--at-most", "2", "--json")
    done = sweep(subprocess.run, folder, *settings, *options, stdout=subprocess.PIPE, timeout=400, check=False)
    assert done.returncode == 0, done
    rows = json.loads(done.stdout)
    assert [(row["name"], row["state"]) for row in rows] == [(f"rates-{index}", "finished") for index in range(3)]
    assert len({row["loss"] for row in rows}) == 3
    assert "rates-0  train.learning_rate=1e-4  is under way" in done.stderr
    (began, ended), (other_began, other_ended), (last_began, _) = spans(folder, [row["name"] for row in rows])
    assert max(began, other_began) < min(ended, other_ended)  # two at once
    assert last_began >= min(ended, other_ended)  # and never three
    members = json.loads((folder / "runs" / "rates.sweep.json").read_text())
    assert members["runs"][1] == {"name": "rates-1", "settings": ["train.learning_rate=2e-4"]}
