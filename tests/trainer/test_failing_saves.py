"""A save that fails: training goes on or stops with a clear error, and older checkpoints stay whole."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, resume, train
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train


def steps_left(result: Result) -> list[int]:
    """All checkpoint folders there are, each proven whole."""
    found = CheckpointFolder(result.folder.checkpoints).all()
    assert not [damage for one in found for damage in one.damages()]
    return [one.step for one in found]


@pytest.fixture(scope="module")
def checkpoint_size(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    result = train(tmp_path_factory.mktemp("size"), disk_run(corpus, train__steps=2), ranks=2)
    (checkpoint,) = CheckpointFolder(result.folder.checkpoints).all()
    return checkpoint.size_on_disk()


def disk_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    return tiny_run(corpus, model={"preset": "llama3.2-tiny", "config": shape}, **changes)


@pytest.mark.parametrize("background", [True, False])
def test_disk_full_during_a_save(
    background: bool, small_disk: Callable[[int], Path], checkpoint_size: int, corpus: Path
) -> None:
    """Room for one and a half: step 3 fits, step 6 does not, and the last one must."""
    root = small_disk(checkpoint_size * 3 // 2)
    run = disk_run(corpus, train__steps=9, checkpoint={"every": 3, "keep": 1, "background": background})
    result = train(root, run, ranks=2)
    assert result.codes == [1, 1], result.output
    assert list(result.losses) == list(range(1, 10)), "training went on after the first failure"
    assert [event["step"] for event in result.events("checkpoint-failed")] == [6, 9]
    assert "No space left" in result.events("checkpoint-failed")[0]["error"]
    assert result.output.count("error: the checkpoint of step 9 could not be written") == 1
    assert "make room" in result.output
    assert steps_left(result) == [3]
    assert json.loads(result.folder.rank_error(0).read_text())["retry"] is False


def test_a_full_disk_made_free_again(small_disk: Callable[[int], Path], checkpoint_size: int, corpus: Path) -> None:
    """After room was made the run goes on from what it has, to the same end."""
    root = small_disk(checkpoint_size * 3 // 2)
    run = disk_run(corpus, train__steps=9, checkpoint={"every": 3, "keep": 1})
    failed = train(root, run, ranks=2)
    subprocess.run(["mount", "-o", f"remount,size={checkpoint_size * 4}", str(root)], check=True)
    resumed = resume(root, run, ranks=2, most=1)
    assert resumed.events("resumed")[0]["step"] == 3
    assert steps_left(resumed) == [9]
    assert resumed.losses == failed.losses


def limit_files(limited: int, size: int, rank: int) -> None:
    """In a rank, before it trains: files of it cannot grow beyond `size` bytes."""
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("rank", campaign([1, 0], always=1))
def test_one_rank_cannot_write(rank: int, corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, train__steps=6, checkpoint={"every": 3})
    result = train(tmp_path, run, ranks=2, prelude=functools.partial(limit_files, rank, 100_000))
    assert result.codes == [1, 1], result.output
    assert [event["step"] for event in result.events("checkpoint-failed")] == [3, 6]
    assert f"rank {rank}" in result.events("checkpoint-failed")[0]["error"]
    assert "File too large" in result.events("checkpoint-failed")[0]["error"]
    assert steps_left(result) == []
    resumed = resume(tmp_path, run, ranks=2, most=1)
    assert steps_left(resumed) == [3, 6]


def fill_before(folder: Path, rank: int) -> None:
    """In rank 0, before it trains: the disk is full from step 2 on until step 5 has begun."""
    if rank:
        return
    from windlass.trainer.distributed.faults import Faults

    reach = Faults.reach
    ballast = folder / "ballast"

    def reached(self: Faults, point: str, step: int) -> bool:
        if (point, step) == ("step.begin", 2):
            handle = os.open(ballast, os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while True:
                    os.write(handle, bytes(4096))
            os.close(handle)
        if (point, step) == ("step.begin", 5):
            ballast.unlink()
        return reach(self, point, step)

    Faults.reach = reached  # type: ignore[method-assign]


def test_metrics_wait_for_a_disk_that_is_full_for_a_while(
    small_disk: Callable[[int], Path], checkpoint_size: int, corpus: Path
) -> None:
    root = small_disk(checkpoint_size * 4)
    run = disk_run(corpus, train__steps=6, checkpoint={"every": 100})
    result = train(root, run, ranks=2, prelude=functools.partial(fill_before, root))
    assert result.codes == [0, 0], result.output
    assert list(result.losses) == [1, 2, 3, 4, 5, 6]
