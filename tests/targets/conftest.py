"""A local target in a folder of its own, and runs whose trainer is the stand-in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.targets.local_runs import Local
from windlass.spec import parse_run
from windlass.targets.launch.machine import Machine


@pytest.fixture
def machine():
    return Machine(gpus=(), cores=2, memory_bytes=2**33)


@pytest.fixture
def make_run():
    def make(name="r", **sections):
        values = {"name": name, "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}}
        values["train"] = {"steps": 20, **sections.pop("train", {})}
        values["checkpoint"] = {"every": 5, **sections.pop("checkpoint", {})}
        values["resources"] = {"gpus_per_node": 0, "processes_per_node": 2, **sections.pop("resources", {})}
        return parse_run({**values, **sections})

    return make


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parents[2])])))
    return tmp_path


@pytest.fixture
def local(in_tmp, machine):
    return Local(machine, torchrun=True)


@pytest.fixture
def alone(in_tmp, machine):
    return Local(machine, torchrun=False)
