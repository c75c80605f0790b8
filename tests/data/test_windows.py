"""Windows partition the tokens, and any number of readers partition the windows in one order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import run_on
from windlass.data import Sequences, open_sequences
from windlass.data.build.cache import open_shards
from windlass.data.sources.source import local_source
from windlass.errors import UserError

GLOBAL_BATCH = 12


@pytest.fixture
def source(write_files: Callable[..., list[Path]]) -> str:
    return str(write_files(40, 30, 20)[0].parent)


def opened(source: str, part: str = "train", **data: object) -> Sequences:
    found = open_sequences(run_on(source, **data), part, tokenizer="tiny")  # type: ignore[arg-type]
    assert found is not None
    return found


def read(sequences: Sequences, steps: range, world: int) -> list[str]:
    """The ids of the sequences in global order, as `world` ranks read them."""
    ids: dict[tuple[int, int], str] = {}
    for rank in range(world):
        for step in steps:
            positions = [p for p in range(GLOBAL_BATCH) if p % world == rank]
            for position, sequence in zip(
                positions, sequences.batch(step, GLOBAL_BATCH, positions).sequences, strict=True
            ):
                ids[step, position] = sequence.id
    return [ids[key] for key in sorted(ids)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_read_the_dataset_once_in_one_order(source: str, world: int) -> None:
    sequences = opened(source)
    count = sequences.num_sequences
    assert count
    assert count > 3 * GLOBAL_BATCH
    steps = range(3 * count // GLOBAL_BATCH + 1)
    order = read(sequences, steps, world)
    assert order == read(sequences, steps, 1)
    epochs = [order[epoch * count : (epoch + 1) * count] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"window:{i}" for i in range(count))
    assert epochs[0] != epochs[1] != epochs[2]


def test_windows_are_the_token_stream(source: str) -> None:
    sequences = opened(source, shuffle=False)
    shards = open_shards(local_source(source, "text"), tokenizer="tiny")
    stream, starts = shards.read(0, shards.num_tokens)
    assert sequences.num_sequences == (shards.num_tokens - 1) // 16
    batch = sequences.batch(0, sequences.num_sequences, list(range(sequences.num_sequences)))
    assert batch.epoch == 1.0
    assert batch.state is None
    for number, sequence in enumerate(batch.sequences):
        assert sequence.tokens.dtype == np.int64
        assert sequence.tokens.tolist() == stream[number * 16 : number * 16 + 17].tolist()
        inside = starts[(starts >= number * 16) & (starts <= number * 16 + 16)] - number * 16
        assert sequence.document_starts.tolist() == inside.tolist()
    assert 0 in batch.sequences[0].document_starts


def test_positions_come_in_the_order_asked_for(source: str) -> None:
    sequences = opened(source)
    forth, back = sequences.batch(2, 12, [1, 5, 9]), sequences.batch(2, 12, [9, 5, 1])
    assert [sequence.id for sequence in forth.sequences] == [sequence.id for sequence in back.sequences][::-1]


def test_seeds_change_the_order(source: str) -> None:
    def first(seed: int) -> list[str]:
        sequences = open_sequences(run_on(source, seed=seed), "train", tokenizer="tiny")
        assert sequences
        return [sequence.id for sequence in sequences.batch(0, 8, list(range(8))).sequences]

    assert first(0) == first(0) != first(1)


def test_holdout_is_the_end_and_never_trained_on(source: str) -> None:
    total = opened(source).num_sequences
    assert total
    training, validation = opened(source, holdout=0.1), opened(source, "validation", holdout=0.1)
    assert validation.num_sequences == -(-total // 10)
    assert training.num_sequences == total - validation.num_sequences
    kept = [sequence.id for sequence in validation.batch(0, 4, [0, 1, 2, 3]).sequences]
    assert kept == [f"window:{training.num_sequences + i}" for i in range(4)]
    trained = set(read(training, range(5 * total // GLOBAL_BATCH), 1))
    assert trained == {f"window:{i}" for i in range(training.num_sequences)}
    assert opened(source, "validation", holdout=1e-9).num_sequences == 1


def test_no_validation_data(source: str) -> None:
    assert open_sequences(run_on(source), "validation", tokenizer="tiny") is None


def test_own_validation_source(source: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("It is a truth universally acknowledged " * 20)
    run = run_on(source, validation_source=str(other))
    validation = open_sequences(run, "validation", tokenizer="tiny")
    assert validation is not None
    assert "other.txt" in validation.description
    assert [sequence.id for sequence in validation.batch(1, 2, [0, 1]).sequences] == ["window:2", "window:3"]


def test_holdout_that_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("It is a truth universally acknowledged, that a single man")
    assert opened(str(path)).num_sequences == 1
    with pytest.raises(UserError, match="leaves nothing to train on"):
        opened(str(path), holdout=0.5)


def test_fewer_tokens_than_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Emma")
    with pytest.raises(UserError, match="fewer than one sequence of 16 needs"):
        opened(str(path))


def test_restore_changes_nothing(source: str) -> None:
    sequences = opened(source)
    before = read(sequences, range(5), 2)
    sequences.restore(3, None)
    assert read(sequences, range(5), 2) == before


def test_the_shipped_corpus() -> None:
    sequences = opened("corpus:austen", sequence_length=256, holdout=0.05)
    assert sequences.vocab_size == 1024
    assert sequences.description == "austen, 499,968 tokens, 1,953 sequences of 256"
