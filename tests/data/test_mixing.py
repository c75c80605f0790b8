"""Mixed sources keep their shares at every point, are read in their own order, and resume on any number of readers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.conftest import json_lines, run_on, texts
from windlass.data import Sequences, open_sequences
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_data
from windlass.data.inspecting import inspect_run
from windlass.data.sequences.mixing import LONGEST_CYCLE, Mixture, Shares, whole_counts
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.spec import Run, dump_run, parse_run

GLOBAL_BATCH = 6
WEIGHTS = (0.6, 0.3, 0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7))
@example([1, 1, 1, 1, 1, 1, 1])
@example([40, 1, 1, 39])
def test_every_prefix_holds_every_share_to_rounding(weights: list[int]) -> None:
    shares = Shares([float(one) for one in weights])
    total = sum(weights)
    had = Counter[int]()
    for number in range(1, 2 * shares.cycle + 3):
        owner = shares.owner(number - 1)
        assert shares.before(owner, number - 1) == had[owner]
        had[owner] += 1
        for source, weight in enumerate(weights):
            assert abs(had[source] - Fraction(number * weight, total)) < 1
            assert shares.before(source, number) == had[source]


def test_weights_become_whole_numbers() -> None:
    assert whole_counts([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_counts([3.0, 1.5]) == [2, 1]
    assert whole_counts([5.0]) == [1]
    rounded = whole_counts([0.123456789, 0.876543211])
    assert sum(rounded) == LONGEST_CYCLE
    assert abs(rounded[0] / LONGEST_CYCLE - 0.123456789) < 1 / LONGEST_CYCLE


@pytest.fixture
def sources(tmp_path: Path, tiny: Tokenizer) -> list[dict[str, Any]]:
    """Shards, a file of another size, and a small stream."""
    for number, count in enumerate((60, 25)):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(texts(count, seed=number)))
    tokenize([FileSource((tmp_path / "0.jsonl",), "text", "zero")], tmp_path / "shards", tiny, workers=1)
    for number in range(3):
        (tmp_path / f"stream-{number}.jsonl").write_bytes(json_lines(texts(4, seed=10 + number)))
    return [
        {"source": str(tmp_path / "shards"), "weight": WEIGHTS[0]},
        {"source": str(tmp_path / "1.jsonl"), "weight": WEIGHTS[1]},
        {"source": "hf:json", "weight": WEIGHTS[2], "files": [str(p) for p in sorted(tmp_path.glob("stream-*"))]},
    ]


def mixed(sources: list[dict[str, Any]], **data: Any) -> Run:
    values = {"sources": sources, "sequence_length": 16, **data}
    return parse_run(
        {
            "name": "mixed",
            "model": {"preset": "any"},
            "data": values,
            "train": {"steps": 50, "global_batch": GLOBAL_BATCH},
        }
    )


def opened(run: Run, part: Any = "train") -> Mixture:
    found = open_sequences(run, part, tokenizer="tiny")
    assert isinstance(found, Mixture)
    return found


class Readers:
    """Ranks of one world, and the state they would save together."""

    def __init__(self, run: Run, world: int) -> None:
        self.readers: list[Sequences] = [opened(run) for _ in range(world)]
        self.state: dict[str, Any] | None = None

    def restore(self, step: int, state: dict[str, Any] | None) -> None:
        for reader in self.readers:
            reader.restore(step, json.loads(json.dumps(state)))

    def step(self, step: int) -> list[Any]:
        found: dict[int, Any] = {}
        merged: dict[str, dict[str, Any]] = {}
        world = len(self.readers)
        for rank, reader in enumerate(self.readers):
            positions = list(range(rank, GLOBAL_BATCH, world))
            batch = reader.batch(step, GLOBAL_BATCH, positions)
            for position, one in zip(positions, batch.sequences, strict=True):
                found[position] = (one.id, one.tokens.tolist(), one.document_starts.tolist())
            for key, lanes in (batch.state or {}).items():
                for lane, place in lanes.items():
                    assert merged.setdefault(key, {}).setdefault(lane, place) == place
        self.state = merged or None
        return [found[position] for position in sorted(found)]


def whole(run: Run, steps: int) -> tuple[list[list[Any]], list[Any]]:
    readers = Readers(run, 1)
    read, states = [], []
    for step in range(steps):
        read.append(readers.step(step))
        states.append(readers.state)
    return read, states


def owners(read: list[list[Any]]) -> list[list[int]]:
    return [[int(name.split("/")[0]) for name, _, _ in step] for step in read]


@pytest.mark.parametrize("kinds", [(0, 1), (0, 1, 2), (2, 0)])
def test_shares_and_order_of_each_source(sources: list[dict[str, Any]], kinds: tuple[int, ...]) -> None:
    """After every step each source has its share to rounding; windows come in the order their source has alone."""
    chosen = [sources[kind] for kind in kinds]
    read, _ = whole(mixed(chosen), 60)
    total = sum(one["weight"] for one in chosen)
    had = Counter[int]()
    for number, step in enumerate(owners(read), start=1):
        had.update(step)
        for place, one in enumerate(chosen):
            assert abs(had[place] - number * GLOBAL_BATCH * one["weight"] / total) < 1
    for place, one in enumerate(chosen):
        if one["source"] == "hf:json":
            continue
        alone = open_sequences(run_on(one["source"]), "train", tokenizer="tiny")
        assert alone
        count = had[place]
        expected = [s.id for s in alone.batch(0, count, list(range(count))).sequences]
        names = [name.split("/", 1)[1] for step in read for name, _, _ in step if int(name.split("/")[0]) == place]
        # Where the turns move over the positions, a step's own windows may stand in another order within the step.
        assert sorted(names) == sorted(expected)
        if len(kinds) == 2 and 2 not in kinds:
            assert names == expected


def test_small_sources_go_through_epochs_of_their_own(sources: list[dict[str, Any]]) -> None:
    run = mixed(sources[:2])
    mixture = opened(run)
    small = mixture.parts[1]
    assert small.num_sequences
    steps = 3 * small.num_sequences  # about five epochs of the small one
    names = [
        sequence.id
        for step in range(steps)
        for sequence in mixture.batch(step, GLOBAL_BATCH, list(range(GLOBAL_BATCH))).sequences
        if sequence.id.startswith("1/")
    ]
    count = small.num_sequences
    epochs = [names[begin : begin + count] for begin in range(0, len(names) - count, count)]
    assert len(epochs) >= 4
    for epoch in epochs:
        assert sorted(epoch) == sorted(f"1/window:{i}" for i in range(count))
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # a new order each time


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(0, 1), (0, 1, 2)])
def test_any_number_of_readers_and_any_resume(sources: list[dict[str, Any]], kinds: tuple[int, ...]) -> None:
    run = mixed([sources[kind] for kind in kinds])
    expected, states = whole(run, 30)
    for world in (2, 3, 4):
        readers = Readers(run, world)
        for step in range(12):
            assert readers.step(step) == expected[step]
            assert readers.state == states[step]
    state: Any = None
    step = 0
    for world in (2, 1, 4, 3, 6, 1):
        readers = Readers(run, world)
        readers.restore(step, state)
        for _ in range(4):
            assert readers.step(step) == expected[step]
            state = readers.state
            step += 1


def test_every_lane_of_a_mixed_stream_is_read(sources: list[dict[str, Any]]) -> None:
    """Also where the cycle of the sources divides the batch: turns move over the positions."""
    pair = [{**sources[0], "weight": 2}, {**sources[2], "weight": 1}]
    read, _ = whole(mixed(pair), 60)
    lanes = Counter(name.split(":")[1] for step in read for name, _, _ in step if name.startswith("1/lane"))
    assert sorted(lanes) == ["0", "1", "2"]
    assert max(lanes.values()) - min(lanes.values()) <= 2


def test_a_stream_without_saved_places_is_read_up_to_the_step(sources: list[dict[str, Any]]) -> None:
    run = mixed(sources)
    expected, _ = whole(run, 9)
    late = Readers(run, 2)
    assert late.step(8) == expected[8]


def test_holdout_of_every_source(sources: list[dict[str, Any]]) -> None:
    run = mixed(sources[:2], holdout=0.2)
    held, training = opened(run, "validation"), opened(run)
    assert held.num_sequences
    kept = {sequence.id for sequence in held.batch(0, held.num_sequences, list(range(held.num_sequences))).sequences}
    assert len(kept) == held.num_sequences  # none twice
    read = {sequence.id for step in range(60) for sequence in training.batch(step, 6, list(range(6))).sequences}
    assert not kept & read
    assert held.batch(0, 1, [0]).sequences[0].id.split("/")[0] in "01"


def test_what_a_run_reads_of_each(sources: list[dict[str, Any]]) -> None:
    found = inspect_run(mixed(sources), tokenizer="tiny")
    assert [one.sequences_read for one in found] == [180, 90, 30]
    assert [one.num_sequences is None for one in found] == [False, False, True]
    assert found[0].epochs == pytest.approx(180 / (found[0].num_sequences or 0))


def test_mistakes(sources: list[dict[str, Any]], tmp_path: Path, tiny: Tokenizer) -> None:
    def fails(values: list[dict[str, Any]], **data: Any) -> str:
        def attempt() -> None:
            run = mixed(values, **data)
            check_data(run)
            opened(run)

        with pytest.raises(UserError) as caught:
            attempt()
        assert caught.value.exit_code == 2
        return str(caught.value)

    assert "not both" in fails(sources, source="corpus:austen")
    assert "greater than 0" in fails([{**sources[0], "weight": 0}])
    assert "too small beside the others" in fails([{**sources[0], "weight": 1e-9}, sources[1]])
    assert "there is no file or folder" in fails([sources[0], {"source": str(tmp_path / "none.jsonl")}])
    assert "unknown key data.sources.0.wieght; did you mean data.sources.0.weight?" in fails(
        [{"source": "a", "wieght": 1}]
    )
    assert "cannot be taken from the stream" in fails(sources, holdout=0.1)
    other = tmp_path / "other-tokenizer"
    tiny.save(other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|begin|>"}))
    from windlass.data.tokenizers.tokenizer import load_tokenizer

    tokenize(
        [FileSource((tmp_path / "1.jsonl",), "text", "one")], tmp_path / "else", load_tokenizer(str(other)), workers=1
    )
    assert "different tokenizers" in fails([sources[0], {"source": str(tmp_path / "else")}])


def test_the_run_file_can_be_read_again(sources: list[dict[str, Any]], load: Callable[[str], Run]) -> None:
    run = mixed(sources)
    assert load(dump_run(run)) == run


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Run]:
    from windlass.spec import load_run

    def from_text(text: str) -> Run:
        (tmp_path / "run.yaml").write_text(text)
        return load_run(tmp_path / "run.yaml")

    return from_text
