"""A stream reads the same on any readers and after any resumes, and ends with an error where it cannot read."""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.conftest import run_on, texts
from windlass.data import Sequence, Sequences, open_sequences
from windlass.data.sequences.stream import Stream
from windlass.data.sources.hub import HubFiles
from windlass.data.sources.source import hub_source
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import UserError

GLOBAL_BATCH = 6


class Texts:
    """Files of documents in memory."""

    name = "texts"

    def __init__(self, *files: list[str]) -> None:
        self.files = files
        self.num_files = len(files)
        self.opened: list[tuple[int, int]] = []

    def documents(self, file: int, skip: int) -> Iterator[str]:
        self.opened.append((file, skip))
        return iter(self.files[file][skip:])


def stream_over(files: Any, tiny: Tokenizer, seed: int | None = 0, length: int = 16, window: int = 5) -> Stream:
    return Stream(files, tiny, sequence_length=length, seed=seed, shuffle_window=window)


def plain(sequence: Sequence) -> tuple[str, list[int], list[int]]:
    return sequence.id, sequence.tokens.tolist(), sequence.document_starts.tolist()


class Readers:
    """Ranks of one world that read the positions p % world == rank."""

    def __init__(self, open_one: Callable[[], Sequences], world: int) -> None:
        self.world = world
        self.readers = [open_one() for _ in range(world)]
        self.state: dict[str, Any] = {"lanes": {}}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        for reader in self.readers:
            reader.restore(step, json.loads(json.dumps(state)))

    def step(self, step: int) -> list[Any]:
        found: dict[int, Any] = {}
        lanes: dict[str, Any] = {}
        for rank, reader in enumerate(self.readers):
            positions = list(range(rank, GLOBAL_BATCH, self.world))
            batch = reader.batch(step, GLOBAL_BATCH, positions)
            found.update(zip(positions, map(plain, batch.sequences), strict=True))
            assert batch.state
            for lane, state in batch.state["lanes"].items():
                assert (
                    lanes.setdefault(lane, state) == state
                )  # shared lanes are at the same place for all who read them
        self.state = {"lanes": lanes}
        return [found[position] for position in sorted(found)]


FILES = [texts(9, 0), texts(4, 1), [], texts(12, 2), ["", *texts(3, 3), ""]]


