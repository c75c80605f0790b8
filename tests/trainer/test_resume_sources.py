"""Three resumes in a row, bitwise, whatever the data comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, assert_same_on_other_ranks, train

pytestmark = pytest.mark.train

SOURCES = ("stream", "jsonl", "parquet", "shards", "text", "austen")


def run_on(source: dict[str, Any]) -> dict[str, Any]:
    """Saves are waited for, so that it is known where each resume begins."""
    run = tiny_run(Path("-"), train__steps=12, checkpoint__every=2, checkpoint__background=False)
    run["data"] = {**source, "sequence_length": 32}
    return run


@pytest.mark.parametrize("name", campaign(SOURCES, always=1))
def test_resumes_in_a_row(
    name: str, sources: dict[str, dict[str, Any]], tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    run = run_on(sources[name])
    whole = undisturbed(run)
    faults = "kill:rank=1,step=4;kill:rank=0,step=7;kill:rank=1,step=11"
    for attempt in (1, 2, 3):
        killed = train(tmp_path, run, ranks=2, faults=faults, attempt=attempt)
        assert -9 in killed.codes, killed.output
    last = train(tmp_path, run, ranks=2, faults=faults, attempt=4)
    assert last.codes == [0, 0], last.output
    assert [event["step"] for event in last.events("resumed")] == [2, 6, 10]
    assert [event["attempt"] for event in last.events("resumed")] == [2, 3, 4]
    assert last.losses == whole.losses
    assert last.grad_norms == whole.grad_norms


def test_a_stream_goes_on_with_other_ranks(
    sources: dict[str, dict[str, Any]], tmp_path: Path, undisturbed: Callable[..., Result]
) -> None:
    """Lanes go to other readers: 2 ranks, then 3, then 1."""
    run = run_on(sources["stream"])
    assert_same_on_other_ranks(tmp_path, run, undisturbed(run))
