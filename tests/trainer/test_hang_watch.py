"""A run whose steps stop coming is noticed by its own rhythm; the rank that is behind, or slow, is named."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import start
from windlass.common.files import read_json_lines
from windlass.goodput.accounting import account, read_metrics
from windlass.runfolder import RunFolder, steps_of
from windlass.trainer.callbacks.hang import FIRST_S, SHORTEST_S, Rhythm, behind
from windlass.trainer.callbacks.stragglers import compare
from windlass.trainer.distributed.peers import Standing

HERE = socket.gethostname()


def rhythm_of(*seconds: float, settle_every: int = 1) -> tuple[Rhythm, float]:
    rhythm, now = Rhythm(settle_every=settle_every), 1000.0
    rhythm.begin_step(now)
    for duration in seconds:
        now += duration
        rhythm.begin_step(now)
    return rhythm, now


def test_the_limit_comes_from_the_steps() -> None:
    rhythm, now = rhythm_of(200.0, *[1.0] * 20)
    assert rhythm.limit_s() == SHORTEST_S, "the first step compiled: it does not count"
    assert rhythm.overdue_s(now + 59) is None
    assert rhythm.overdue_s(now + 61) == 61
    slow, _ = rhythm_of(200.0, *[30.0] * 20)
    assert slow.limit_s() == 300.0
    uneven, _ = rhythm_of(5.0, *[1.0] * 20, 90.0, *[1.0] * 20)
    assert uneven.limit_s() == 180.0, "it took so long before, and went on"


def test_what_was_never_seen_has_time() -> None:
    first, now = rhythm_of()
    assert first.limit_s() == FIRST_S
    few, _ = rhythm_of(5.0, 1.0, 1.0, settle_every=10)
    assert few.limit_s() == FIRST_S, "the GPU was not waited for yet"
    rhythm, now = rhythm_of(5.0, *[1.0] * 20)
    rhythm.begin_pause(now)
    assert rhythm.overdue_s(now + 1000) is None, "a save or a validation"
    rhythm.begin_step(now + 1000)
    rhythm.begin_pause(now + 1001)
    assert rhythm.limit_s() == 3000.0
    rhythm.begin_step(now + 1002)
    assert rhythm.limit_s() == SHORTEST_S, "a pause is no step"
    rhythm.forgive(now + 5000)
    assert rhythm.overdue_s(now + 5059) is None, "a suspended job"
    fixed = Rhythm(settle_every=10, fixed_s=3.0)
    fixed.begin_step(0.0)
    assert fixed.limit_s() == FIRST_S, "the first step compiles, whatever is asked for"
    fixed.begin_step(100.0)
    assert fixed.limit_s() == 3.0


def standing(rank: int, *, begun: int = 10, silent: float = 0.5, times: dict[str, Any] | None = None) -> Standing:
    state = {"point": "step.loss", "step": 5, "collectives": {"gloo:0": begun}}
    return Standing(rank, f"host-{rank // 2}", 100 + rank, silent, state, times or {})


def test_who_is_behind() -> None:
    rank, why = behind([standing(0), standing(1), standing(2, begun=9), standing(3)])
    assert rank == 2
    assert "rank 2 on host-1 is at step.loss of step 5, 9 collectives begun" in why
    assert behind([standing(0), standing(1, silent=40), standing(2, begun=9)])[0] == 1, "stopped: it cannot say more"
    assert behind([standing(0), standing(1)])[0] is None
    assert behind([standing(0)])[0] == 0


@pytest.mark.parametrize("world_size", [2, 100])
def test_the_slow_rank_comes_last(world_size: int) -> None:
    def came(rank: int) -> dict[str, Any]:
        late = 0.004 if rank == 1 else 0.0001 * (rank % 3)
        collectives = {f"gloo:0:{number}": 100.0 + number + late for number in range(8)}
        return {"step": 7, "steps": 50, "step_s": 0.1, "data_s": 0.0, "collectives": 10.0, "came": collectives}

    told = compare([standing(rank, times=came(rank)) for rank in range(world_size)])
    assert told is not None
    assert told["slow"] == [1]
    assert told["held_up_s"] == pytest.approx(50 * 10 * 0.004, rel=0.1)
    assert len(told["ranks"]) == (2 if world_size == 2 else 8)
    late_message = [standing(0, times=came(0)), standing(1, times={**came(1), "step": 6})]
    assert compare(late_message) is None
    assert compare([standing(0), standing(1)]) is None


@pytest.mark.train
def test_a_rank_that_waits_elsewhere_is_named_with_its_stack(corpus: Path, tmp_path: Path) -> None:
    """It lives, and its watch answers: only its own steps do not come."""
    run = tiny_run(corpus, train__steps=60, parallel={"hang_seconds": 6.0})
    job = start(tmp_path, run, ranks=2, faults="sleep:rank=1,step=20,seconds=300")
    result = job.result()
    assert result.codes == [75, 75], result.output
    (hang,) = result.events("hang")
    assert (hang["rank"], hang["host"], hang["limit_s"]) == (1, HERE, 6.0)
    assert "rank 1 on" in hang["why"]
    assert "the others wait in gloo" in hang["why"]
    mine, other = ((result.folder.logs / f"stacks-rank-000{rank}.txt").read_text() for rank in (0, 1))
    assert "loop.py" in mine, "where the first rank waits"
    assert re.search(r"faults\.py.* in reach", other), other


@pytest.mark.train
def test_a_stopped_rank_is_named_and_the_run_goes_on(corpus: Path, tmp_path: Path) -> None:
    """Under the real supervisor, which judges the hang and starts the ranks again."""
    run = tiny_run(corpus, train__steps=40, checkpoint__every=5, parallel={"hang_seconds": 6.0})
    run |= {"name": "mine", "resources": {"gpus_per_node": 0, "processes_per_node": 2, "threads_per_process": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "windlass.cli.main", "run", "mine.yaml", "--yes"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WINDLASS_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        [*command, "--inject", "stop:rank=1,step=20"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 on" in done.stdout
    folder = RunFolder(tmp_path / "runs" / "mine")
    history = list(read_json_lines(folder.history))
    (hang,) = [record for record in history if record["event"] == "hang"]
    assert (hang["rank"], hang["host"]) == (1, HERE)
    assert "has sent nothing" in hang["why"]
    (restart,) = [record for record in history if record["event"] == "restart"]
    assert restart["class"] == "hang"
    assert "does not answer: T (stopped)" in (folder.logs / "stacks-rank-0001.txt").read_text()
    assert max(steps_of(folder)) == 40
    told = account(history, read_metrics(folder.metrics))
    assert told.attempts[0].parts["hang"] > 4.0


@pytest.mark.train
def test_a_rank_that_is_slow_is_named(corpus: Path, tmp_path: Path) -> None:
    run = tiny_run(corpus, train__steps=100_000, checkpoint__every=100_000)
    job = start(tmp_path, run, ranks=2, prelude=slow_rank_1, timeout=240)

    def comparisons() -> list[dict[str, Any]]:
        return [record for record in read_json_lines(job.folder.metrics) if record["kind"] == "ranks"]

    job.wait_for(lambda: any(record["slow"] == [1] for record in comparisons()), interval=0.2)
    job.signal(0, signal.SIGTERM)
    assert job.result().codes == [75, 75]
    named = next(record for record in comparisons() if record["slow"] == [1])
    worst = named["ranks"][1]
    assert worst["host"] == HERE
    assert 0.02 < worst["behind_s"] <= worst["step_s"]
    assert named["held_up_s"] > 0


def slow_rank_1(rank: int) -> None:
    from windlass.trainer.callbacks import stragglers
    from windlass.trainer.step import Stepper

    stragglers.EVERY_S, stragglers.NOTICE_S = 1.0, 3.0
    whole: Callable[..., Any] = Stepper.backward

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.08 if rank == 1 else 0.0)
        return whole(*args, **options)

    Stepper.backward = late  # type: ignore[method-assign]