def whole(
    files: Any, tiny: Tokenizer, steps: int, seed: int | None = 0
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    readers = Readers(lambda: stream_over(files, tiny, seed), 1)
    read, states = [], []
    for step in range(steps):
        read.append(readers.step(step))
        states.append(readers.state)
    return read, states


def test_without_shuffling_it_is_the_text_in_order(tiny: Tokenizer) -> None:
    """One lane, one epoch: windows put together are the documents' tokens."""
    files = Texts(texts(5, 0), texts(5, 1))
    stream = stream_over(files, tiny, seed=None)
    tokens = [token for ids in tiny.encode_documents(texts(5, 0) + texts(5, 1)) for token in ids]
    read: list[int] = []
    for step in range((len(tokens) - 1) // 16):
        (sequence,) = stream.batch(step, 1, [0]).sequences
        assert sequence.tokens.tolist() == tokens[step * 16 : step * 16 + 17]
        read += sequence.tokens.tolist()[:-1]
    assert read == tokens[: len(read)]


def test_document_starts(tiny: Tokenizer) -> None:
    stream = stream_over(
        Texts(["a", "b", "Emma Woodhouse, handsome, clever, and rich " * 3]), tiny, seed=None, length=8
    )
    first, second = (stream.batch(step, 1, [0]).sequences[0] for step in range(2))
    assert first.document_starts.tolist() == [0, 2, 4]
    assert second.document_starts.tolist() == []


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_any_number_of_readers_reads_the_same(tiny: Tokenizer, world: int, num_files: int) -> None:
    files = Texts(*[texts(7 + i, i) for i in range(num_files)])
    expected, states = whole(files, tiny, 12)
    readers = Readers(lambda: stream_over(files, tiny), world)
    for step in range(12):
        assert readers.step(step) == expected[step]
        assert readers.state == states[step]


def test_restore_at_every_step(tiny: Tokenizer) -> None:
    files = Texts(*FILES)
    expected, states = whole(files, tiny, 40)
    for step in range(1, 40):
        readers = Readers(lambda: stream_over(files, tiny), 1)
        readers.restore(step, states[step - 1])
        assert readers.step(step) == expected[step]
        assert readers.state == states[step]


@pytest.mark.parametrize("worlds", [(2, 1, 4), (4, 3, 2), (1, 6, 1)])
@pytest.mark.parametrize("every", [1, 3])
def test_restores_in_a_row_on_other_worlds(tiny: Tokenizer, worlds: tuple[int, ...], every: int) -> None:
    files = Texts(*FILES)
    expected, _ = whole(files, tiny, 30)
    state: dict[str, Any] = {"lanes": {}}
    step = 0
    for turn in range(9):
        readers = Readers(lambda: stream_over(files, tiny), worlds[turn % len(worlds)])
        readers.restore(step, state)
        for _ in range(every):
            assert readers.step(step) == expected[step]
            step += 1
        state = readers.state


class SharedReaders(Readers):
    """Ranks that read at the same time, each its own lanes, and agree on files as ranks of a trainer do."""

    def __init__(self, open_one: Callable[[], Stream], world: int) -> None:
        super().__init__(open_one, world)
        self.barrier = threading.Barrier(world)
        self.asked: list[list[int]] = [[] for _ in range(world)]
        self.handed: list[int] = []  # the lanes that were handed a file, in the order of the file list
        for rank, reader in enumerate(self.readers):
            assert isinstance(reader, Stream)
            reader.share(functools.partial(self.exchange, rank))

    def exchange(self, rank: int, lanes: Collection[int], num_lanes: int) -> list[int]:
        self.asked[rank] = list(lanes)
        self.barrier.wait(10)
        union = sorted({lane for asked in self.asked for lane in asked})
        if rank == 0:
            self.handed += union
        self.barrier.wait(10)
        return union

    def step(self, step: int) -> list[Any]:
        def read(rank: int) -> Any:
            return self.readers[rank].batch(step, GLOBAL_BATCH, list(range(rank, GLOBAL_BATCH, self.world)))

        with ThreadPoolExecutor(self.world) as threads:
            batches = list(threads.map(read, range(self.world)))
        found = {
            position: plain(sequence)
            for rank, batch in enumerate(batches)
            for position, sequence in zip(range(rank, GLOBAL_BATCH, self.world), batch.sequences, strict=True)
        }
        self.state = {"lanes": {lane: place for batch in batches for lane, place in batch.state["lanes"].items()}}
        return [found[position] for position in sorted(found)]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sizes=SIZES,
    worlds=st.lists(st.integers(1, GLOBAL_BATCH), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3, 100]),
)
@example(sizes=[7, 10, 13, 16, 19], worlds=[1], window=4)
@example(sizes=[7, 10, 13, 16, 19], worlds=[3, 1, 2, 6], window=5)
@example(sizes=[30, 1, 1, 1], worlds=[4, 2], window=None)
@example(sizes=[0, 0, 3, 0], worlds=[2, 3], window=100)
def test_every_document_is_read_once_in_every_epoch(sizes: list[int], worlds: list[int], window: int | None) -> None:
    """Over lanes, ranks, restores and epochs: the lanes' tokens are the documents of the files they were handed."""
    tiny = load_tokenizer("tiny")
    files = Texts(*[texts(size, number, longest=12) for number, size in enumerate(sizes)])
    seed = None if window is None else 3

    def opened() -> Stream:
        return stream_over(files, tiny, seed, window=window or 1)

    stream = opened()
    tokens: dict[str, list[int]] = defaultdict(list)
    total = sum(len(ids) for file in files.files for ids in tiny.encode_documents(file))
    state: dict[str, Any] = {"lanes": {}}
    owners: list[str] = []  # the lane of every entry of the file list
    step = 0
    while len(owners) < 3 * len(sizes):
        readers = SharedReaders(opened, worlds[step % len(worlds)])
        readers.restore(step, state)
        for _ in range(1 + total // (4 * GLOBAL_BATCH * 16)):
            for name, sequence, _starts in readers.step(step):
                tokens[name.split(":")[1]] += sequence[:-1]
            step += 1
        owners += map(str, readers.handed)
        state = json.loads(json.dumps(readers.state))
        assert {place[3] for place in state["lanes"].values()} == {len(owners)}
    for lane, read in tokens.items():
        documents = documents_in(read, tiny)
        for entry in (entry for entry, owner in enumerate(owners) if owner == lane):
            expected = [
                tuple(ids) for ids in tiny.encode_documents(list(filter(None, files.files[stream.file_of(entry)])))
            ]
            own, documents = documents[: len(expected)], documents[len(expected) :]
            assert not Counter(own) - Counter(expected)  # the lane may be in the middle of it
            if window in (None, 1):
                assert own == expected[: len(own)]
        assert not documents
    for epoch in range(3):
        one = [stream.file_of(epoch * len(sizes) + place) for place in range(len(sizes))]
        assert sorted(one) == list(range(len(sizes)))


def documents_in(tokens: list[int], tiny: Tokenizer) -> list[tuple[int, ...]]:
    """The whole documents among tokens that begin with one."""
    documents, begin = [], 0
    for place, token in enumerate(tokens, start=1):
        if token == tiny.eos_id:
            documents.append(tuple(tokens[begin:place]))
            begin = place
    return documents


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_no_document_is_left_behind(tiny: Tokenizer, lanes: int) -> None:
    """As seen from outside: how often every document was read, of files of different sizes, step by step."""
    sizes = (7, 10, 13, 16, 19)
    files = Texts(*[texts(size, number, longest=12) for number, size in enumerate(sizes)])
    stream = stream_over(files, tiny, seed=3)
    read: dict[str, list[int]] = defaultdict(list)
    encoded = {tuple(tiny.encode_documents([text])[0]): text for file in files.files for text in file}
    for step in range(400 // lanes):
        for sequence in stream.batch(step, lanes, list(range(lanes))).sequences:
            read[sequence.id.split(":")[1]] += sequence.tokens.tolist()[:-1]
    times = Counter[str]()
    for tokens in read.values():
        times.update(encoded[document] for document in documents_in(tokens, tiny))
    counts = [times[text] for file in files.files for text in file]
    assert min(counts) >= 2
    assert max(counts) - min(counts) <= 1 + (lanes > 1)  # a file that is being read, and one that waits for its turn


def order_of_documents(files: Texts, tiny: Tokenizer, window: int, steps: int) -> list[int]:
    """The documents of numbered texts in the order in which one lane reads them."""
    stream = stream_over(files, tiny, length=512, window=window)
    tokens: list[int] = []
    for step in range(steps):
        tokens += stream.batch(step, 1, [0]).sequences[0].tokens.tolist()[:-1]
    return [int(tiny.decode(document[:-1])) for document in documents_in(tokens, tiny)]


def test_documents_move_far_and_differently_in_every_epoch(tiny: Tokenizer) -> None:
    """In blocks of W uniformly shuffled documents each moves by W / 3 on average."""
    count, window = 2000, 250
    numbered = Texts([str(number) for number in range(count)])
    order = order_of_documents(numbered, tiny, window, 40)
    epochs = [order[:count], order[count : 2 * count]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
        moves = [abs(place - number) for place, number in enumerate(epoch)]
        assert 0.28 * window < sum(moves) / count < 0.36 * window
        assert max(moves) < window
        neighbours = sum(after - before == 1 for before, after in pairwise(epoch))
        assert neighbours < 4 * count / window  # as many as chance leaves side by side, and no more
    assert epochs[0] != epochs[1]
    assert order_of_documents(numbered, tiny, 1, 20)[:count] == list(range(count))


def test_a_window_holds_no_more_text_than_it_may(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ends with the document that fills it, and a resume reads the same block."""
    monkeypatch.setattr("windlass.data.sequences.stream.CHARACTERS_HELD", 100)
    files = Texts([f"{number} " + "x" * 20 for number in range(60)])
    stream = stream_over(files, tiny, window=50)
    before: dict[str, Any] | None = None
    for step in range(40):
        resumed = stream_over(files, tiny, window=50)
        resumed.restore(step, before)
        batch = stream.batch(step, 1, [0])
        assert plain(resumed.batch(step, 1, [0]).sequences[0]) == plain(batch.sequences[0])
        before = batch.state
        assert before
        assert before["lanes"]["0"][7] <= 5


def test_another_window_on_a_resume_loses_nothing(tiny: Tokenizer) -> None:
    """The block under way is read to its end; an earlier version's place is a block of one document."""
    files = Texts([str(number) for number in range(200)])
    for window, numbers_saved in ((20, 9), (1, 7)):
        first = stream_over(files, tiny, window=window)
        tokens: list[int] = []
        for step in range(12):
            batch = first.batch(step, 1, [0])
            tokens += batch.sequences[0].tokens.tolist()[:-1]
        assert batch.state
        second = stream_over(files, tiny, window=90)
        second.restore(12, {"lanes": {"0": batch.state["lanes"]["0"][:numbers_saved]}})
        for step in range(12, 60):
            tokens += second.batch(step, 1, [0]).sequences[0].tokens.tolist()[:-1]
        numbers = [int(tiny.decode(document[:-1])) for document in documents_in(tokens, tiny)][:200]
        assert sorted(numbers) == list(range(200))


def test_epochs_go_round_with_all_files_in_each(tiny: Tokenizer) -> None:
    files = Texts(*[texts(3, i) for i in range(5)])
    stream = stream_over(files, tiny)
    dealt = [[stream.file_of(5 * epoch + place) for place in range(5)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(5)) for epoch in dealt)
    assert len({str(epoch) for epoch in dealt}) > 1
    epochs = [stream.batch(step, GLOBAL_BATCH, list(range(GLOBAL_BATCH))).epoch for step in range(40)]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 1


def test_a_reader_opens_only_its_lanes_and_skips_only_in_the_current_file(tiny: Tokenizer) -> None:
    files = Texts(*[texts(6, i) for i in range(6)])
    stream = stream_over(files, tiny, seed=None)
    stream.share(lambda lanes, num_lanes: list(range(num_lanes)) if lanes else [])  # all come to their ends together
    stream.batch(0, 3, [1])
    assert {file for file, _ in files.opened} == {1}
    expected, states = [], []
    stream = stream_over(files, tiny, seed=None)
    for step in range(40):
        batch = stream.batch(step, 3, [0, 1, 2])
        expected.append([plain(sequence) for sequence in batch.sequences])
        states.append(batch.state)
    later, entry = next(
        (i, state["lanes"]["1"][6][0]) for i, state in enumerate(states) if state and state["lanes"]["1"][6][0] > 2
    )  # in its second file
    files.opened.clear()
    resumed = stream_over(files, tiny, seed=None)
    resumed.share(lambda lanes, num_lanes: [])
    resumed.restore(later + 1, states[later])
    assert [plain(sequence) for sequence in resumed.batch(later + 1, 3, [1]).sequences] == [expected[later + 1][1]]
    assert {file for file, _ in files.opened} == {entry}  # the first file of the lane is done: it is not opened


def test_places_of_an_earlier_version_are_gone_on_from(tiny: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    files = Texts(*[texts(9, i) for i in range(5)])
    stream = stream_over(files, tiny)
    # [lanes, files, windows, epoch, which of the lane's files, document, token]
    stream.restore(4, {"lanes": {str(lane): [3, 5, 4, 0, lane % 2, 2, 1] for lane in range(3)}})
    first = stream.batch(4, 3, [0, 1, 2])
    assert "of an earlier version" in caplog.text
    for lane, sequence in enumerate(first.sequences):
        file = stream.file_of(lane + 3 * (lane % 2))
        (tokens,) = tiny.encode_documents([texts(9, file)[2]])
        assert sequence.tokens.tolist()[: len(tokens) - 1] == tokens[1:][:17]
    assert first.state
    assert {state[3] for state in first.state["lanes"].values()} == {5}


def test_state_is_small(tiny: Tokenizer) -> None:
    stream = stream_over(Texts(["word " * 5000] * 20), tiny)
    batch = stream.batch(0, 2, [0, 1])
    assert len(json.dumps(batch.state)) < 100


def test_going_back_and_forth_without_a_state_is_exact(tiny: Tokenizer) -> None:
    files = Texts(*FILES)
    expected, _ = whole(files, tiny, 10)
    readers = Readers(lambda: stream_over(files, tiny), 2)
    for step in (0, 1, 2, 0, 1, 7, 3):  # a validation begins again each time; a jump reads up to the step
        assert readers.step(step) == expected[step]


def test_another_global_batch_or_dataset_is_refused(tiny: Tokenizer) -> None:
    files = Texts(*FILES)
    _, states = whole(files, tiny, 3)
    smaller = stream_over(files, tiny)
    smaller.restore(3, states[2])
    with pytest.raises(UserError, match="does not fit this run"):
        smaller.batch(3, 3, [0])
    other = stream_over(Texts(*FILES, ["more"]), tiny)
    other.restore(3, states[2])
    with pytest.raises(UserError, match="does not fit this run"):
        other.batch(3, GLOBAL_BATCH, [0])


@pytest.mark.parametrize("seed", [None, 0])
def test_lanes_are_carried_over_empty_files(tiny: Tokenizer, seed: int | None) -> None:
    stream = stream_over(Texts(texts(9, 0), [], texts(9, 1), ["", ""]), tiny, seed)
    for step in range(20):
        assert len(stream.batch(step, 2, [0, 1]).sequences) == 2


def test_nothing_but_empty_files_is_an_error(tiny: Tokenizer) -> None:
    with pytest.raises(UserError, match="holds no documents"):
        stream_over(Texts([""], [], ["", ""]), tiny).batch(0, 2, [0, 1])


@pytest.mark.parametrize("compressed", [False, True])
def test_local_files_through_datasets(
    write_files: Callable[..., list[Path]], tiny: Tokenizer, compressed: bool
) -> None:
    counts = (9, 4, 12)
    paths = write_files(*counts, compressed=compressed)
    run = run_on("hf:json", files=[str(path) for path in paths], shuffle_window=5)
    expected, states = whole(Texts(*[texts(count, i) for i, count in enumerate(counts)]), tiny, 20)

    def opened() -> Sequences:
        found = open_sequences(run, "train", tokenizer="tiny")
        assert found is not None
        assert found.num_sequences is None
        return found

    readers = Readers(opened, 2)
    for step in range(20):
        if step % 4 == 3:
            readers.restore(step, readers.state)
        assert readers.step(step) == expected[step]
        assert readers.state == states[step]


def test_parquet_and_text_through_datasets(tmp_path: Path, tiny: Tokenizer) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts(40)}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.txt").write_text("\n".join(texts(40)) + "\n")
    expected, states = whole(Texts(texts(40)), tiny, 8, seed=None)
    for kind, name in (("parquet", "a.parquet"), ("text", "a.txt")):
        run = run_on(f"hf:{kind}", files=[str(tmp_path / name)], shuffle=False)
        stream = open_sequences(run, "train", tokenizer="tiny")
        assert stream
        for step in (0, 1, 5, 2):
            stream.restore(step, states[step - 1] if step else None)
            batch = stream.batch(step, GLOBAL_BATCH, list(range(GLOBAL_BATCH)))
            assert [plain(sequence) for sequence in batch.sequences] == expected[step]


def test_errors_at_open(tmp_path: Path, write_files: Callable[..., list[Path]]) -> None:
    def fails(message: str, **data: Any) -> str:
        with pytest.raises(UserError, match=message) as caught:
            open_sequences(run_on("hf:json", **data), "train", tokenizer="tiny")
        return str(caught.value)

    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"text": ""}\n{"text": null}\n')
    fails("holds no documents", files=[str(blank)])
    assert "id" in fails("have no field 'body'", files=[str(write_files(3)[0])], text_field="body")
    fails("is no text", files=[str(write_files(3)[0])], text_field="id")
    fails("cannot be opened", files=[str(tmp_path / "missing.jsonl")])
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"text": "x"}\n{"text"\n')
    fails("cannot be read at document 0 of file 0", files=[str(torn)])
    fails("data.holdout cannot be taken", files=["x"], holdout=0.1)


class Flaky(HubFiles):
    """A source whose connection breaks."""

    def __init__(self, path: Path, breaks: int, error: Exception) -> None:
        self.delays: list[float] = []
        self.left = breaks
        self.error = error
        source = hub_source("hf:json", config=None, split="train", files=(str(path),), text_field="text")
        super().__init__(source, sleep=self.delays.append)

    def _rows(self, file: int, skip: int) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(super()._rows(file, skip)):
            if number == 3 and self.left:
                self.left -= 1
                raise self.error
            yield row


def test_reading_goes_on_where_it_broke(write_files: Callable[..., list[Path]]) -> None:
    flaky = Flaky(write_files(30)[0], breaks=7, error=ConnectionError("reset"))
    assert list(flaky.documents(0, 2)) == texts(30)[2:]
    assert flaky.delays == [0.5] * 7  # each time something was read, so it starts from the shortest wait


def test_it_gives_up_after_a_while(write_files: Callable[..., list[Path]]) -> None:
    flaky = Flaky(write_files(3)[0], breaks=0, error=ConnectionError())
    flaky._rows = lambda file, skip: (_ for _ in ()).throw(ConnectionError("no route"))  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"hf:json, split train cannot be read at document 0 .* after 7 tries"
    ) as caught:
        list(flaky.documents(0, 0))
    assert "no route" in str(caught.value)
    assert flaky.delays == [0.5, 1, 2, 4, 8, 16]
