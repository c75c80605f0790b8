"""Every rank reads different data, and what is read when does not depend on their number."""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.common.files import read_json_lines
from windlass.data import open_sequences
from windlass.plan import resolve
from windlass.spec import Run, parse_run
from windlass.trainer.batches import Batches
from windlass.trainer.checkpointing.tiers import Progress
from windlass.trainer.distributed.ranks import Ranks

GLOBAL_BATCH, STEPS = 12, 5


def reader(run: Run, rank: int, world_size: int) -> Batches:
    sequences = open_sequences(run, "train", tokenizer="tiny")
    assert sequences is not None
    alone: Any = None  # nothing is exchanged while reading
    ranks = Ranks(rank, world_size, rank, torch.device("cpu"), host=alone, saving=alone)
    rows = -(-run.train.global_batch // world_size)
    layout: Any = SimpleNamespace(micro=rows, num_micro=1)
    return Batches.for_training(sequences, run, ranks, layout, Progress(0, 0, None))


def ids_of(batches: Batches, step: int) -> list[str]:
    return [name for micro_batch in batches.read(step).micro_batches for name in micro_batch.ids]


def in_order(shares: list[list[str]]) -> list[str]:
    """The global batch that the ranks' shares were dealt from."""
    longest = max(map(len, shares))
    return [share[row] for row in range(longest) for share in shares if row < len(share)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_an_epoch_is_the_dataset(world_size: int, corpus: Path) -> None:
    run = resolve(parse_run(tiny_run(corpus, train__global_batch=GLOBAL_BATCH)))
    readers = [reader(run, rank, world_size) for rank in range(world_size)]
    count = readers[0].sequences.num_sequences
    assert count is not None
    assert count > 10 * GLOBAL_BATCH
    order: list[str] = []
    step = 0
    while len(order) < 2 * count:
        shares = [ids_of(one, step) for one in readers]
        assert len(set(itertools.chain(*shares))) == GLOBAL_BATCH or len(order) < count < len(order) + GLOBAL_BATCH
        order += in_order(shares)
        step += 1
    everything = {f"window:{index}" for index in range(count)}
    first, second = order[:count], order[count : 2 * count]
    assert set(first) == set(second) == everything
    assert len(first) == len(second) == len(everything)
    assert first != second, "a new epoch, a new order"
    assert order == alone_in_order(run, step)


@functools.cache
def alone(run_text: str, steps: int) -> tuple[str, ...]:
    one = reader(parse_run(yaml.safe_load(run_text)), 0, 1)
    return tuple(name for step in range(steps) for name in ids_of(one, step))


def alone_in_order(run: Run, steps: int) -> list[str]:
    return list(alone(json.dumps(run.model_dump(mode="json")), steps))


def note_ids(folder: Path, rank: int) -> None:
    """In a rank, before it trains: write down what it reads."""
    read = Batches.read

    def noted(self: Batches, step: int) -> Any:
        batch = read(self, step)
        ids = [one for micro_batch in batch.micro_batches for one in micro_batch.ids]
        with (folder / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "rank": rank, "ids": ids}) + "\n")
        return batch

    Batches.read = noted  # type: ignore[method-assign]


def read_by_ranks(folder: Path) -> dict[int, list[list[str]]]:
    """Step → the ids of each rank, as the ranks themselves wrote them down."""
    steps: dict[int, list[list[str]]] = defaultdict(list)
    for path in sorted(folder.glob("rank-*.jsonl")):
        for record in read_json_lines(path):
            steps[record["step"]].append(record["ids"])
    return dict(steps)


@pytest.mark.train
@pytest.mark.parametrize("source", ["jsonl", "stream"])
def test_real_ranks_share_the_data(
    source: str,
    sources: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """What processes trained on, as they wrote it down themselves."""
    orders = {}
    for ranks in (1, 2, 3):
        root = tmp_path / str(ranks)
        root.mkdir()
        run = tiny_run(Path("-"), train__steps=STEPS, train__global_batch=GLOBAL_BATCH)
        run["data"] = {**sources[source], "sequence_length": 64}
        result = train(root, run, ranks=ranks, prelude=functools.partial(note_ids, root))
        assert set(result.codes) == {0}, result.output
        steps = read_by_ranks(root)
        assert sorted(steps) == list(range(STEPS))
        assert all(len(shares) == ranks for shares in steps.values())
        orders[ranks] = [name for step in range(STEPS) for name in in_order(steps[step])]
        assert len(set(orders[ranks])) == len(orders[ranks]) == STEPS * GLOBAL_BATCH, "a sequence was read twice"
    assert orders[1] == orders[2] == orders[3]
