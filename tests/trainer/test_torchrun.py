"""The front door: `torchrun -m windlass.trainer RUN.yaml [section.key=value ...]`, as every target calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result
from windlass.runfolder import RunFolder

pytestmark = [pytest.mark.train, pytest.mark.slow]


def test_torchrun_trains(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_run(corpus)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "windlass.trainer", "mine.yaml", "train.steps=4", "checkpoint.every=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("WINDLASS_RUNS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = Result(RunFolder(tmp_path / "runs" / "mine"), [], done.stdout)
    assert list(result.losses) == [1, 2, 3, 4]
    assert result.events("started")[0]["world_size"] == 2
    assert result.folder.load_run().train.steps == 4
    assert result.folder.rank_log(1).exists()


def test_sigterm_while_python_still_imports(corpus: Path, tmp_path: Path) -> None:
    """The import of torch takes seconds; what comes in that time is heard, too."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_run(corpus)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("WINDLASS_RUNS", None)
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "windlass.trainer", "mine.yaml"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    for line in process.stderr:
        if "torch" in line:  # a part of torch has been imported: the rest takes long enough
            break
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    said = process.stderr.read()
    assert process.wait() == 75, said[-2000:]
    assert time.monotonic() - told < 60
    result = Result(RunFolder(tmp_path / "runs" / "mine"), [], "")
    assert [event["step"] for event in result.events("preempted")] == [0]
