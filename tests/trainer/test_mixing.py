"""Real ranks on mixed sources and on shards in an object store: exact shares, one order, bitwise resumes."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.s3_server import Fault, FaultyS3
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, assert_same_on_other_ranks, train
from tests.trainer.test_data_order import in_order, note_ids, read_by_ranks

pytestmark = pytest.mark.train

GLOBAL_BATCH, STEPS = 8, 12
SHARES = {"shards": 5, "text": 2, "stream": 1}


@pytest.fixture
def mixed(sources: dict[str, dict[str, Any]], texts: list[str], tmp_path: Path) -> dict[str, Any]:
    """Shards, a text so small that it is read several times, and a stream."""
    small = tmp_path / "small.txt"
    small.write_text(" ".join(texts[:3]))
    stream = dict(sources["stream"])
    window = stream.pop("shuffle_window")
    data = [
        {**sources["shards"], "weight": SHARES["shards"]},
        {"source": str(small), "weight": SHARES["text"]},
        {**stream, "weight": SHARES["stream"]},
    ]
    run = tiny_run(
        Path("-"),
        train__steps=STEPS,
        train__global_batch=GLOBAL_BATCH,
        checkpoint__every=2,
        checkpoint__background=False,
    )
    run["data"] = {"sources": data, "sequence_length": 32, "shuffle_window": window}
    return run


def test_shares_are_exact_on_any_number_of_ranks(mixed: dict[str, Any], tmp_path: Path) -> None:
    orders = {}
    for ranks in (1, 2, 3):
        root = tmp_path / str(ranks)
        root.mkdir()
        result = train(root, mixed, ranks=ranks, prelude=functools.partial(note_ids, root))
        assert set(result.codes) == {0}, result.output
        steps = read_by_ranks(root)
        orders[ranks] = [in_order(steps[step]) for step in range(STEPS)]
    assert orders[1] == orders[2] == orders[3]
    had = Counter[str]()
    for number, step in enumerate(orders[1], start=1):
        had.update(name.split("/")[0] for name in step)
        for place, share in enumerate(SHARES.values()):
            assert abs(had[str(place)] - number * GLOBAL_BATCH * share / sum(SHARES.values())) < 1
    assert had == {"0": 60, "1": 24, "2": 12}
    small = Counter(name for step in orders[1] for name in step if name.startswith("1/"))
    assert max(small.values()) - min(small.values()) <= 1  # epoch after epoch, each window as often as the others
    assert min(small.values()) >= 2


def test_resumes_in_a_row(mixed: dict[str, Any], tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    whole = undisturbed(mixed)
    faults = "kill:rank=1,step=4;kill:rank=0,step=7;kill:rank=1,step=11"
    for attempt in (1, 2, 3):
        killed = train(tmp_path, mixed, ranks=2, faults=faults, attempt=attempt)
        assert -9 in killed.codes, killed.output
    last = train(tmp_path, mixed, ranks=2, faults=faults, attempt=4)
    assert last.codes == [0, 0], last.output
    assert last.losses == whole.losses
    assert last.grad_norms == whole.grad_norms


@pytest.mark.campaign
@pytest.mark.campaign_only  # test_resume_sources.py does it with a stream
def test_resumes_on_other_ranks(mixed: dict[str, Any], tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    assert_same_on_other_ranks(tmp_path, mixed, undisturbed(mixed))


def test_other_weights_are_another_run(mixed: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint of one mixture is not gone on from with another."""
    train(tmp_path, mixed, ranks=1, overrides=["train.steps=4"])
    changed = json.loads(json.dumps(mixed))
    changed["data"]["sources"][0]["weight"] = 6
    result = train(tmp_path, changed, ranks=1, attempt=2)
    assert result.codes == [2], result.output
    assert "other data or another order" in result.output


def in_environment(values: dict[str, str], rank: int) -> None:
    os.environ.update(values)


def test_shards_in_a_store_train_as_shards_here(
    sources: dict[str, dict[str, Any]],
    tmp_path: Path,
    undisturbed: Callable[..., Result],
    s3: FaultyS3,
) -> None:
    """Bitwise the same losses, through requests that fail and a kill."""
    from windlass.store import open_store

    store = open_store("s3://bucket/shards")
    folder = Path(sources["shards"]["source"])
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path, path.relative_to(folder).as_posix())
    run = tiny_run(Path("-"), train__steps=8, checkpoint__every=2, checkpoint__background=False)
    run["data"] = {**sources["shards"], "sequence_length": 32}
    whole = undisturbed(run)
    run["data"] = {"source": "s3://bucket/shards", "sequence_length": 32}
    s3.inject(*(Fault(kind, method="GET", times=2) for kind in ("500", "SlowDown", "truncated", "dropped")))
    prelude = functools.partial(in_environment, s3.environment)
    killed = train(tmp_path, run, ranks=2, faults="kill:rank=1,step=5", prelude=prelude)
    assert -9 in killed.codes, killed.output
    last = train(tmp_path, run, ranks=2, attempt=2, prelude=prelude)
    assert last.codes == [0, 0], last.output
    assert last.losses == whole.losses
    assert sum(fault.met for fault in s3.faults) == 8


def test_bad_mixtures_cost_nothing(mixed: dict[str, Any], tmp_path: Path) -> None:
    for change, message in (
        ({"weight": 0}, "data.sources.1.weight: input should be greater than 0"),
        ({"source": str(tmp_path / "gone.jsonl")}, "there is no file or folder"),
        ({"weight": 1e-9}, "too small beside the others"),
    ):
        run = json.loads(json.dumps(mixed))
        run["data"]["sources"][1] |= change
        result = train(tmp_path / "bad", run, ranks=2)
        assert result.codes == [2, 2], result.output
        assert result.output.count(message) == 1
        assert not result.folder.path.exists()
