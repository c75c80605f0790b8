"""The command line in a folder of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from windlass.cli.main import run_command


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def windlass(tmp_path, monkeypatch, capfd):
    """Run one command in-process; nothing of it leaves tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)

    def run(*arguments):
        capfd.readouterr()
        code = run_command([str(one) for one in arguments])
        out, err = capfd.readouterr()
        return Outcome(int(code), out, err)

    return run


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {preset: llama-tiny}\n"
        "data: {source: 'corpus:austen', sequence_length: 32}\n"
        "train: {steps: 6, global_batch: 4, precision: fp32}\n"
        "resources: {gpus_per_node: 0, processes_per_node: 2}\n"
        "checkpoint: {every: 2}\n"
    )
    return path
