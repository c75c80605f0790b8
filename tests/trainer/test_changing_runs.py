"""A run goes on with another learning rate or batch, and branches; the rest of it is as if nothing had changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, train
from windlass.common.files import read_json_lines
from windlass.data.build.tokenizing import tokenize
from windlass.data.sequences.windows import Windows
from windlass.data.sources.source import source_named
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.spec import parse_run
from windlass.trainer.batches import Batches
from windlass.trainer.checkpointing.tiers import Progress
from windlass.trainer.distributed.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def windows(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Windows:
    from windlass.data.shards.folder import TokenShards

    folder = tmp_path_factory.mktemp("shards") / "shards"
    tokenize([source_named(str(corpus))], folder, load_tokenizer("tiny"), workers=1)
    return Windows.whole(TokenShards.open(folder), "toy", 32).shuffled(5)


@given(
    batches=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_the_order_goes_on_whatever_the_batches_are(
    batches: list[tuple[int, int, int]], windows: Windows, corpus: Path
) -> None:
    """(steps, global batch, ranks) one after the other read the sequences in the one order of the data, each once."""
    position, read = Progress(0, 0, None), []
    for steps, global_batch, world_size in batches:
        run = parse_run({**tiny_run(corpus, train__global_batch=global_batch), "name": "r"})
        rows = -(-global_batch // world_size)
        layout: Any = SimpleNamespace(micro=rows, num_micro=1)
        shares = [
            Batches.for_training(windows, run, Ranks(rank, world_size, 0, CPU, None, None), layout, position)  # type: ignore[arg-type]
            for rank in range(world_size)
        ]
        for step in range(position.step, position.step + steps):
            ids = [share.read(step).micro_batches[0].ids for share in shares]
            read += [ids[place % world_size][place // world_size] for place in range(global_batch)]
        position = Progress(position.step + steps, 0, None, sequences=position.sequences + steps * global_batch)
    assert read == [f"window:{windows.number_at(index)}" for index in range(position.sequences)]


@pytest.mark.train
def test_a_run_is_steered_and_branched(corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    whole = undisturbed(tiny_run(corpus, train__steps=8), ranks=2)
    base = tiny_run(corpus, train__steps=8, name="base")
    assert train(tmp_path, base, ranks=2, overrides=["checkpoint.keep=5"]).codes == [0, 0]

    # A branch with the settings of its origin goes on as that did, to the last bit, also on other ranks.
    branch = tiny_run(corpus, train__steps=8, checkpoint__branch_from="base@4", name="branch")
    same = train(tmp_path, branch, ranks=2)
    assert same.codes == [0, 0], same.output
    assert same.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    history = list(read_json_lines(same.folder.history))
    assert next(record for record in history if record["event"] == "branched")["source"] == "base"
    assert sorted(checkpoint.name for checkpoint in (tmp_path / "runs" / "base" / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]

    # The branch goes on with a lower learning rate and a smaller batch; both are in its history.
    steered = train(tmp_path, branch, ranks=1, overrides=["steps=11", "learning_rate=1e-5", "global_batch=3"])
    assert steered.codes == [0], steered.output
    assert sorted(steered.losses) == list(range(5, 12))
    changed = [record for record in read_json_lines(steered.folder.history) if record["event"] == "settings-changed"]
    assert changed[-1]["changes"]["train.global_batch"] == [8, 3]
    assert changed[-1]["changes"]["train.learning_rate"] == [1e-3, 1e-5]

    # Other data begins at its beginning; another model is refused; a checkpoint that is not there is named.
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text() * 2)
    moved = train(tmp_path, {**branch, "name": "moved", "data": {**branch["data"], "source": str(other)}}, ranks=1)
    assert moved.codes == [0], moved.output
    (event,) = [record for record in read_json_lines(moved.folder.history) if record["event"] == "branched"]
    assert "other data, from its beginning" in event["data"]
    wrong = {**branch, "name": "wrong", "checkpoint": {"every": 4, "branch_from": "base@5"}}
    refused = train(tmp_path, wrong, ranks=1)
    assert refused.codes == [2]
    assert "no complete checkpoint of step 5" in refused.output
